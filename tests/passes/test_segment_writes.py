# SPDX-License-Identifier: Apache-2.0
"""Writes to several slices of a tensor as selections: the same numbers at any bounds, and few loads in a kernel."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from gpu_video_blocks import INPLACE
from hypothesis import given, settings
from lowering_ahead import code_of, lowered_ahead
from probe import Probe, block_of
from torch.nn import functional

from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.lowering import inductor
from nexfort_engine.passes.segment_writes import segment_writes

T = torch.Tensor
aten = torch.ops.aten
Segments = list[tuple[int, int, int]]


def modulated(self: Any, x: T, table: T, segments: Segments) -> T:
    h = functional.rms_norm(x, (8,))
    for a, b, row in segments:
        h[a:b].mul_(1 + table[row]).add_(table[row + 1])
    return self.linear(h)


def gated(self: Any, x: T, table: T, segments: Segments) -> T:
    """What is added is given for all rows, and the caller's tensor is written to."""
    other = self.linear(x)
    for a, b, row in segments:
        x[a:b].addcmul_(other[a:b], table[row], value=0.5)
    return x


def by_row(self: Any, x: T, table: T, segments: Segments) -> T:
    """Each row of a segment has its own row of the table."""
    h = x * 2
    for a, b, row in segments:
        h[a:b] *= table[torch.arange(a, b) % 3 + row]
    return h


def assigned(self: Any, x: T, table: T, segments: Segments) -> T:
    h = torch.zeros_like(x)
    for a, b, row in segments:
        h[a:b] = x[a:b] * table[row]
    return h


def of_another_type(self: Any, x: T, table: T, segments: Segments) -> T:
    h = x.to(torch.bfloat16)
    for a, b, row in segments:
        h[a:b].mul_(table[row]).sub_(0.25, alpha=2)
    return h


def columns(self: Any, x: T, table: T, segments: Segments) -> T:
    """Along another dimension, of what others look at too."""
    h = (x * 3).mT
    seen = h[1:, :2]
    for a, b, row in segments:
        h[:, a:b].mul_(table[row][:, None])
    return h + seen.sum()


def of_a_layer(self: Any, x: T, table: T, segments: Segments) -> T:
    """The table is a layer's result, which is seen as more rows."""
    rows = self.linear(table).view(table.shape[0] * 2, 4)
    h = x.unflatten(1, (2, 4)) * 1
    for a, b, row in segments:
        h[a:b].mul_(1 + rows[row]).add_(rows[row + 1].tanh())
    return h.flatten(1)


def of_itself(self: Any, x: T, table: T, segments: Segments) -> T:
    """A slice that is multiplied by itself; what the operator gives is read."""
    h, read = x * 1, []
    for a, b, row in segments:
        read.append(h[a:b].mul_(h[a:b]).sum() * table[row, 0])
    return h + sum(read)


def one_slice(self: Any, x: T, table: T, segments: Segments) -> T:
    h = x * 2
    (a, b, row), *_ = segments
    h[a:b].mul_(table[row]).add_(1)
    return h


def whole_numbers(self: Any, x: T, table: T, segments: Segments) -> T:
    h = (x * 9).long()
    for a, b, row in segments:
        h[a:b].add_(row)
    return h


def drawn(rows: int, seed: int = 0) -> tuple[T, T]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 8, generator=generator), torch.randn(9, 8, generator=generator)


