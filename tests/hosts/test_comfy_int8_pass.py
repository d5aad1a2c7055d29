# SPDX-License-Identifier: Apache-2.0
"""Layers in int8 by the engine's operators in a file that ComfyUI loads, with LoRAs and without, on a CPU."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from patchers import CONFIG, distance
from patchers import sample as sample_any
from quantised import CHANNELS, load, plain_weights, quantised_weights
from subjects import graphs_as_they_are

from nexfort_engine.capture.types import Captured
from nexfort_engine.hosts.comfy import model as host
from nexfort_engine.kernels.quantize_rows import op as quantize_rows
from nexfort_engine.lowering import inductor
from nexfort_engine.passes import int8_linear

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("comfyui", "artefact_cache")]
sample = functools.partial(sample_any, channels=CHANNELS)
# of a picture of this network when inputs of its layers differ by 2e-7 of themselves, which moves digits: 0.012
FLOOR = 0.03


def _lora(patcher: Any, strength: float) -> Any:
    clone, draw = patcher.clone(), torch.Generator().manual_seed(3)
    matrices = {n: w for n, w in plain_weights().items() if "blocks" in n and n.endswith("weight") and w.ndim == 2}
    patches = {f"diffusion_model.{n}": (0.05 * torch.randn(w.shape, generator=draw),) for n, w in matrices.items()}
    assert len(clone.add_patches(patches, strength)) == len(patches)
    return clone


def test_pictures_are_those_of_the_hosts_operator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A LoRA is in the weights, which are rounded to int8 once, so the code that was made serves it."""
    if not hasattr(torch.ops, "comfy_kitchen") or not hasattr(torch.ops.comfy_kitchen, "int8_linear"):
        pytest.skip("this ComfyUI computes layers in int8 otherwise")
    monkeypatch.setattr(int8_linear, "_DEVICE", "cpu")
    monkeypatch.setattr(int8_linear, "LEAST", 1)
    monkeypatch.setattr(quantize_rows, "DTYPES", (torch.float32,))
    taken = []
    with graphs_as_they_are(), pytest.MonkeyPatch.context() as inner, torch.inference_mode():
        keep = inductor.lower

        def passed(captured: Captured, *rest: Any) -> None:
            taken.append(int8_linear.int8_linears(captured.graph))
            captured.graph.graph.lint()
            captured.graph.recompile()
            keep(captured, *rest)

        inner.setenv("NEXFORT_CACHE_DIR", str(tmp_path))  # the graphs are not those that others share
        inner.setattr(inductor, "lower", passed)
        patcher = load(quantised_weights("int8_tensorwise"))
        compiled = host.attach(patcher, CONFIG)
        assert distance(sample(compiled), sample(patcher)) <= FLOOR
        made = len(taken)
        assert sum(taken) >= 8 and not host.report_of(compiled).as_dict()["eager"]
        for strength in (1.0, 0.5):
            with_lora = sample(_lora(patcher, strength))
            assert distance(with_lora, sample(patcher)) > 3 * FLOOR
            assert distance(sample(_lora(compiled, strength)), with_lora) <= FLOOR
        assert len(taken) == made, "nothing was captured anew"
