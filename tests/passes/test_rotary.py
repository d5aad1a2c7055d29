# SPDX-License-Identifier: Apache-2.0
"""Rotary operators as plain math: as near to the truth as the operators, at every size, or left with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from large_rows import few
from probe import Probe, block_of
from torch.nn import functional

from nexfort_engine.guards.shape_guards import Conditions
from nexfort_engine.lowering import inductor
from nexfort_engine.passes.rotary import _NAMES, left, plan, rotaries

pytest.importorskip("comfy_kitchen", reason="the operators are of a package that ComfyUI requires")

T = torch.Tensor
ALL = [
    kind + halves + one for kind in ("apply_rope", "rms_rope") for halves in ("", "_split_half") for one in ("", "1")
]
OPERATORS = [name for name in ALL if hasattr(torch.ops.comfy_kitchen, name)]  # older versions have two
AUTO = torch.export.Dim.AUTO
EPSILON = 1e-6


class Turned(torch.nn.Module):
    """One operator on one or two tensors."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: T, y: T, table: T, scale: T, other: T) -> list[T]:
        one = self.name.endswith("1")
        scales = () if self.name.startswith("apply") else (scale,) if one else (scale, other)
        found = getattr(torch.ops.comfy_kitchen, self.name)(*((x,) if one else (x, y)), table, *scales)
        return [found] if one else list(found)


def truth(name: str, x: T, table: T, scale: T) -> T:
    """In fp64: each pair as a vector, times its matrix."""
    wide, halves = x.double(), "_split_half" in name
    if name.startswith("rms"):
        wide = functional.rms_norm(wide, wide.shape[-1:], scale.double(), EPSILON)
    pairs = wide.unflatten(-1, (2, -1)).transpose(-1, -2) if halves else wide.unflatten(-1, (-1, 2))
    result = (table.double() @ pairs[..., None])[..., 0]
    return (result.transpose(-1, -2) if halves else result).flatten(-2)


def graph_of(module: torch.nn.Module, *args: T) -> Any:
    """Captured with every size a symbol that is no 1, as the engine captures."""
    x, y, table, *scales = args  # heads are as wide as weights say
    sizes = (x.shape[:-1], y.shape[:-1], table.shape, *[() for _ in scales])
    dims = tuple({i: AUTO for i, size in enumerate(shape) if size > 1} for shape in sizes)
    with torch.no_grad():
        return torch.export.export(module, args, dynamic_shapes=dims, strict=False).graph_module


def run(graph: Any, args: tuple[T, ...]) -> list[T]:
    graph.recompile()
    with torch.no_grad():
        return list(graph(*args))


def operators_in(graph: Any) -> int:
    return sum("comfy_kitchen" in str(node.target) for node in graph.graph.nodes)


def error(found: T, wanted: T) -> float:
    return float((found.double() - wanted).norm() / wanted.norm().clamp_min(1e-12))


def draw(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> T:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


SIZES = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 6), st.integers(1, 9))
FLOATS = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("name", few(OPERATORS, 1))
@settings(max_examples=8)
@given(
    SIZES,
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
    st.sampled_from(FLOATS),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
)
def test_it_is_as_near_to_the_truth_as_the_operator_is(
    name: str,
    sizes: tuple[int, ...],
    shared: tuple[bool, ...],
    dtype: torch.dtype,
    of_table: torch.dtype,
    across: bool,
) -> None:
    """shared: the table's sizes that are 1. across: heads lie behind tokens."""
    *before, half = sizes
    x, y = (draw((*before, 2 * half), seed, dtype) for seed in (1, 2))
    if across:
        x, y = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (x, y))
    beside = [1 if one else size for one, size in zip(shared, before, strict=True)]
    table = draw((*beside, half, 2, 2), 3, of_table)
    scale, other = (draw((2 * half,), seed, dtype) for seed in (4, 5))
    args = (x, y, table, scale, other)
    module = Turned(name)
    graph, theirs = graph_of(module, *args), module(*args)
    assert rotaries(graph) == 1 and operators_in(graph) == 0 and rotaries(graph) == 0
    graph.graph.lint()
    for found, wanted, tensor, weight in zip(run(graph, args), theirs, (x, y), (scale, other), strict=False):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        said = torch.empty_like(tensor).stride()  # the operators say so to whoever traces them
        assert all(size == 1 or a == b for size, a, b in zip(found.shape, found.stride(), said, strict=True))
        true = truth(name, tensor, table, weight)
        few = torch.finfo(dtype).eps / found.numel() ** 0.5  # chance alone decides how some numbers are rounded
        assert error(found, true) <= 1.1 * error(wanted, true) + few


