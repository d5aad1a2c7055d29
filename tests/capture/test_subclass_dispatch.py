# SPDX-License-Identifier: Apache-2.0
"""Operators on tensor subclasses in a trace: the subclass's own code is what the graph holds."""

from __future__ import annotations

import pytest
import torch
from scaled import Layer, Scaled, weight
from torch import nn

from nexfort_engine.capture.subclass_dispatch import own_operators


class Rebuilt(nn.Module):
    """Makes the subclass of plain inputs and uses it, as a capture does."""

    def forward(self, whole: torch.Tensor, scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with own_operators():
            made = Scaled(whole, scale)
            return torch.nn.functional.linear(x, made) + (made.to(x.dtype) * 2.0).mean()


def traced() -> torch.export.ExportedProgram:
    scaled, x = Scaled.of(weight()), torch.randn(5, 8)
    dims = ({}, {}, {0: torch.export.Dim.AUTO})
    with torch.no_grad():
        return torch.export.export(Rebuilt(), (scaled.whole, scaled.scale, x), dynamic_shapes=dims, strict=False)


def test_a_trace_holds_the_operators_that_eager_runs() -> None:
    program, scaled = traced(), Scaled.of(weight(4))
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert "aten.linear.default" in names and "aten.mean.default" in names, names
    assert not [node for node in program.graph.nodes if isinstance(node.meta.get("val"), Scaled)]
    x = torch.randn(7, 8)  # another size than the traced one, and other data
    with torch.inference_mode():
        wanted = torch.nn.functional.linear(x, scaled) + (scaled * 2.0).mean()
        assert torch.allclose(program.module()(scaled.whole, scaled.scale, x), wanted, atol=1e-6)


def test_without_it_such_a_trace_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """If torch learns to trace them, this file has no purpose left."""
    import contextlib

    monkeypatch.setitem(Rebuilt.forward.__globals__, "own_operators", contextlib.nullcontext)
    with pytest.raises(RuntimeError, match="NotImplemented"):
        traced()


def test_outside_a_trace_nothing_changes() -> None:
    layer, x = Layer(Scaled.of(weight())), torch.randn(5, 8)
    with torch.inference_mode():
        wanted = layer(x)
        with own_operators():
            assert torch.equal(layer(x), wanted)
