# SPDX-License-Identifier: Apache-2.0
"""Where the cache lies on each platform when nobody chose a place. The platform's name is all that is pretended."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nexfort_engine.cache import paths


@pytest.fixture(autouse=True)
def nobody_chose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home directory, and no variable that names a place."""
    for name in ("NEXFORT_CACHE_DIR", "LOCALAPPDATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(paths, "inductor_directory", lambda: None)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    return tmp_path


def test_on_windows_it_is_the_local_application_data(
    monkeypatch: pytest.MonkeyPatch, nobody_chose: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert paths.default_root() == nobody_chose / "AppData" / "Local" / "nexfort" / "Cache"
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "Anna Maria" / "Local"))
    assert paths.default_root() == tmp_path / "Anna Maria" / "Local" / "nexfort" / "Cache"


def test_on_a_mac_it_is_the_library(monkeypatch: pytest.MonkeyPatch, nobody_chose: Path) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert paths.default_root() == nobody_chose / "Library" / "Caches" / "nexfort"


def test_elsewhere_it_is_the_cache_directory(monkeypatch: pytest.MonkeyPatch, nobody_chose: Path) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert paths.default_root() == nobody_chose / ".cache" / "nexfort"
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert paths.default_root() == Path("/somewhere/nexfort")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the standard says that such a one is ignored
    assert paths.default_root() == nobody_chose / ".cache" / "nexfort"


@pytest.mark.parametrize("platform", ["win32", "darwin", "linux"])
def test_what_was_chosen_counts_everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, platform: str) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path / "chosen"))
    assert paths.default_root() == tmp_path / "chosen"