FORMS = {
    modulated: 6, gated: 3, by_row: 6, assigned: 3, of_another_type: 6, columns: 3,
    of_a_layer: 6, of_itself: 3,
    one_slice: 0, whole_numbers: 0,
}  # fmt: skip
# segments that meet, that leave rows out, that overlap, that are empty
CALLS = [
    (12, [(0, 4, 3), (4, 7, 2), (7, 12, 5)]), (30, [(0, 9, 5), (9, 10, 0), (10, 30, 1)]),
    (20, [(0, 4, 0), (9, 11, 6), (11, 19, 5)]), (16, [(0, 12, 3), (4, 14, 2), (5, 16, 0)]),
    (14, [(0, 2, 3), (8, 8, 2), (8, 14, 0)]),
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_the_same_numbers_whichever_rows_are_written(form: Any) -> None:
    rows, segments = CALLS[0]
    probe = Probe(block_of(form), *drawn(rows), segments)
    graph = probe.captured.graph
    assert segment_writes(graph) == FORMS[form] and segment_writes(graph) == 0
    graph.graph.lint()
    graph.recompile()
    served = [probe.agrees(*drawn(rows, seed), segments) for seed, (rows, segments) in enumerate(CALLS)]
    assert served[0] and (served[:4] == [True] * 4 or not FORMS[form]), "an empty slice may have a graph of its own"


def half_and_half(x: T, table: T, end: int, write: Any) -> T:
    h = x * 1
    write(h[:, :end], table[0], end)
    write(h[:, end:], table[1], end)
    return h


def powers(part: T, row: T, end: int) -> None:
    part.abs_().pow_(2).pow_(row.abs())


def strengths(part: T, row: T, end: int) -> None:
    part.add_(row, alpha=end).addcmul_(row, row, value=0.5 * end)


def assignments(part: T, row: T, end: int) -> None:
    part.copy_(row)


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize(("write", "count"), [(powers, 2), (strengths, 4), (assignments, 2)])
def test_a_batch_of_one_and_other_operators(write: Any, count: int, dynamic: bool) -> None:
    """A power by a number is none of theirs whose in-place form stands beside one of its name for other arguments."""

    def block(self: Any, x: T, table: T, end: int) -> T:
        return half_and_half(x, table, end, write)

    x, table = drawn(12)
    probe = Probe(block_of(block), x[None], table, 4, dynamic=dynamic)
    assert segment_writes(probe.captured.graph) == count
    probe.captured.graph.recompile()
    assert all(node.op == "placeholder" or not _holds_numbers(node) for node in probe.captured.graph.graph.nodes)
    assert probe.agrees(x[None], table, 4)
    assert probe.agrees(drawn(20)[0][None], table, 7) == dynamic


def _holds_numbers(node: Any) -> bool:
    return any(isinstance(part, T) for part in torch.utils._pytree.tree_leaves((node.args, node.kwargs)))


def expanded(self: Any, x: T, table: T) -> T:
    h = (table[:1] * 1).expand(4, 8)
    h[0:1].mul_(2)
    h[1:2].add_(1)
    return h + x[:1]


def turned_in_place(self: Any, x: T, table: T) -> T:
    h = x * 1
    first, second = h[:4], h[4:]
    h.unsqueeze_(0)
    second.mul_(2.0)
    first.mul_(3.0)
    return h


def slices_of_slices(self: Any, x: T, table: T) -> T:
    h = x * 1
    inner = h[2:]
    inner[0:3].mul_(table[0])
    inner[3:6].mul_(table[1])
    h[0:2].mul_(2)
    return h


@pytest.mark.parametrize(
    ("form", "count"),
    [(expanded, 0), (turned_in_place, 0), (slices_of_slices, 2)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_lies_otherwise_stays(form: Any, count: int) -> None:
    probe = Probe(block_of(form), *drawn(12))
    assert segment_writes(probe.captured.graph) == count and segment_writes(probe.captured.graph) == 0
    probe.captured.graph.recompile()
    assert probe.agrees(*drawn(12, 1)) and probe.agrees(*drawn(30, 2))


@settings(max_examples=25)
@given(st.integers(2, 40), st.lists(st.integers(0, 40), min_size=2, max_size=2), st.integers(0, 2**16))
def test_at_any_bounds(rows: int, cuts: list[int], seed: int) -> None:
    first, second = sorted(min(cut, rows) for cut in cuts)
    segments = [(a, b, row) for row, (a, b) in enumerate(itertools.pairwise((0, first, second, rows)))]
    for probe in _probes():
        probe.agrees(*drawn(rows, seed), segments)


_made: list[Probe] = []


def _probes() -> list[Probe]:
    """Two of the forms, rewritten."""
    if not _made:
        rows, segments = CALLS[0]
        for form in (modulated, gated):
            probe = Probe(block_of(form), *drawn(rows), segments)
            assert segment_writes(probe.captured.graph) == FORMS[form]
            probe.captured.graph.recompile()
            _made.append(probe)
    return _made


@pytest.mark.parametrize("form", [modulated, gated, by_row], ids=lambda form: form.__name__)
def test_lowered(form: Any, tmp_path: Path) -> None:
    rows, segments = CALLS[0]
    probe = Probe(block_of(form), *drawn(rows), segments)
    assert segment_writes(probe.captured.graph)
    inductor.lower(probe.captured, tmp_path / "payload", {})
    probe.artefact.code = inductor.load(tmp_path / "payload", {}, [], len(probe.weights))
    assert all(probe.agrees(*drawn(rows, seed), segments) for seed, (rows, segments) in enumerate(CALLS[:4]))


def test_a_kernel_reads_each_tensor_of_a_row_once(tmp_path: Path) -> None:
    """And finds the place of no number by a division."""
    pytest.importorskip("triton", reason="kernels for a GPU are compiled with Triton")
    if torch.version.cuda is None or torch.cuda.is_available():
        pytest.skip("needs a torch built for CUDA and no GPU: what touches one must fail")
    loads = {}
    for on in (True, False):
        folder = tmp_path / str(on)
        folder.mkdir()
        options = CompileConfig.parse({"options": {"fuse.segments": on}}).lowering_options("cuda")
        code = code_of(lowered_ahead(folder, [*INPLACE], options)["segmented"])
        kernels = [kernel for kernel in code.split("@triton.jit")[1:] if "rms_norm" in kernel]
        loads[on] = max(kernel.count("tl.load(") for kernel in kernels)
        assert not on or not any(
            "% " in line for kernel in kernels for line in kernel.splitlines() if "tl.load" in line
        )
    assert loads[True] <= 14 < loads[False]
