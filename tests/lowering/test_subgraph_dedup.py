# SPDX-License-Identifier: Apache-2.0
"""A graph that repeats itself: cut where it may be, lowered in pieces, and the same numbers come out."""

from __future__ import annotations

import json
import operator
import weakref
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from pieces import as_code, with_numbers
from probe import Probe
from torch import nn
from torch.fx import Graph
from torch.nn import functional

from nexfort_engine import compile as compiled
from nexfort_engine.api import store_at
from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.lowering import inductor, worker
from nexfort_engine.lowering.loaded_code import FoldedCode
from nexfort_engine.lowering.subgraph_dedup import fold

aten = torch.ops.aten
WIDE, HEADS, DEPTH = 32, 2, 5


class Layer(nn.Module):
    """Attention to itself and to a prompt, and a gated feed-forward, as UNets have it."""

    def __init__(self, rate: float = 1.0) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDE) for _ in range(3))
        self.own, self.of_prompt = nn.Linear(WIDE, 3 * WIDE), nn.Linear(WIDE, 2 * WIDE)
        self.query, self.first, self.second = (nn.Linear(WIDE, WIDE) for _ in range(3))
        self.up, self.down = nn.Linear(WIDE, 4 * WIDE), nn.Linear(2 * WIDE, WIDE)
        self.rate = rate

    def forward(self, x: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
        x = x + self.first(attention(*self.own(self.norms[0](x)).chunk(3, -1)))
        x = x + self.second(attention(self.query(self.norms[1](x)), *self.of_prompt(prompt).chunk(2, -1))) * self.rate
        left, right = self.up(self.norms[2](x)).chunk(2, -1)
        return x + self.down(left * functional.gelu(right))


def attention(*parts: torch.Tensor) -> torch.Tensor:
    """q, k and v as matrices."""
    heads = [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts]
    return functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)


