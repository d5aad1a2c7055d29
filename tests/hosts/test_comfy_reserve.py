# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's flags for memory that its user wants free (--reserve-vram, --vram-headroom) hold for what is kept too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nexfort_engine.hosts.comfy.offload import ComfyHome, wanted_free
from nexfort_engine.hosts.comfy.weights import ComfyWeights
from nexfort_engine.weights import prepack_entry

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("comfyui")]
GIB = 1 << 30


@pytest.fixture(params=[(0.4, 0), (6, 0), (0.4, 5)], ids=["as at first", "--reserve-vram 6", "--vram-headroom 5"])
def flags(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[float, float]:
    """What ComfyUI makes of its flags when it starts."""
    import comfy.cli_args
    import comfy.model_management

    reserve, headroom = request.param
    monkeypatch.setattr(comfy.model_management, "EXTRA_RESERVED_VRAM", reserve * GIB)
    monkeypatch.setattr(comfy.cli_args.args, "vram_headroom", headroom, raising=False)  # ComfyUI 0.20 has none
    return reserve, headroom


def test_what_is_kept_beside_weights_leaves_it_free(
    flags: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepack_entry, "_asked_for", [])
    ComfyWeights(torch.nn.Linear(2, 2))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (4 * GIB, 80 * GIB))
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda _: 0)
    made: Any = [SimpleNamespace(device=torch.device("cuda"))]
    assert prepack_entry.room_for(made, lambda _: GIB) is (sum(flags) < 5), "a page that goes is room"


def test_others_leave_for_weights_that_come_back_and_for_it(
    flags: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    import comfy.model_management as management

    asked: list[int] = []
    monkeypatch.setattr(management, "free_memory", lambda size, *_, **__: asked.append(size))
    monkeypatch.setattr(management, "get_free_memory", lambda *_: 2 * GIB)
    home = ComfyHome(lambda: None)  # type: ignore[arg-type]
    home.make_room(torch.device("meta"), GIB)
    assert asked == ([GIB + int(sum(flags) * GIB)] if sum(flags) > 1 else [])
    assert wanted_free(torch.device("cpu")) == 0, "of a card"
