# SPDX-License-Identifier: Apache-2.0
"""Attention on a real card: torch's kernels by their own operators, measured, remembered, and in CUDA graphs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_kernels import call_of
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import nexfort_engine
from nexfort_engine.attention import operator
from nexfort_engine.attention.backends import KERNELS, Call, nvidia, own
from nexfort_engine.attention.tuner import Chooser, Told, laid, measure
from nexfort_engine.attention.tuning_cache import file_name
from nexfort_engine.reporting.report import Report
from nexfort_engine.system.device_timer import clocked

pytestmark = pytest.mark.gpu
ORDER = (0, 2, 1, 3)
TORCHS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
CALLS: dict[str, dict[str, Any]] = {
    "plain": {"width": 64},
    "heads outermost": {"width": 64, "outermost": "heads"},
    "fp16": {"width": 128, "dtype": torch.float16},
    "72 numbers": {"width": 72},
    "77 keys": {"width": 64, "keys": 77},
    "scaled": {"width": 40, "scale": 0.3},
    "causal": {"width": 64, "keys": 256, "is_causal": True},
    "shared": {"width": 64, "groups": 2},
    "other values": {"width": 64, "values": 32},
    "mask": {"width": 64, "mask": "bool"},
    "mask of 77 keys": {"width": 64, "keys": 77, "mask": "bool"},
    "added mask": {"width": 64, "mask": "added"},
    "mask for all rows": {"width": 64, "mask": "spread"},
}


def on_gpu(name: str) -> Call:
    given = {"rows": 256, "keys": 192, "heads": 4, "dtype": torch.bfloat16, **CALLS[name]}
    masked = given.pop("mask", None)
    call = call_of(**given)
    tensors = [t.cuda() for t in call[:3]]
    mask = None
    if masked is not None:
        mask = torch.rand(2, 1, 1 if masked == "spread" else given["rows"], given["keys"]).cuda() > 0.3
        mask[..., 0] = True
        if masked == "added":
            mask = torch.randn(mask.shape, device="cuda").to(given["dtype"])
        elif masked == "spread":
            mask = mask.expand(2, 1, given["rows"], given["keys"])
    return Call(*tensors, mask, *call[4:])


def by_torch(name: str, call: Call) -> torch.Tensor:
    """What torch gives when it has no other kernel."""
    with sdpa_kernel(TORCHS[name]):
        return own(call)


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.float() - other.float()).norm() / other.float().norm())


@pytest.mark.parametrize("name", CALLS)
@torch.inference_mode()
def test_each_kernel_gives_the_very_bits_that_torch_gives_by_it(name: str) -> None:
    call = on_gpu(name)
    taken = 0
    for kernel in nvidia():
        if kernel.name in TORCHS and kernel.problem(call) is None:
            assert torch.equal(kernel.run(call), by_torch(kernel.name, call)), kernel.name
            taken += 1
    assert taken >= 1


@pytest.mark.parametrize("name", CALLS)
@torch.inference_mode()
def test_the_choice_is_within_twice_the_noise_and_laid_out_as_asked(name: str) -> None:
    call = on_gpu(name)
    with sdpa_kernel(SDPBackend.MATH):
        wide = own(Call(*(t.float() for t in call[:3]), *[_wide(call.mask)], *call[4:]))
        noise = apart(own(call), wide)
    found = Chooser(KERNELS).run(call, ORDER, False, Told())
    assert apart(found, wide) <= 2 * noise + torch.finfo(found.dtype).eps / 2
    assert laid(found, ORDER) is found


def _wide(mask: torch.Tensor | None) -> torch.Tensor | None:
    return mask if mask is None or mask.dtype is torch.bool else mask.float()


@torch.inference_mode()
def test_all_of_torchs_kernels_are_measured_and_the_answer_is_kept(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    call, report, measured = on_gpu("plain"), Report(), []

    def clock(runs: Any, device: torch.device) -> list[float]:
        measured.append(len(runs))
        return clocked(runs, device)

    for _ in range(2):
        Chooser(KERNELS, clock).run(call, ORDER, False, Told(tmp_path, report))
    assert len(measured) == 1, "the second knows it from the file"
    content = json.loads((tmp_path / file_name(torch.cuda.get_device_name())).read_text())
    ((kind, row),) = content["choices"].items()
    able = {k.name for k in nvidia() if k.problem(call) is None and not k.quantises}
    assert {"flash", "efficient"} <= able and set(row["microseconds"]) | set(row.get("left_out", {})) >= able
    assert all(0 < value < 1e5 for value in row["microseconds"].values())
    assert any(kind in text for text in report.as_dict()["notes"])


@torch.inference_mode()
def test_what_the_user_switched_off_is_not_run(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    chooser, call = Chooser(KERNELS), on_gpu("plain")
    chooser.run(call, ORDER, False, Told(tmp_path))
    for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(kernel):
            assert torch.equal(chooser.run(call, ORDER, False, Told(tmp_path)), laid(own(call), ORDER))


@torch.inference_mode()
def test_a_kernel_of_torchs_is_as_fast_as_torchs_own_choice_of_it() -> None:
    """The clock sees what the device does: a run by another way to the same kernel is a tie."""
    query = torch.randn(2, 16, 4096, 64, device="cuda", dtype=torch.float16)
    call = Call(query, query, query)
    row = measure(call, (0, 1, 2, 3), [k for k in nvidia() if k.problem(call) is None and not k.quantises], {}, clocked)
    best = min(value for name, value in row.microseconds.items() if name in TORCHS)
    assert row.microseconds["torch"] >= 0.8 * best
    assert row.microseconds["torch"] <= 1.1 * max(v for name, v in row.microseconds.items() if name in TORCHS)


@contextmanager
def _no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@torch.inference_mode()
def test_nothing_waits_once_it_is_known_and_a_graph_is_as_without_one() -> None:
    call, report = on_gpu("plain"), Report()
    chooser = Chooser(KERNELS)
    wanted = chooser.run(call, ORDER, False, Told(None, report))
    with _no_waiting():
        for _ in range(3):
            chooser.run(call, ORDER, False, Told(None, report))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chooser.run(call, ORDER, False, Told(None, report))
    graph.replay()
    assert torch.equal(found, wanted)


@torch.inference_mode()
def test_in_a_capture_an_unknown_kind_is_torchs_own_choice_and_not_remembered() -> None:
    call, report = on_gpu("plain"), Report()
    chooser = Chooser(KERNELS)
    wanted = laid(own(call), ORDER)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chooser.run(call, ORDER, False, Told(None, report))
    graph.replay()
    assert torch.equal(found, wanted) and "not measured before" in str(report)
    chooser.run(call, ORDER, False, Told(None, report))
    assert "microseconds" in str(report)


# ---- a network ---------------------------------------------------------------------------------------------


class Attending(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Attending() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@torch.inference_mode()
def test_a_network_measures_in_its_first_step_and_is_replayed_as_a_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(operator, "chooser", Chooser(KERNELS))
    torch.manual_seed(0)
    module = Network().cuda().bfloat16().eval().requires_grad_(False)
    compiled = nexfort_engine.compile(module, options={"options": {"attention.measure": True}})
    for length in (500, 300):  # the graph of fewer tokens fits into the memory of the other one
        x = torch.randn(2, length, 256, device="cuda", dtype=torch.bfloat16)
        wanted = module(x)
        with sdpa_kernel(SDPBackend.MATH):
            noise = apart(module(x), wanted)
        for _ in range(4):
            assert apart(compiled(x), wanted) <= 2 * noise + torch.finfo(x.dtype).eps / 2
    data = compiled.report.as_dict()
    assert not data["eager"] and any("microseconds" in text for text in data["notes"]), data
    assert not [text for text in data["notes"] if "no CUDA graph" in text or "not measured" in text], data["notes"]
    steps = compiled._nexfort_engine.graphs._steps.values()
    assert len(steps) == 2 and all(step.graph is not None for step in steps)
    assert list(tmp_path.glob("attention-*.json"))


@pytest.mark.skipif("PYTORCH_CUDA_ALLOC_CONF" in os.environ, reason="an allocator was chosen")
def test_all_of_this_with_the_allocator_that_comfyui_chooses() -> None:
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.startswith("............"), "its tests were run, not skipped"
