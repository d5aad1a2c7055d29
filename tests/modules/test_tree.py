# SPDX-License-Identifier: Apache-2.0
"""Where the weights of a tree of modules are, its structure, and what keeps a block from being captured."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from attribute_blocks import Block  # noqa: E402
from torch import nn  # noqa: E402

from nexfort_engine.modules.tree import WeightSlots, compiled_elsewhere, foreign, structure  # noqa: E402

# ---- weights ------------------------------------------------------------------------------------------------


def test_parameters_buffers_and_loose_tensors_are_weights() -> None:
    slots = WeightSlots(Block())
    assert slots.names == ["inner.table", "inner.loose", "inner.linear.weight", "inner.linear.bias"]
    assert [tuple(w.shape) for w in slots.read()] == [(4,), (4,), (4, 4), (4,)]


def test_weights_are_read_as_they_are_now() -> None:
    block = Block()
    slots = WeightSlots(block)
    block.inner.linear.weight = nn.Parameter(torch.zeros(4, 4))
    block.inner.loose = torch.full((4,), 3.0)
    assert slots.read()[2] is block.inner.linear.weight and slots.read()[1] is block.inner.loose
    del block.inner.loose
    assert slots.read()[1] is None


def test_the_structure_knows_classes_and_shapes_and_no_values() -> None:
    assert json.loads(json.dumps(structure(Block()))) == structure(Block())
    other = Block()
    other.unused, other.inner.eps = "different", 1.0
    assert structure(other) == structure(Block())
    for change in (
        lambda b: setattr(b.inner, "linear", nn.Linear(4, 4, bias=False)),
        lambda b: setattr(b.inner, "linear", nn.Linear(4, 4).half()),
        lambda b: setattr(b, "extra", nn.Identity()),
        lambda b: setattr(b.inner, "loose", torch.ones(5)),
    ):
        other = Block()
        change(other)
        assert structure(other) != structure(Block())


# ---- what keeps a block from being captured -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda b: b.inner.register_forward_hook(lambda *_: None), "forward hook on inner"),
        (lambda b: b.inner.linear.register_forward_pre_hook(lambda *_: None), "forward hook on inner.linear"),
        (lambda b: setattr(b.inner, "forward", lambda x: x), "replaced forward on inner"),
    ],
)
def test_what_others_hung_on_a_block_is_named(change: Callable[[Any], Any], named: str) -> None:
    block = Block()
    assert foreign(block) is None
    change(block)
    assert named in str(foreign(block))


def test_a_module_of_torch_that_another_thread_is_importing_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler is imported ahead on a thread, and what is half imported lacks some of its names."""
    half = ModuleType("torch._dynamo.eval_frame")
    monkeypatch.setitem(sys.modules, half.__name__, half)
    assert not compiled_elsewhere(nn.Linear(2, 2))
    monkeypatch.undo()
    assert compiled_elsewhere(torch.compile(nn.Linear(2, 2), backend="eager"))
