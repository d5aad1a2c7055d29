# SPDX-License-Identifier: Apache-2.0
"""A video as a file: animated pictures by Pillow, everything else in H.264 by PyAV."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from benchmarks.unusable import Unusable

ANIMATED = (".gif", ".webp", ".png")
CONTAINERS = (".mp4", ".mkv", ".mov")


def check_video_file(flag: str, path: str) -> None:
    """Raise Unusable for a name whose video could not be written at the end."""
    ending = Path(path).suffix.lower()
    if ending not in (*ANIMATED, *CONTAINERS):
        raise Unusable(f"{flag} is {path}, expected it to end in one of {', '.join((*CONTAINERS, *ANIMATED))}")
    if ending in CONTAINERS and importlib.util.find_spec("av") is None:
        raise Unusable(f"{flag} is {path}, which PyAV writes and it is not installed: pip install av, or name a .gif")


def write_video(path: Path, frames: list[Any], fps: int) -> None:
    """Write frames (PIL pictures of one size) at so many a second."""
    if path.suffix.lower() in ANIMATED:
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=round(1000 / fps), loop=0)
        return
    import av

    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=fps)
        # its colours are stored for two by two pixels, so sides are even
        stream.width, stream.height, stream.pix_fmt = frames[0].width // 2 * 2, frames[0].height // 2 * 2, "yuv420p"
        for frame in frames:
            for packet in stream.encode(av.VideoFrame.from_image(frame.convert("RGB"))):
                file.mux(packet)
        for packet in stream.encode():
            file.mux(packet)
