# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's video autoencoders, tiny: chunk after chunk compiled, equal to eager, at any size and number of frames."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from patchers import CONFIG, TOLERANCE, distance
from subjects import graphs_as_they_are
from tiny_video_vaes import VIDEO_VAES

from nexfort_engine.hosts.comfy import model as host

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("comfyui", "artefact_cache")]
BOUND = "it was compiled for other sizes"  # one frame after many, in a part that keeps none
SLOW = [name for name in VIDEO_VAES if name != "ltx"]


def attached(model: Any) -> Any:
    return host.attach_vae(SimpleNamespace(first_stage_model=model), CONFIG).first_stage_model


def compared(compiled: Any, model: Any, latent: torch.Tensor) -> tuple[dict[str, Any], torch.Tensor]:
    """What the report gained by a decode and an encode, both equal to eager; and the video."""
    mark = compiled.report.mark()
    video = model.decode(latent)
    assert distance(compiled.decode(latent), video) < TOLERANCE
    assert distance(compiled.encode(video), model.encode(video)) < TOLERANCE
    return compiled.report.since(mark), video


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.large] if n in SLOW else []) for n in VIDEO_VAES])
@torch.inference_mode()
def test_a_video_is_decoded_and_encoded_compiled_at_any_size_and_length(name: str) -> None:
    kind = VIDEO_VAES[name]
    model = kind.made()
    with graphs_as_they_are():
        compiled = attached(model)
        new, _ = compared(compiled, model, kind.latent())
        assert new["artefacts_compiled"] and not new["eager"]
        new, _ = compared(compiled, model, kind.latent(turned=True))
        assert not new["artefacts"] and not new["eager"]
        for frames in kind.frames:
            new, _ = compared(compiled, model, kind.latent(frames))
            assert all(BOUND in row["reason"] for row in new["eager"]), frames
            assert not new["eager"] or frames == 1 or kind.loops, frames
        for frames in kind.frames:  # each form that chunks have is there by now
            if kind.loops:  # each length has code of its own, once for each layout that its caller hands on
                compared(compiled, model, kind.latent(frames, turned=True))
            new, _ = compared(compiled, model, kind.latent(frames, turned=True))
            assert not new["artefacts"], frames
    assert not compiled.report.as_dict()["notes"]


@torch.inference_mode()
def test_a_failure_in_the_middle_of_a_video_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = VIDEO_VAES["ltx"]
    model = kind.made()
    with graphs_as_they_are():
        compiled = attached(model)
        _, video = compared(compiled, model, kind.latent(4))
        blocks = model.encoder.down_blocks
        calls: list[int] = []
        own = type(blocks[-1]).forward

        def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) == 2:
                raise RuntimeError("in the middle of a video")
            return own(self, *args, **kwargs)

        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="in the middle of a video"):
            patch.setattr(blocks[-1], "forward", fails.__get__(blocks[-1]), raising=False)
            compiled.encode(video)
        held = [m.temporal_cache_state for m in model.modules() if hasattr(m, "temporal_cache_state")]
        assert held and not any(held)
        compared(compiled, model, kind.latent(4))


@torch.inference_mode()
def test_two_threads_decode_two_videos_at_once() -> None:
    kind = VIDEO_VAES["ltx"]
    model = kind.made()
    with graphs_as_they_are():
        compiled = attached(model)
        for frames in (2, 3):  # what is missing is planned by running the network, whose state is then put back
            compared(compiled, model, kind.latent(frames))
        wanted = [model.decode(kind.latent(frames)) for frames in (2, 3)]
        found: dict[int, torch.Tensor] = {}

        def decode(number: int) -> None:
            with torch.inference_mode():
                found[number] = compiled.decode(kind.latent(2 + number))

        threads = [threading.Thread(target=decode, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(distance(found[number], wanted[number]) < TOLERANCE for number in range(2))