@pytest.mark.parametrize("name", few(OPERATORS, 3))
@settings(max_examples=10)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.lists(st.integers(1, 4), min_size=1, max_size=7),
    st.sampled_from([*FLOATS, torch.float64, torch.int32, torch.complex64]),
)
def test_whatever_it_is_given_it_is_written_or_left_with_a_reason(
    name: str, sizes: list[int], table_sizes: list[int], dtype: torch.dtype
) -> None:
    """The operators are traced with anything; many a call of these would raise."""
    x, table = torch.zeros(sizes, dtype=dtype), torch.zeros(table_sizes)
    graph = graph_of(Turned(name), x, x.clone(), table, torch.zeros(sizes[-1]), torch.zeros(sizes[-1]))
    (reason,) = [turn.reason for turn in plan(graph)]
    assert left(graph) == ([] if reason is None else [f"comfy_kitchen::{name} is not fused: {reason}"])
    assert rotaries(graph) == (reason is None) == (operators_in(graph) == 0)
    graph.graph.lint()


# ---- what is taken for granted about sizes -------------------------------------------------------------------


def attended(block: Any, text: T, image: T, table: T) -> T:
    """Text and image joined and turned, as Flux does it."""
    parts = [block.linear(part).unflatten(-1, (2, 4)).transpose(1, 2) for part in (text, image)]
    q = torch.cat([functional.rms_norm(part, (4,)) for part in parts], dim=2)
    k = torch.cat(parts, dim=2)
    q, k = torch.ops.comfy_kitchen.apply_rope(q, k, table)
    return functional.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2)


def inputs(batch: int, text: int, image: int, longer: int = 0) -> tuple[T, T, T]:
    return (
        draw((batch, text, 8), 1, torch.float32),
        draw((batch, image, 8), 2, torch.float32),
        draw((batch, 1, text + image + longer, 2, 2, 2), 3, torch.float32),
    )


def test_sizes_that_the_operator_does_not_compare_become_conditions(tmp_path: Path) -> None:
    block = block_of(attended)
    probe = Probe(block, *inputs(2, 3, 7))
    captured = probe.captured
    assert probe.refuses(*inputs(2, 3, 7, longer=1)) is None, "the operator leaves the rest of the table out"
    inductor.lower(captured, tmp_path / "payload", {"nexfort.rotary": True})
    assert operators_in(captured.graph) == 0
    manifest = {"conditions": captured.conditions.as_json()}
    inductor.take_limits(tmp_path / "payload", manifest)
    taken = Conditions(**manifest["conditions"])
    code = inductor.load(tmp_path / "payload", {}, captured.modules, len(captured.weights))
    own = [block.linear.weight, block.linear.bias]
    for call in ((2, 3, 7), (1, 5, 4), (3, 2, 11), (1, 1, 1)):
        given = inputs(*call)
        assert taken.broken([t.shape for t in given]) is None, call
        (found,) = code([*own, *given])
        assert torch.allclose(found, block(*given), atol=1e-5), call
    for change in ((2, 3, 7, 1), (2, 3, 7, -1)):
        assert "==" in (taken.broken([t.shape for t in inputs(*change)]) or "")
    text, image, table = inputs(2, 3, 7)
    assert taken.broken([text.shape, image.shape, table[:1].shape]) is not None, "one row of the table for all"
    assert taken.broken([text.shape, image.shape, (2, 1, 10, 4, 2, 2)]) is not None


