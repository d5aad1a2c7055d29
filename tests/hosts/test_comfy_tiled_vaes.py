# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's video autoencoders, tiny, in tiles as its VAE object makes them: equal to eager, and compiled once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from patchers import CONFIG, TOLERANCE, distance
from subjects import graphs_as_they_are
from tiny_video_vaes import VIDEO_VAES, Kind

from nexfort_engine.hosts.comfy import model as host

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("comfyui", "artefact_cache")]
BOUND = "it was compiled for other sizes"
# frames, height and width of latents in tiles of so many, the last of which are smaller; the last size is one tile
NAMES = ("wan21", "hunyuan15", "ltx", "minimax", "cosmos", "seedvr", "hunyuan", "cogvideo", "taehv", "mochi")
TILES = {"tile_t": 3, "tile_y": 4, "tile_x": 4, "overlap": 2, "overlap_t": 1}
SIZES = ((3, 4, 7), (3, 7, 4), (5, 7, 5), (3, 4, 4))
_OF_A_KIND: dict[str, Any] = {
    "ltx": {"sizes": ((3, 2, 4), (3, 4, 2), (5, 4, 3)), "tile_y": 2, "tile_x": 2, "overlap": 1},
    "minimax": {"sizes": ((7, 2, 5), (7, 5, 2), (12, 3, 5))},
    "seedvr": {"sizes": ((3, 4, 7), (3, 7, 4), (5, 7, 5))},
}


def tiled(vae: Any, kind: Kind, name: str, size: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """A video in tiles, and what it is encoded to in tiles."""
    given = {**TILES, **{key: value for key, value in _OF_A_KIND.get(name, {}).items() if key != "sizes"}}
    video = vae.decode_tiled(kind.of_size(*size), **given)
    frames, side = kind.ratio
    sides = {key: given[key] * side for key in ("tile_y", "tile_x", "overlap")}
    times = {"tile_t": given["tile_t"] * frames, "overlap_t": given["overlap_t"] * frames}
    return video, vae.encode_tiled(video[0], **sides, **times)


@pytest.mark.large  # test_comfy_vae.py has tiles, test_comfy_video_vaes.py other sizes and lengths
@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_tiles_are_eager_s_and_compiled_once(name: str) -> None:
    kind = VIDEO_VAES[name]
    eager = kind.vae()
    with graphs_as_they_are():
        compiled = host.attach_vae(eager, CONFIG)
        report = host.report_of(compiled)
        assert report is not None
        for number, size in enumerate(_OF_A_KIND.get(name, {}).get("sizes", SIZES)):
            mark = report.mark()
            wanted, found = tiled(eager, kind, name, size), tiled(compiled, kind, name, size)
            assert all(distance(one, other) < TOLERANCE for one, other in zip(found, wanted, strict=True)), size
            new = report.since(mark)
            assert bool(new["artefacts"]) == (number == 0), size
            assert not new["eager"] or (kind.loops and all(BOUND in row["reason"] for row in new["eager"])), size
