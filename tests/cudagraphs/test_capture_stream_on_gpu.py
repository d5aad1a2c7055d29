# SPDX-License-Identifier: Apache-2.0
"""Steps with operators that allocate for each stream: they are captured on a stream that they have run on."""

from __future__ import annotations

import gc

import pytest
import torch
from gpu_backbone import Backbone, close, inputs

import nexfort_engine
from nexfort_engine.system import capture_stream

pytestmark = pytest.mark.gpu
_workspaces: dict[int, torch.Tensor] = {}


@torch.library.custom_op("nexfort_tests::with_workspace", mutates_args=())
def with_workspace(x: torch.Tensor) -> torch.Tensor:
    """As stream-K products do it: a workspace for each stream, made anew where a larger one is needed."""
    stream = torch.cuda.current_stream().cuda_stream
    held = _workspaces.get(stream)
    if held is None or held.numel() < x.numel():
        torch.cuda.synchronize()  # no allocation of the driver's is permitted in a capture, and neither is this
        if held is not None:
            held.fill_(float("nan"))  # whoever still reads it is wrong
        held = _workspaces[stream] = torch.empty(x.numel(), device=x.device)
    part = held[: x.numel()].view(x.shape)
    part.copy_(x)
    return (part * 2).to(x.dtype)


@with_workspace.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Workspaces(Backbone):
    def forward(self, *args, **kwargs):
        return with_workspace(super().forward(*args, **kwargs))


def test_steps_are_captured_and_a_larger_size_spoils_no_smaller_one() -> None:
    torch.manual_seed(0)
    module = Workspaces().cuda().eval().requires_grad_(False)
    compiled = nexfort_engine.compile(module)
    graphs = compiled._nexfort_engine.graphs
    with torch.inference_mode():
        for sizes in ((1, 16), (2, 24), (1, 16), (2, 48), (1, 16), (2, 24), (1, 16)):
            for seed in range(5):
                given = inputs(*sizes, seed)
                assert close(compiled(*given), module(*given)), (sizes, seed)
        assert graphs._stream is not None
        assert any(step.graph is not None for step in graphs._steps.values())
    assert not [note for note in compiled.report.as_dict()["notes"] if "no CUDA graph" in note]


def test_a_stream_comes_back_when_its_engine_goes() -> None:
    gc.collect()  # engines of other tests give theirs back
    device = torch.device("cuda", torch.cuda.current_device())
    stream = capture_stream.capture_stream(device)
    assert stream is not None
    handle = stream.stream.cuda_stream
    del stream
    gc.collect()
    again = capture_stream.capture_stream(device)
    assert again is not None and again.stream.cuda_stream == handle
    other = capture_stream.capture_stream(device)
    assert other is not None and other.stream.cuda_stream != handle
    x = torch.ones(1 << 20, device="cuda")
    with again.active():
        y = x * 3
    assert float(y.sum()) == 3 << 20