def test_parts_are_turned_before_they_are_joined() -> None:
    graph = Probe(block_of(attended), *inputs(2, 3, 7)).captured.graph
    assert rotaries(graph) == 1
    for node in graph.graph.nodes:
        assert "val" in node.meta or node.op == "output", "later passes look at it"
        if node.target is torch.ops.aten.rms_norm.default:
            assert not any(user.target is torch.ops.aten.cat.default for user in node.users)
    assert [len(n.args[0]) for n in graph.graph.nodes if n.target is torch.ops.aten.cat.default] == [2, 2]


def written_between(block: Any, x: T, table: T) -> T:
    first = block.linear(x)
    q = torch.cat([first, block.linear(x * 2)], dim=2)
    first.add_(1)
    return torch.ops.comfy_kitchen.apply_rope1(q, table) + first.sum()


def test_parts_that_are_written_to_meanwhile_are_turned_together() -> None:
    probe = Probe(
        block_of(written_between), draw((2, 3, 4, 8), 1, torch.float32), draw((1, 1, 8, 4, 2, 2), 2, torch.float32)
    )
    graph = probe.captured.graph
    assert rotaries(graph) == 1
    graph.recompile()
    probe.agrees(draw((3, 3, 5, 8), 3, torch.float32), draw((1, 1, 10, 4, 2, 2), 4, torch.float32))


def turned_in_part(block: Any, x: T, table: T) -> T:
    """As many numbers of each head as the table has matrices for, in place, as a decoder of videos does it."""
    rot = table.shape[-3] * 2
    q = functional.rms_norm(block.linear(x), (8,))
    q[..., :rot] = torch.ops.comfy_kitchen.apply_rope1(q[..., :rot], table)
    return q


def test_what_the_table_says_how_much_of_is_turned() -> None:
    block = block_of(turned_in_part)
    x, table = draw((2, 6, 3, 8), 1, torch.float32), draw((1, 6, 1, 3, 2, 2), 2, torch.float32)
    probe = Probe(block, x, table)
    graph = probe.captured.graph
    assert rotaries(graph) == 1 and operators_in(graph) == 0
    graph.graph.lint()
    graph.recompile()
    for batch, length, pairs in ((3, 5, 2), (2, 7, 3)):
        given = draw((batch, length, 3, 8), 3, torch.float32), draw((1, length, 1, pairs, 2, 2), 4, torch.float32)
        assert probe.refuses(*given) is None
        (found,) = graph(*probe.weights, *given)
        assert torch.allclose(found, block(*given), atol=1e-5)


# ---- what stays ----------------------------------------------------------------------------------------------


def one(function: Any, *args: T) -> Any:
    return Probe(block_of(function), *args).captured.graph


X = draw((2, 3, 6, 8), 1, torch.float32)


def table_of(*sizes: int) -> T:
    return draw((*sizes, 4, 2, 2), 2, torch.float32)


def turned_by_a_buffer(block: Any, x: T) -> T:
    return torch.ops.comfy_kitchen.apply_rope1(block.linear(x), block.of_block)


def test_a_table_that_is_longer_stays() -> None:
    graph = one(lambda b, x, t: torch.ops.comfy_kitchen.apply_rope1(b.linear(x), t), X, table_of(1, 1, 9))
    assert rotaries(graph) == 0 and operators_in(graph) == 1
    assert "are not equal in every call" in left(graph)[0]


def test_a_table_of_one_length_does_not_hold_the_call_to_it() -> None:
    block = block_of(turned_by_a_buffer)
    block.register_buffer("of_block", table_of(1, 1, 6))
    probe = Probe(block, X)
    assert rotaries(probe.captured.graph) == 0
    assert "6 are not equal in every call" in left(probe.captured.graph)[0]
    probe.agrees(X[:, :, :4])