class Stack(nn.Module):
    """An image brought to rows, layers on them, and an image again."""

    def __init__(self, depth: int = DEPTH, rates: Any = ()) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(4, WIDE), nn.Linear(WIDE, 4)
        self.layers = nn.ModuleList(Layer(*rates[i : i + 1]) for i in range(depth))

    def forward(self, image: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
        x = self.into(image.flatten(2).transpose(1, 2))
        for layer in self.layers:
            x = layer(x, prompt)
        return image + self.out(x).transpose(1, 2).unflatten(2, image.shape[2:])


class Twice(nn.Module):
    """Two such stacks, which are one region each, and share an artefact."""

    def __init__(self) -> None:
        super().__init__()
        self.stacks = nn.ModuleList(Stack() for _ in range(2))

    def forward(self, image: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
        for stack in self.stacks:
            image = stack(image, prompt)
        return image


def made(kind: Any, *args: Any) -> Any:
    torch.manual_seed(0)
    return kind(*args).eval().requires_grad_(False)


def call(batch: int = 2, height: int = 6, width: int = 4, length: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(batch * height + width)
    return (
        torch.randn(batch, 4, height, width, generator=generator),
        torch.randn(batch, length, WIDE, generator=generator),
    )


SIZES = [(2, 6, 4, 7), (1, 8, 8, 7), (3, 2, 10, 1), (2, 5, 5, 25)]


def operators(graph: Any) -> int:
    return sum(node.op == "call_function" for node in graph.graph.nodes)


@pytest.fixture(scope="module")
def probe() -> Probe:
    return Probe(made(Stack), *call())


def test_layers_are_one_piece_that_is_called_for_each(probe: Probe) -> None:
    folded = fold(probe.captured.graph)
    assert folded is not None
    counts = [[piece for piece, _ in folded.calls].count(i) for i in range(len(folded.pieces))]
    assert max(counts) >= DEPTH - 1 and len(folded.pieces) == 3
    assert sum(map(operators, folded.pieces)) < operators(probe.captured.graph) / 2
    code, weights = as_code(folded), probe.weights
    for size in SIZES:
        whole, found = probe.captured.graph(*weights, *call(*size)), code(*weights, *call(*size))
        assert len(whole) == len(found) and all(map(torch.equal, whole, found))


def test_a_cut_is_where_a_product_gives_its_result_and_no_sum_is_parted_from_its_norm(probe: Probe) -> None:
    folded = fold(probe.captured.graph)
    assert folded is not None
    for piece in folded.pieces[:-1]:
        output = next(node for node in piece.graph.nodes if node.op == "output")
        for result in output.args[0]:
            made_by = result.args[0]  # what is made sure of is that it is a plain matrix
            others = [user for user in made_by.users if user is not result]
            assert made_by.target is aten.linear.default or others, "it would not have been in memory"
            assert made_by.meta["val"].dim() == 3


@pytest.mark.parametrize(
    ("block", "why"),
    [
        (lambda: made(Stack, 2), "too little is saved"),
        (lambda: made(Stack, DEPTH, [0.1 * i for i in range(DEPTH)]), "no two layers compute the same"),
    ],
)
def test_what_does_not_repeat_enough_stays_whole(block: Any, why: str) -> None:
    assert fold(Probe(block(), *call()).captured.graph) is None, why


def test_two_layers_are_one_piece_where_that_saves_enough() -> None:
    probe = Probe(made(Stack, 2), *call())
    folded = fold(probe.captured.graph, least=40)
    assert folded is not None and [piece for piece, _ in folded.calls] == [0, 1, 1, 2]
    weights = probe.weights
    for size in SIZES:
        assert torch.equal(as_code(folded)(*weights, *call(*size))[0], probe.captured.graph(*weights, *call(*size))[0])


def test_a_layer_that_is_another_parts_the_rest_in_two() -> None:
    """All before and behind it still share one piece each."""
    probe = Probe(made(Stack, 5, [1.0] * 2 + [2.0] + [1.0] * 2), *call())
    folded = fold(probe.captured.graph)
    assert folded is not None and len(folded.pieces) == 5
    weights = probe.weights
    for size in SIZES:
        assert torch.equal(as_code(folded)(*weights, *call(*size))[0], probe.captured.graph(*weights, *call(*size))[0])


def test_what_passes_put_in_has_values_too(probe: Probe) -> None:
    """Calls that make a tensor of nothing among them."""
    graph = probe.captured.graph.graph
    first = next(node for node in graph.nodes if node.op == "call_function")
    with graph.inserting_before(first):
        made_of_nothing = graph.call_function(aten.arange.default, (4,), {"device": torch.device("cpu")})
        graph.call_function(aten.add.Tensor, (made_of_nothing, made_of_nothing))
    try:
        assert fold(probe.captured.graph) is not None
        assert isinstance(made_of_nothing.meta["val"], torch._subclasses.FakeTensor)
    finally:
        graph.eliminate_dead_code()
        probe.captured.graph.recompile()


class Remembering(nn.Module):
    """Layers that are given what the one before was given, too; for the first both are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(2 * 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = x
        for first, second in zip(self.layers[::2], self.layers[1::2], strict=True):
            y = functional.gelu(first(functional.layer_norm(x * 2, [WIDE])) + before)
            keep = x.view(x.shape)
            for part in (functional.silu(y), torch.tanh(y)):
                y = y + second(part) * part.sigmoid() + part.relu() * functional.silu(part)
            x, before = keep + y, keep
        return x + before


def test_two_inputs_that_are_one_tensor_in_the_first_call_are_two_in_the_next() -> None:
    """Lowering tells by memory that a result is a look at an input."""
    folded = fold(Probe(made(Remembering), call()[1]).captured.graph)
    assert folded is not None and len(folded.calls) >= 6
    for piece in folded.pieces:
        values = [node.meta["val"] for node in piece.graph.nodes if node.op == "placeholder"]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        assert len({value.untyped_storage()._cdata for value in tensors}) == len(tensors)


class Showing(Stack):
    """One that gives an image of each layer, as the caller would have had it, and reads it on itself."""

    def forward(self, image: torch.Tensor, prompt: torch.Tensor) -> Any:
        x, shown = self.into(image.flatten(2).transpose(1, 2)), []
        for layer in self.layers:
            x = layer(x, prompt)
            shown.append(x.transpose(1, 2).unflatten(2, image.shape[2:]) * 2)
            x = x + shown[-1].mean((2, 3)).unsqueeze(1)
        return x, tuple(shown)


def test_results_that_no_other_piece_takes_lie_as_they_did() -> None:
    probe = Probe(made(Showing), *call())
    folded = fold(probe.captured.graph)
    assert folded is not None
    weights = probe.weights
    found, wanted = as_code(folded)(*weights, *call()), probe.captured.graph(*weights, *call())
    assert len(found) == DEPTH + 1 and not wanted[1].is_contiguous()
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride()


class Writing(Stack):
    """One whose rows are changed in place, so that a piece's input would be."""

    def forward(self, image: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
        x = self.into(image.flatten(2).transpose(1, 2))
        for layer in self.layers:
            x += layer(x, prompt)
        return x


def test_what_writes_to_its_rows_stays_whole() -> None:
    assert fold(Probe(made(Writing), *call()).captured.graph) is None


def test_what_no_call_needs_any_more_is_given_up() -> None:
    seen: list[weakref.ref[torch.Tensor]] = []

    def piece(value: torch.Tensor) -> list[torch.Tensor]:
        assert sum(ref() is not None for ref in seen) <= 1, "the one that it is given, and none from before"
        seen.append(weakref.ref(found := value + 1))
        return [found]

    told = {"sizes": [], "calls": [[0, [0]], [0, [1]], [0, [2]]], "output": [3]}
    (result,) = FoldedCode([piece], told)(torch.zeros(3))
    assert result.tolist() == [3.0] * 3 and [ref() is not None for ref in seen] == [False, False, True]


@pytest.mark.large  # the network below is lowered in pieces and loaded, test_worker_pool.py has graphs in a worker
def test_pieces_are_lowered_in_a_worker_and_loaded_as_one_artefact(tmp_path: Path) -> None:
    block = made(Stack)
    probe, payload = Probe(block, *call()), tmp_path / "payload"
    options = CompileConfig.parse("O2").lowering_options("cpu")
    (tmp_path / "graph").write_bytes(worker.pack(probe.captured))
    job = {"modules": [], "probes": None, "device": "cpu", "spread": False, "file": str(tmp_path / "graph")}
    worker.work({**job, "payload": str(payload), "options": options})
    told = json.loads((payload / "folded.json").read_text())
    assert told["pieces"] == len(list(payload.glob("piece_*"))) == 3
    code = inductor.load(payload, options, [], len(probe.captured.weights))
    weights = probe.weights
    for size in SIZES:
        (found,), wanted = code([*weights, *call(*size)]), block(*call(*size))
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5) and found.stride() == wanted.stride()


class Noted:
    """In the place of Limits: what pieces asked of sizes before one failed is not asked again."""

    made = 0

    def __init__(self, inputs: list[Any]) -> None:
        Noted.made += 1

    def texts(self) -> list[str]:
        return ["s0 <= 7"]


@pytest.mark.parametrize("breaks", ["fold", "_inductor"])
def test_what_cannot_be_lowered_in_pieces_is_lowered_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, breaks: str, probe: Probe
) -> None:
    asked = []

    def broken(graph: Any, place: Path = Path(), *_: Any) -> Any:
        asked.append(place.name)
        if breaks == "fold" or place.name == "piece_1":
            raise RuntimeError("a piece")
        place.mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(inductor, "_inductor", broken if breaks == "_inductor" else lambda _, place, *__: place.mkdir())
    if breaks == "fold":
        monkeypatch.setattr(inductor, "fold", broken)
    monkeypatch.setattr(inductor, "Limits", Noted)
    Noted.made = 0
    payload = tmp_path / "payload"
    inductor.lower(probe.captured, payload, CompileConfig.parse("O2").lowering_options("cpu"))
    assert asked == (["piece_0", "piece_1", "payload"] if breaks == "_inductor" else [""])
    assert Noted.made == 1 and json.loads((payload / "limits.json").read_text()) == ["s0 <= 7"]
    assert "could not be lowered in pieces" in caplog.text
    assert not list(payload.glob("piece_*")) and not (payload / "folded.json").exists()


def test_a_network_is_compiled_so_by_itself_and_the_option_turns_it_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path))  # that of the tests may have it from a run before
    net = made(Twice)
    model = compiled(net)
    for size in SIZES:
        assert torch.allclose(model(*call(*size)), net(*call(*size)), rtol=1e-4, atol=1e-5)
    report = model.report.as_dict()
    assert report["artefacts_compiled"] == 1 and not report["eager"]
    assert (store_at().find(report["artefacts"][0]["key"]).payload / "folded.json").exists()
    off = CompileConfig.parse({"options": {"compile.fold": False}})
    assert off.lowering_options("cpu")["nexfort.fold"] is False and off.lowering_key() != CompileConfig().lowering_key()


