# SPDX-License-Identifier: Apache-2.0
"""Videos are real files: as many frames as were given, at the rate asked for; names are looked at first."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.unusable import Unusable
from benchmarks.video_file import check_video_file, write_video

FRAMES = [Image.new("RGB", (34, 18), (40 * i, 255 - 40 * i, 10)) for i in range(5)]


@pytest.mark.parametrize("ending", [".mp4", ".mkv"])
def test_a_container_holds_the_frames(ending: str, tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    write_video(tmp_path / f"v{ending}", FRAMES, fps=8)
    with av.open(str(tmp_path / f"v{ending}")) as file:
        shown = [frame.to_image() for frame in file.decode(video=0)]
        assert file.streams.video[0].average_rate == 8
    assert len(shown) == 5 and shown[0].size == (34, 18)
    for given, found in zip(FRAMES, shown, strict=True):
        assert max(abs(a - b) for a, b in zip(given.getpixel((9, 9)), found.getpixel((9, 9)), strict=True)) < 12


def test_an_animated_picture_holds_the_frames(tmp_path: Path) -> None:
    write_video(tmp_path / "v.gif", FRAMES, fps=10)
    with Image.open(tmp_path / "v.gif") as picture:
        assert picture.n_frames == 5 and picture.info["duration"] == 100


def test_a_name_without_a_known_ending_is_refused() -> None:
    with pytest.raises(Unusable, match=r"out\.avi, expected it to end in one of \.mp4"):
        check_video_file("--output-video", "out.avi")


def test_without_pyav_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unusable, match=r"pip install av, or name a \.gif"):
        check_video_file("--output-video", "out.mp4")
    check_video_file("--output-video", "out.gif")
