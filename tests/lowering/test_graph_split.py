# SPDX-License-Identifier: Apache-2.0
"""A large graph that does not repeat itself: cut where it may be, lowered in parts, and the same numbers come out."""

from __future__ import annotations

import json
import operator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from pieces import SIDE, as_code, with_numbers
from probe import Probe
from torch import nn
from torch.fx import Graph
from torch.nn import functional

from nexfort_engine import compile as compiled
from nexfort_engine.api import store_at
from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.lowering import inductor
from nexfort_engine.lowering.graph_split import part

aten = torch.ops.aten
WIDE, HEADS = 32, 2


class Stream(nn.Module):
    """What an image or a text has of its own in a block of two streams, as Flux has them."""

    def __init__(self) -> None:
        super().__init__()
        self.changes = nn.Linear(WIDE, 6 * WIDE)
        self.own, self.out = nn.Linear(WIDE, 3 * WIDE), nn.Linear(WIDE, WIDE)
        self.up, self.down = nn.Linear(WIDE, 4 * WIDE), nn.Linear(4 * WIDE, WIDE)

    def heads(self, x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, table: torch.Tensor) -> Any:
        rows = self.own(functional.layer_norm(x, [WIDE]) * (1 + scale) + shift)
        q, k, v = (piece.unflatten(-1, (HEADS, -1)).transpose(1, 2) for piece in rows.chunk(3, -1))
        for _ in range(2):
            q, k = (functional.rms_norm(piece, [piece.shape[-1]]) * table.cos() + piece * table for piece in (q, k))
        return q, k, v


class Pair(nn.Module):
    """Two streams that see each other, each with a feed-forward; both inputs are changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.streams = nn.ModuleList(Stream() for _ in range(2))

    def forward(self, image: torch.Tensor, text: torch.Tensor, vec: torch.Tensor, table: torch.Tensor) -> Any:
        given = (text, image)
        changes = [stream.changes(functional.silu(vec))[:, None].chunk(6, -1) for stream in self.streams]
        parts = [s.heads(x, *c[:2], table) for s, x, c in zip(self.streams, given, changes, strict=True)]
        q, k, v = (torch.cat(both, 2) for both in zip(*parts, strict=True))
        seen = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        pieces = seen[:, : text.shape[1]], seen[:, text.shape[1] :]
        for stream, x, change, piece in zip(self.streams, given, changes, pieces, strict=True):
            x += change[2] * stream.out(piece)
            more = stream.up(functional.layer_norm(x, [WIDE]) * (1 + change[4]) + change[3])
            for _ in range(6):
                more = functional.silu(more) * more.sigmoid() + more
            x += change[5] * stream.down(more)
        return image, text


class Twice(nn.Module):
    """Two such blocks, which are one region each, and share an artefact."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(Pair() for _ in range(2))

    def forward(self, image: torch.Tensor, text: torch.Tensor, *more: torch.Tensor) -> Any:
        for pair in self.pairs:
            image, text = pair(image, text, *more)
        return image, text


def made(kind: Any) -> Any:
    torch.manual_seed(0)
    return kind().eval().requires_grad_(False)


def call(batch: int = 2, image: int = 24, text: int = 7) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(batch * image + text)
    shapes = (batch, image, WIDE), (batch, text, WIDE), (batch, WIDE), (batch, 1, 1, WIDE // HEADS)
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


SIZES = [(2, 24, 7), (1, 64, 7), (3, 5, 1), (2, 6, 25)]


@pytest.fixture(scope="module")
def probe() -> Probe:
    return Probe(made(Pair), *call())


def test_parts_do_what_the_whole_does_to_their_inputs_too(probe: Probe) -> None:
    before = str(probe.captured.graph.graph)
    parts = part(probe.captured.graph, least=8)
    assert parts is not None and str(probe.captured.graph.graph) == before
    assert [number for number, _ in parts.calls] == list(range(len(parts.pieces))) and len(parts.pieces) >= 2
    weights = probe.weights
    for size in SIZES:
        ours, theirs = call(*size), call(*size)
        found, wanted = as_code(parts)(*weights, *ours), probe.captured.graph(*weights, *theirs)
        assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))
        assert all(map(torch.equal, ours, theirs)) and not torch.equal(ours[0], call(*size)[0])
        assert [x.stride() for x in found] == [x.stride() for x in wanted]


def sliced(batch: int = 1, image: int = 24, text: int = 7) -> tuple[torch.Tensor, ...]:
    """As `call`, with an image that is the end of a longer tensor: its strides and offset are numbers of their own."""
    found, *rest = call(batch, image, text)
    return torch.cat([found, found], 1)[:, image:], *rest


@pytest.mark.large  # another test splits a graph and compares its numbers
def test_a_part_takes_an_input_whose_strides_are_no_size(tmp_path: Path) -> None:
    probe = Probe(made(Pair), *sliced())
    parts = part(probe.captured.graph)
    assert parts is not None and len(parts.pieces) >= 2
    payload = tmp_path / "payload"
    inductor.lower(probe.captured, payload, CompileConfig.parse("O2").lowering_options("cpu") | {"nexfort.fold": True})
    assert len(list(payload.glob("piece_*"))) == len(parts.pieces)
    code = inductor.load(payload, {}, [])
    for size in [(1, 24, 7), (1, 64, 5)]:
        ours, theirs = sliced(*size), sliced(*size)
        found = code([*probe.weights, *ours])
        wanted = probe.captured.graph(*probe.weights, *theirs)
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(found, wanted, strict=True))
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(ours, theirs, strict=True))