# ---- any graph ---------------------------------------------------------------------------------------------

CALLS = [aten.add.Tensor, aten.mul.Tensor, aten.mm.default, aten.sub.Tensor]
_STEP = st.tuples(st.integers(0, 5), st.integers(0, 99), st.integers(0, 99))


@settings(max_examples=80, deadline=None)
@given(
    body=st.lists(_STEP, min_size=8, max_size=14),
    before=st.lists(_STEP, max_size=4),
    after=st.lists(_STEP, max_size=4),
    times=st.integers(3, 5),
    streams=st.integers(1, 3),
)
def test_any_repetition_computes_what_the_whole_does(
    body: list[Any], before: list[Any], after: list[Any], times: int, streams: int
) -> None:
    """Random programs: what a repetition hands on, what it takes each time anew, and what all times share."""
    graph = Graph()
    shared = graph.placeholder("shared")
    weights = [[graph.placeholder(f"weight_{time}_{i}") for i in range(2)] for time in range(times)]
    stream = [graph.placeholder(f"x_{i}") for i in range(streams)]

    def run(program: list[Any], values: list[Any]) -> list[Any]:
        for kind, left, right in program:
            a, b = values[left % len(values)], values[right % len(values)]
            if kind < len(CALLS):
                values.append(graph.call_function(CALLS[kind], (a, b)))
            elif kind == len(CALLS):
                values.append(graph.call_function(aten.t.default, (a,)))
            else:
                halves = graph.call_function(aten.chunk.default, (a, 1))
                values.append(graph.call_function(operator.getitem, (halves, 0)))
        return values

    stream = run(before, [*stream, shared])[-streams:]
    for own in weights:
        stream = run(body, [*stream, shared, *own])[-streams:]
    results = run(after, [*stream, shared])[-2:]
    graph.output(tuple(results))
    module, values = with_numbers(graph)
    wanted = module(*values)
    folded = fold(module, least=1)
    if folded is None:
        return
    found = as_code(folded)(*values)
    assert len(found) == len(wanted) and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
