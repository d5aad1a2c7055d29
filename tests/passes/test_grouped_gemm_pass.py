# SPDX-License-Identifier: Apache-2.0
"""Layers that are computed together are so in every backbone, and nothing changes."""

from __future__ import annotations

import pytest
import torch
from backbones import make
from subjects import TOLERANCE, cold_subject, graphs_as_they_are, names

from nexfort_engine.capture.types import Captured
from nexfort_engine.kernels.grouped_gemm import op as kernel
from nexfort_engine.lowering import inductor
from nexfort_engine.passes import grouped_gemm


@pytest.mark.parametrize("name", names(few=("torch_dit", "comfy_unet")))
def test_layers_of_one_input_together_give_what_they_give_alone(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for on a CPU, in 32 bits and for sizes of any kind, so that tiny backbones have such layers too."""
    monkeypatch.setattr(grouped_gemm, "_DEVICE", "cpu")
    monkeypatch.setattr(kernel, "SMALLEST", 1)
    monkeypatch.setattr(kernel, "DTYPES", (torch.float32,))
    found = {}
    # put back in this order: the outer one replaces the same function
    with graphs_as_they_are(), pytest.MonkeyPatch.context() as inner:
        keep = inductor.lower

        def grouped(captured: Captured, *rest: object) -> None:
            found[len(found)] = grouped_gemm.grouped_linears(captured.graph)
            captured.graph.graph.lint()
            captured.graph.recompile()
            keep(captured, *rest)  # type: ignore[arg-type]

        inner.setattr(inductor, "lower", grouped)
        one = cold_subject(make(host))
        kind = one.tiny.kind
        assert one.same() < TOLERANCE
        assert one.same(batch=1, size=kind.sizes[1], length=kind.lengths[1]) < TOLERANCE
    assert found
    if "unet" in host:
        assert sum(found.values()) >= 2, "keys and values of the prompt"