def test_a_size_that_no_input_has_alone_is_not_taken_for_granted() -> None:
    def joined(block: Any, x: T, t: T) -> T:
        return torch.ops.comfy_kitchen.apply_rope1(block.linear(x), torch.cat([t, t], 2))

    graph = one(joined, X, table_of(1, 1, 3))
    assert rotaries(graph) == 1, "twice a size of an input"
    graph = one(joined, X, table_of(1, 1, 3))
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            node.meta["val"] = node.meta["val"].flatten()
    assert rotaries(graph) == 0 and "nothing could check" in left(graph)[0]


@pytest.mark.skipif("rms_rope_split_half" not in OPERATORS, reason="this version of the package has none with a norm")
@pytest.mark.parametrize(
    ("part", "scales", "word"), [(4, torch.float32, "not all numbers"), (0, torch.float64, "scale")]
)
def test_what_turns_a_part_of_a_head_or_scales_in_another_dtype_stays(
    part: int, scales: torch.dtype, word: str
) -> None:
    table = draw((1, 1, 6, (part or 8) // 2, 2, 2), 2, torch.float32)
    scale = torch.ones(8, dtype=scales)

    def turn(block: Any, x: T, t: T, s: T) -> T:
        return sum(torch.ops.comfy_kitchen.rms_rope_split_half(block.linear(x), x, t, s, rot_dim=part))

    graph = one(turn, X, table, scale) if scales == torch.float32 else graph_of(_Two(), X, X, table, scale, scale)
    assert rotaries(graph) == 0 and word in left(graph)[0]


class _Two(torch.nn.Module):
    def forward(self, x: T, y: T, table: T, scale: T, other: T) -> list[T]:
        return list(torch.ops.comfy_kitchen.rms_rope(x, y, table, scale))


@pytest.mark.skipif("rms_rope" not in OPERATORS, reason="this version of the package has none with a norm")
def test_keys_may_share_the_scale_of_queries() -> None:
    args = (X, X + 1, table_of(1, 1, 6), torch.ones(8) * 2, torch.ones(8))
    graph, wanted = graph_of(_Two(), *args), _Two()(*args)
    assert rotaries(graph) == 1
    assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(run(graph, args), wanted, strict=True))


def test_graphs_without_any_are_left_alone_where_the_package_was_never_imported() -> None:
    """Operators that are not registered raise when they are asked for."""
    graph = one(lambda b, x: b.linear(x), X)
    before = str(graph.graph)
    assert rotaries(graph) == 0 and str(graph.graph) == before


def test_every_rotary_operator_of_the_package_is_known_by_its_name() -> None:
    there = {
        name for name in torch._C._dispatch_get_all_op_names() if name.startswith("comfy_kitchen::") and "rope" in name
    }
    assert there and {name.removesuffix("_") for name in there} <= _NAMES


def test_one_that_turns_what_another_turned_is_written_too() -> None:
    class Twice(torch.nn.Module):
        def forward(self, x: T, y: T, table: T) -> list[T]:
            one, other = torch.ops.comfy_kitchen.apply_rope(x, y, table)
            return [*torch.ops.comfy_kitchen.apply_rope(torch.ops.comfy_kitchen.apply_rope1(one, table), other, table)]

    args = (X, X + 1, table_of(1, 1, 6))
    graph, wanted = graph_of(Twice(), *args), Twice()(*args)
    assert rotaries(graph) == 3 and operators_in(graph) == 0
    graph.graph.lint()
    assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(run(graph, args), wanted, strict=True))


@pytest.mark.skipif(not hasattr(torch.ops.comfy_kitchen, "apply_rope1_"), reason="older versions have none")
def test_one_that_writes_to_what_it_turns_stays_and_is_told() -> None:
    graph = graph_of(Turned("apply_rope1"), X, X, table_of(1, 1, 6), torch.ones(8), torch.ones(8))
    (node,) = [node for node in graph.graph.nodes if "comfy_kitchen" in str(node.target)]
    node.target = torch.ops.comfy_kitchen.apply_rope1_.default
    assert left(graph) == ["comfy_kitchen::apply_rope1_ is not fused: it writes to the tensor that it turns"]
    assert rotaries(graph) == 0 and operators_in(graph) == 1
