# SPDX-License-Identifier: Apache-2.0
"""Compiling with Nexfort leaves the rest of the process alone: every setting, and other users' compile caches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).resolve().parent / "support"


@pytest.mark.slow
def test_settings_and_other_users_caches_are_as_before(tmp_path: Path) -> None:
    users, ours = tmp_path / "users", tmp_path / "ours"
    users.mkdir()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("TRITON")},
        **{"TORCHINDUCTOR_CACHE_DIR": str(users), "NEXFORT_CACHE_DIR": str(ours), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"},
        "PYTHONPATH": os.pathsep.join([str(SUPPORT.parents[1]), str(SUPPORT)]),
    }
    command = [sys.executable, str(SUPPORT / "isolated.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["compiled"] > 0 and not found["eager"]
    assert found["settings"] > 500 and found["files"] > 3, "nothing was looked at"
    assert found["changed"] == {}
    assert not found["files_changed"], "something was written into another user's cache"
    assert found["first"] == {"hit": 0, "miss": 1} and found["again"] == {"hit": 1, "miss": 0}
    assert any(ours.rglob("manifest.json"))
