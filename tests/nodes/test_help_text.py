# SPDX-License-Identifier: Apache-2.0
"""The commit of a clone, which goes with a report, and the name of its user, which does not.

What the text holds besides is tested on a real server.
"""

from __future__ import annotations

import getpass
import importlib
import subprocess
import sys
import types
from pathlib import Path

import pytest

NODES = Path(__file__).resolve().parents[2] / "nodes"


@pytest.fixture
def help_text(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The module by itself."""
    package = types.ModuleType("nexfort_help_alone")
    package.__path__ = [str(NODES)]
    monkeypatch.setitem(sys.modules, "nexfort_help_alone", package)
    return importlib.import_module("nexfort_help_alone.help_text")


def git(folder: Path, *arguments: str) -> str:
    names = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *names, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_of_a_clone_is_read_from_its_files(help_text: types.ModuleType, tmp_path: Path) -> None:
    assert help_text.commit(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert help_text.commit(tmp_path) is None, "there is none yet"
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "one")
    made = git(tmp_path, "rev-parse", "HEAD")
    assert help_text.commit(tmp_path) == made
    git(tmp_path, "pack-refs", "--all")
    assert help_text.commit(tmp_path) == made
    git(tmp_path, "worktree", "add", "-q", str(tmp_path / "beside"))
    assert help_text.commit(tmp_path / "beside") == made
    git(tmp_path, "checkout", "-q", "--detach")
    assert help_text.commit(tmp_path) == made
    (tmp_path / ".git" / "HEAD").write_text("")
    assert help_text.commit(tmp_path) is None


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("TORCHINDUCTOR_CACHE_DIR: /tmp/torchinductor_bob", "TORCHINDUCTOR_CACHE_DIR: …/torchinductor_user"),
        ("/tmp/bob.d/bob-x and /tmp/bobsled", "…/user-x and …/bobsled"),
        ("in '/srv/Bob B', /srv/Bob B/, not in /srv/Bob B/x.so", "in '~', ~/, not in …/x.so"),
        ("/home/anna, C:\\Users\\anna\\ and /home/anna/x", "…/~, …/~ and …/x"),
        ("bob.0 of /nexfort/bob/x", "bob.0 of …/x"),
    ],
)
def test_what_is_told_loses_the_users_name(
    help_text: types.ModuleType, monkeypatch: pytest.MonkeyPatch, text: str, left: str
) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "bob")
    monkeypatch.setattr(Path, "home", lambda: Path("/srv/Bob B"))
    assert help_text.without_paths([text]) == [left]