def test_a_cut_is_crossed_by_what_libraries_gave_or_took(probe: Probe) -> None:
    parts = part(probe.captured.graph, least=8)
    assert parts is not None
    handed = set()
    for piece in parts.pieces[:-1]:
        output = next(node for node in piece.graph.nodes if node.op == "output")
        for result in output.args[0]:
            if result.target is aten.contiguous.default:  # what is read by another part
                made_by = result.args[0]
                while made_by.target not in (aten.linear.default, aten.scaled_dot_product_attention.default):
                    assert made_by.target is not aten.layer_norm.default and made_by.all_input_nodes
                    made_by = made_by.all_input_nodes[0]
                handed.add(made_by.target)
    assert handed == {aten.linear.default, aten.scaled_dot_product_attention.default}


def test_what_looks_at_something_before_the_cut_looks_at_it_behind_it(probe: Probe) -> None:
    """Parts of the changes, which lie beside each other, are no matrices: their whole is handed on."""
    parts = part(probe.captured.graph, least=8)
    assert parts is not None
    behind = [node.target for piece in parts.pieces[1:] for node in piece.graph.nodes]
    assert aten.chunk.default in behind and aten.slice.Tensor in behind


@pytest.mark.parametrize(("large", "least"), [(1000, 8), (64, 1000)])
def test_what_is_small_or_saves_little_stays_whole(probe: Probe, large: int, least: int) -> None:
    assert part(probe.captured.graph, large, least) is None


class Keeping(nn.Module):
    """A value of its own that is written to wherever it could be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.layers[0](x)
        kept = rows.flatten(1)
        for layer in self.layers:
            rows += functional.silu(layer(rows)) * 2
        return rows + kept.unflatten(1, (-1, WIDE))


def test_what_writes_to_a_value_of_its_own_stays_whole() -> None:
    probe = Probe(made(Keeping), torch.randn(2, 5, WIDE))
    assert part(probe.captured.graph, large=20, least=4) is None


# above a block is lowered in parts, test_subgraph_dedup.py has a network that is lowered in pieces by itself
@pytest.mark.large
def test_parts_are_lowered_at_once_and_loaded_as_one_artefact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path))  # that of the tests may have it from a run before
    block = made(Twice)
    model = compiled(block)
    for size in SIZES:
        ours, theirs = call(*size), call(*size)
        for found, wanted in zip(model(*ours), block(*theirs), strict=True):
            assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(ours, theirs, strict=True))
    report = model.report.as_dict()
    assert report["artefacts_compiled"] == 1 and not report["eager"]
    payload = store_at().find(report["artefacts"][0]["key"]).payload
    told = json.loads((payload / "folded.json").read_text())
    assert told["pieces"] == len(list(payload.glob("piece_*"))) >= 2


def test_the_option_turns_it_off(tmp_path: Path, probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    lowered: list[Path] = []
    monkeypatch.setattr(inductor, "_inductor", lambda _, place, *__: (place.mkdir(), lowered.append(place)))
    off = CompileConfig.parse({"options": {"compile.fold": False}}).lowering_options("cpu")
    inductor.lower(probe.captured, tmp_path / "payload", off)
    assert lowered == [tmp_path / "payload"] and not (tmp_path / "payload" / "folded.json").exists()


class Sorting(nn.Module):
    """Blocks of work around a call that writes to what it is given as a place for its result."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(2))

    def forward(self, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            for _ in range(10):
                x = functional.silu(x) * x
        torch.add(x, 1, out=place)
        return x + place


def test_what_writes_to_another_than_its_first_stays_whole() -> None:
    x = torch.randn(2, 5, WIDE)
    graph = torch.export.export(made(Sorting), (x, torch.empty_like(x)), strict=False).graph_module
    writer = [node for node in graph.graph.nodes if node.target is aten.add.out]
    assert writer and part(graph, large=8, least=4) is None
    for node in writer:
        node.replace_all_uses_with(node.args[0])
        graph.graph.erase_node(node)
    assert part(graph, large=8, least=4) is not None


# ---- any graph ---------------------------------------------------------------------------------------------

CALLS = [aten.add.Tensor, aten.mul.Tensor, aten.mm.default, aten.add_.Tensor, aten.sub.Tensor]
_STEP = st.tuples(st.integers(0, 7), st.integers(0, 99), st.integers(0, 99))


@settings(max_examples=150, deadline=None)
@given(program=st.lists(_STEP, min_size=8, max_size=40), inputs=st.integers(2, 4), results=st.integers(1, 3))
def test_any_graph_computes_in_parts_what_the_whole_does(program: list[Any], inputs: int, results: int) -> None:
    """Random programs, with looks, transposed ones too, and writes to inputs, to looks and to values of their own."""
    graph = Graph()
    values = [graph.placeholder(f"x_{i}") for i in range(inputs)]
    for kind, left, right in program:
        a, b = values[left % len(values)], values[right % len(values)]
        if kind < len(CALLS):
            values.append(graph.call_function(CALLS[kind], (a, b)))
        elif kind == len(CALLS):
            values.append(graph.call_function(aten.t.default, (a,)))
        elif kind == len(CALLS) + 1:
            values.append(graph.call_function(aten.view.default, (a, [SIDE, SIDE])))
        else:
            halves = graph.call_function(aten.chunk.default, (a, 1))
            values.append(graph.call_function(operator.getitem, (halves, 0)))
    graph.output(tuple(values[-results:]))
    module, numbers = with_numbers(graph)
    ours, theirs = ([x.clone() for x in numbers] for _ in range(2))
    try:
        wanted = module(*theirs)
    except RuntimeError:
        return  # a look that does not fit what it looks at
    parts = part(module, large=2, least=1)
    if parts is None:
        return
    found = as_code(parts)(*ours)
    assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))
    assert all(map(torch.equal, ours, theirs))
