# SPDX-License-Identifier: Apache-2.0
"""A ComfyUI that is newer than what was tried: the report of each engine says so once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nexfort_engine.hosts import comfy_install
from nexfort_engine.hosts.comfy_install import NEWEST_TRIED, comfyui_version, untried

NEWER = "0.45.0"


@pytest.mark.parametrize(
    ("version", "is_told"),
    [
        (NEWER, True),
        ("1.0", True),
        ("0.100.0", True),  # by numbers, and not by letters
        (f"{NEWEST_TRIED}.post1", True),
        (NEWEST_TRIED, False),
        (f"{NEWEST_TRIED}rc1", False),
        ("0.9.0", False),
        ("0.20.1", False),
        ("main", False),
        ("", False),
        (None, False),
    ],
)
def test_what_is_newer_is_told_by_its_version(version: str | None, is_told: bool) -> None:
    told = untried(version)
    assert (told is not None) is is_told
    if told is not None:
        assert version is not None and version in told and NEWEST_TRIED in told


def test_where_versions_cannot_be_compared_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "packaging.version", None)
    assert untried(NEWER) is None


def test_a_version_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    assert comfyui_version(tmp_path) is None
    (tmp_path / "comfyui_version.py").write_bytes(b"__version__ = '\xff'")
    assert comfyui_version(tmp_path) is None


def test_the_page_names_the_newest_that_was_tried() -> None:
    page = Path(comfy_install.__file__).parents[2] / "docs" / "troubleshooting.md"
    assert f"ComfyUI {NEWEST_TRIED}" in page.read_text(encoding="utf-8")


@pytest.mark.comfy
@pytest.mark.usefixtures("comfyui", "artefact_cache")
@pytest.mark.parametrize(("version", "times"), [(NEWER, 1), (NEWEST_TRIED, 0), ("0.20.1", 0), (None, 0)])
def test_the_report_says_it_once(version: str | None, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from backbones import make
    from patchers import CONFIG, patcher_around

    from nexfort_engine.hosts.comfy import model as host

    monkeypatch.setattr(host, "comfyui_version", lambda _: version)
    patcher = patcher_around(make("comfy_flux").module, family="Flux")
    for _ in range(2):
        compiled = host.attach(patcher, CONFIG)
    report = host.report_of(compiled)
    assert report is not None
    assert sum("was not tried" in note for note in report.as_dict()["notes"]) == times
