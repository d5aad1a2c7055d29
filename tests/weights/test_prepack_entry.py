# SPDX-License-Identifier: Apache-2.0
"""What a graph computes of its weights alone: taken out, computed once, kept no longer than it is true."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from probe import Probe, block_of
from torch import nn
from torch.fx import Graph, GraphModule

from nexfort_engine.cache.store import Store
from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.dispatch import prepack_cache
from nexfort_engine.engine import Engine
from nexfort_engine.graph.const_subgraph import LEAST, take_out
from nexfort_engine.lowering import inductor as lower
from nexfort_engine.lowering import worker
from nexfort_engine.lowering.loaded_code import PreparingCode
from nexfort_engine.runtime.artifact import Binding
from nexfort_engine.weights.lease import layers_in
from nexfort_engine.weights.prepack_entry import Kept, room_for

aten = torch.ops.aten
WIDE = 256  # a weight of it squared is large enough to be prepared


class Normed(nn.Module):
    """A layer whose weight is made of two on every call, beside one that is used as it is, and a literal tensor."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.direction, self.length = nn.Parameter(torch.randn(WIDE, WIDE)), nn.Parameter(torch.rand(WIDE, 1) + 0.5)
        self.out, self.norm = nn.Linear(WIDE, WIDE), nn.LayerNorm(WIDE)
        self.eval().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.length * self.direction / self.direction.norm(dim=1, keepdim=True)
        h = nn.functional.linear(x, weight) + nn.functional.linear(x, weight.t()) * torch.tensor([0.5] * WIDE)
        return self.norm(self.out(h)) * (1 + self.norm.weight)


class Both(nn.Module):
    """Two such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Normed(seed) for seed in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def x(rows: int = 5, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, rows, WIDE, generator=torch.Generator().manual_seed(seed))


def test_what_is_made_of_large_weights_alone_is_taken_out() -> None:
    probe = Probe(Normed(), x())
    graph, weights = probe.captured.graph, len(probe.captured.weights)
    taken = take_out(graph, [True] * weights)
    assert taken is not None and taken.gives == 1, "one weight, which is used in two ways; that of the norm is small"
    assert len(taken.takes) == 2 and len(taken.keeps) == weights - 2
    assert not [n for n in graph.graph.nodes if n.target is aten.div.Tensor]
    graph.graph.lint()
    assert take_out(graph, [True] * len(taken.keeps)) is None, "nothing else is worth it"


class Unpacking(nn.Module):
    """A layer whose weight is kept in one byte a number, or in as many as it is computed in."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.packed = nn.Buffer(torch.ones(WIDE, WIDE).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.packed.to(x.dtype) * 2)


@pytest.mark.parametrize(("dtype", "gives"), [(torch.int8, None), (torch.float32, 1)])
def test_what_takes_more_memory_than_what_it_is_made_of_is_kept_if_that_is_asked_for(
    dtype: torch.dtype, gives: int | None
) -> None:
    probe = Probe(Unpacking(dtype), x())
    taken = take_out(probe.captured.graph, [True] * len(probe.captured.weights), larger=False)
    assert (taken.gives if taken is not None else None) == gives
    assert take_out(Probe(Unpacking(dtype), x()).captured.graph, [True] * len(probe.captured.weights)) is not None


def test_a_graph_that_uses_its_weights_as_they_are_stays_as_it_is() -> None:
    probe = Probe(nn.Sequential(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)).eval().requires_grad_(False), x())
    before = str(probe.captured.graph.graph)
    assert take_out(probe.captured.graph, probe.captured.lasting) is None
    assert str(probe.captured.graph.graph) == before


def changed(self: Any, x: torch.Tensor) -> Any:
    weight = self.one * 2
    weight.add_(self.two)
    return x @ weight


def changed_by_a_look(self: Any, x: torch.Tensor) -> Any:
    weight = self.one * 2
    weight.t()[0].mul_(x.mean())
    return x @ weight


def changed_after_dropout(self: Any, x: torch.Tensor) -> Any:
    weight = nn.functional.dropout(self.one * 2, 0.5, self.training)
    return x @ weight.mul_(x.mean()) + x @ (self.one + self.two)


def given_away(self: Any, x: torch.Tensor) -> Any:
    weight = self.one * 2
    return x @ weight, weight.t()[:8]


def of_a_buffer(self: Any, x: torch.Tensor) -> Any:
    return x @ (self.large * 2) + x @ (self.one + self.large)


def as_it_is(self: Any, x: torch.Tensor) -> Any:
    return x @ self.one.to(x.dtype) + x @ self.two.contiguous() + x @ torch.cat(self.one.chunk(2))[:, :WIDE].relu()


def in_pieces(self: Any, x: torch.Tensor) -> Any:
    left, right = (self.one * 2).chunk(2)
    return x @ torch.cat([left, right * x.mean()])


def written_in_a_region(self: Any, x: torch.Tensor) -> Any:
    """In a graph within the graph, of which nobody uses a result."""
    x = x.clone()
    with torch.autocast("cpu", enabled=False):
        x[:, :2] += 3.0
    return x @ (self.one * self.two)


def several_at_once(self: Any, x: torch.Tensor) -> Any:
    values, places = torch.maximum(self.one, self.two).max(dim=0)
    return x * values + places


@pytest.mark.parametrize(
    ("function", "gives"),
    [
        *((changed, 0), (changed_by_a_look, 0), (changed_after_dropout, 1), (given_away, 0), (of_a_buffer, 0)),
        *((as_it_is, 1), (in_pieces, 1), (several_at_once, 2), (written_in_a_region, 1)),
    ],
)
def test_what_is_taken_out_stays_what_it_is_in_every_call(function: Any, gives: int) -> None:
    """Whatever the graph does with it, and whatever the caller does with results and the network with buffers."""
    weights = {name: nn.Parameter(torch.randn(WIDE, WIDE) / 16, requires_grad=False) for name in ("one", "two")}
    block = block_of(function, **weights)
    block.register_buffer("large", torch.randn(WIDE, WIDE) / 16)
    probe = Probe(block, x())
    graph, captured = probe.captured.graph, probe.captured
    taken = take_out(graph, captured.lasting)
    assert (taken.gives if taken is not None else 0) == gives
    given = probe.weights
    prepared = taken.graph(*[given[i] for i in taken.takes]) if taken is not None else []
    keeps = taken.keeps if taken is not None else range(len(given))
    for seed in range(3):
        found = graph(*[given[i] for i in keeps], *prepared, x(seed=seed))
        wanted = block(x(seed=seed))
        for result, other in zip(found, wanted if isinstance(wanted, tuple) else [wanted], strict=True):
            assert torch.allclose(result, other, atol=1e-5)
            result.zero_()
        block.large.mul_(2.0)


@pytest.mark.parametrize("in_a_worker", [False, True])
def test_an_artefact_with_a_preparation_is_called_like_any_other(tmp_path: Path, in_a_worker: bool) -> None:
    block = Normed()
    probe, payload = Probe(block, x()), tmp_path / "payload"
    options: Mapping[str, object] = {"nexfort.prepare": True}
    if in_a_worker:
        (tmp_path / "graph").write_bytes(worker.pack(probe.captured))
        job = {"modules": [], "probes": None, "device": "cpu", "spread": False, "file": str(tmp_path / "graph")}
        worker.work({**job, "payload": str(payload), "options": options})
    else:
        lower.lower(probe.captured, payload, options)
    code = lower.load(payload, {}, [], len(probe.captured.weights))
    assert isinstance(code, PreparingCode)
    given_weights = probe.weights
    for rows in (5, 1, 17):
        (found,) = code([*given_weights, x(rows)])
        (kept,) = code.run([*given_weights, x(rows)], code.prepare(given_weights))
        assert torch.allclose(found, block(x(rows)), atol=1e-5) and torch.equal(found, kept)


# ---- any graph ---------------------------------------------------------------------------------------------

OPERATORS = [aten.add.Tensor, aten.mul.Tensor, aten.mm.default]
LOOKS = [lambda g, n: g.call_function(aten.t.default, (n,)), lambda g, n: g.call_function(aten.relu.default, (n,))]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=14))
def test_any_graph_computes_what_it_did(program: list[tuple[int, int, int]]) -> None:
    """Random programs over two weights and an input: every value that nothing uses is a result."""
    side, graph = int(LEAST**0.5), Graph()
    nodes = [graph.placeholder(name) for name in ("one", "two", "x")]
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(side, side, generator=generator) / side**0.5 for _ in nodes]
    for operator, left, right in program:
        a, b = nodes[left % len(nodes)], nodes[right % len(nodes)]
        if operator < len(OPERATORS):
            nodes.append(graph.call_function(OPERATORS[operator], (a, b)))
        else:
            nodes.append(LOOKS[operator - len(OPERATORS)](graph, a))
    graph.output(tuple(node for node in nodes if not node.users and node.op != "placeholder"))
    module = GraphModule(nn.Module(), graph)
    wanted = module(*values)
    with torch._subclasses.FakeTensorMode() as mode:
        for node, value in zip(nodes, values, strict=False):
            node.meta["val"] = mode.from_tensor(value)
    taken = take_out(module, [True, True])
    if taken is None:
        assert all(torch.equal(a, b) for a, b in zip(module(*values), wanted, strict=True))
        return
    prepared = taken.graph(*[values[i] for i in taken.takes])
    found = module(*[values[i] for i in taken.keeps], *prepared, values[2])
    assert len(prepared) == taken.gives
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_layer_is_spared_if_all_of_its_weights_are() -> None:
    root = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    slots = [(root[0]._parameters, "weight"), (root[0]._parameters, "bias")]
    slots += [(root[1]._parameters, "bias"), (root[3]._parameters, "weight")]
    assert layers_in(root, slots) == [root[0], root[3]] and not layers_in(root, [])


# ---- how long they are kept --------------------------------------------------------------------------------


class Host:
    """A lender that lends nothing, and says what its weights are."""

    signs, copies, hidden, says, unsettled = (), frozenset(), {}, True, False

    def __init__(self) -> None:
        self.said: Any = "one"

    def version(self) -> Any:
        return self.said

    def room(self, _: torch.device) -> int:
        return 0

    def lends(self, _: nn.Module) -> bool:
        return False

    layout = None

    def stay(self) -> None: ...

    def look(self, run: object) -> None: ...

    def frees(self, _: torch.device) -> bool:
        return False


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """What one of the engines compiles, the others load."""
    return Store(tmp_path_factory.mktemp("store"))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, store: Store) -> tuple[Engine, Host, list[int]]:
    """An engine of two blocks, its host, and the numbers of the blocks that were prepared."""
    prepare, made = Binding.prepare, []
    host, root = Host(), Both()

    def counted(self: Binding, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        made.append(next(i for i, block in enumerate(root.blocks) if any(w is block.out.weight for w in weights)))
        return prepare(self, weights)

    monkeypatch.setattr(Binding, "prepare", counted)
    return Engine(root, CompileConfig.parse("freezing"), store, lender=host), host, made  # type: ignore[arg-type]


def agrees(engine: Engine, seed: int = 0) -> bool:
    root = engine.root
    with torch.inference_mode():
        found = engine.call(root.forward, (x(seed=seed),), {})
        assert not engine.report.as_dict()["eager"]
        return torch.allclose(found, root(x(seed=seed)), atol=1e-5)


@pytest.mark.parametrize("capturing", [False, True])
def test_a_step_keeps_its_result_whatever_becomes_of_what_the_host_holds(
    made: tuple[Engine, Host, list[int]], monkeypatch: pytest.MonkeyPatch, capturing: bool
) -> None:
    """Giving back waits for the device, which ends a capture: then it is done another time."""
    from nexfort_engine.dispatch import prepack_cache as module

    engine, host, _ = made
    asked = []

    def do_without(layers: list[nn.Module], _: object) -> int:
        asked.append(layers)
        raise RuntimeError("Fault failed")

    monkeypatch.setattr(module, "layers_in", lambda root, _: [root])
    monkeypatch.setattr(module, "is_capturing", lambda: capturing)
    monkeypatch.setattr(host, "do_without", do_without, raising=False)
    engine.held_twice = True
    assert agrees(engine)
    assert engine.held_twice is capturing and len(asked) == (not capturing)
    assert any("not given back (RuntimeError: Fault failed)" in note for note in engine.report.as_dict()["notes"]) is (
        not capturing
    )


@pytest.mark.parametrize("host", [None, Host()], ids=["no host", "one that never says"])
def test_where_nobody_says_when_weights_change_the_artefact_is_what_it_is_without(
    host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if host is not None:
        monkeypatch.setattr(host, "says", False, raising=False)
    kept = Store(tmp_path)
    frozen, plain = (Engine(Both(), CompileConfig.parse(mode), kept, lender=host) for mode in ("freezing", "O2"))
    assert agrees(frozen) and not any(binding.prepares for region in frozen.regions for binding in region.bindings)
    assert [row["token"] for row in frozen.report.as_dict()["inactive"]] == ["freezing"]
    assert agrees(plain) and plain.report.as_dict()["artefacts_compiled"] == 0
    assert not plain.report.as_dict()["inactive"]


def test_they_are_made_once_for_each_block(made: tuple[Engine, Host, list[int]]) -> None:
    engine, _, blocks = made
    assert all(agrees(engine, seed) for seed in range(3))
    assert blocks == [0, 1]


def test_they_are_made_again_when_the_host_says_that_weights_changed(made: tuple[Engine, Host, list[int]]) -> None:
    engine, host, blocks = made
    assert agrees(engine)
    with torch.no_grad():
        engine.root.blocks[1].direction.data.neg_()  # type: ignore[union-attr,index]
    host.said = "two"
    assert agrees(engine) and blocks == [0, 1, 0, 1]


def test_they_are_not_kept_where_the_host_cannot_say(made: tuple[Engine, Host, list[int]]) -> None:
    engine, host, blocks = made
    assert agrees(engine)
    host.said = None
    for factor in (2.0, -1.0):
        with torch.no_grad():
            engine.root.blocks[0].direction.data.mul_(factor).add_(0.1)  # type: ignore[union-attr,index]
        assert agrees(engine)
    host.said = "one"
    assert agrees(engine), "what was kept before went when nobody could say"
    assert blocks == [0, 1, 0, 1]


def test_another_tensor_in_a_weights_place_is_seen_at_once(made: tuple[Engine, Host, list[int]]) -> None:
    engine, _, blocks = made
    assert agrees(engine)
    engine.root.blocks[0].direction = nn.Parameter(torch.randn(WIDE, WIDE), requires_grad=False)  # type: ignore[union-attr,index]
    assert agrees(engine) and blocks == [0, 1, 0]
    engine.root.blocks[1].direction.data = torch.randn(WIDE, WIDE)  # type: ignore[union-attr,index]
    assert agrees(engine) and blocks == [0, 1, 0, 1]


def test_they_go_when_the_engine_gives_its_memory_back(made: tuple[Engine, Host, list[int]]) -> None:
    engine, _, blocks = made
    assert agrees(engine)
    assert all(binding.kept for region in engine.regions for binding in region.bindings)
    engine.release()
    assert not any(binding.kept for region in engine.regions for binding in region.bindings)
    assert agrees(engine) and blocks == [0, 1, 0, 1]


def test_where_memory_is_short_they_go_and_the_step_runs_again(
    made: tuple[Engine, Host, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _, blocks = made
    assert agrees(engine)
    run, runs, always = Binding.run, [], []

    def short(self: Binding, *args: Any) -> Any:
        runs.append(args[-1] is not None)
        if runs[-1] or always:  # with what is kept, or in any case
            raise torch.OutOfMemoryError("out of memory")
        return run(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Binding, "run", short)
        assert agrees(engine) and runs == [True, False, False]
        assert not any(binding.kept for region in engine.regions for binding in region.bindings)
        assert agrees(engine) and runs[3:] == [False, False], "none are kept from then on"
        always.append(True)
        with pytest.raises(torch.OutOfMemoryError):  # nothing is held: it is for the host to deal with
            agrees(engine)
    assert agrees(engine) and blocks == [0, 1]
    assert any("memory was short" in note for note in engine.report.as_dict()["notes"])


def test_a_step_with_code_of_others_in_it_is_not_run_again(
    made: tuple[Engine, Host, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _, _ = made
    assert agrees(engine)
    run, runs = Binding.run, []

    def short(self: Binding, *args: Any) -> Any:
        runs.append(self)
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(Binding, "run", short)
    with torch.inference_mode(), pytest.raises(torch.OutOfMemoryError):
        engine.call(lambda x, options: engine.root(x), (x(), {"a patch": print}), {})
    assert (
        len(runs) == 1
        and not engine.keeps
        and not any(binding.kept for region in engine.regions for binding in region.bindings)
    )
    monkeypatch.setattr(Binding, "run", run)
    assert agrees(engine)


def test_another_thread_may_let_go_of_them_at_any_moment(
    made: tuple[Engine, Host, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _, blocks = made
    assert agrees(engine)
    run = Binding.run

    def released(self: Binding, *args: Any) -> Any:
        engine.release()
        return run(self, *args)

    monkeypatch.setattr(Binding, "run", released)
    assert agrees(engine) and blocks == [0, 1, 1]


def test_without_room_they_are_made_for_each_call_and_once(
    made: tuple[Engine, Host, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _, blocks = made
    monkeypatch.setattr(prepack_cache, "room_for", lambda *_: False)
    monkeypatch.setattr(PreparingCode, "__call__", None)
    assert agrees(engine) and agrees(engine, 1) and blocks == [0, 1, 0, 1]
    assert not any(binding.kept for region in engine.regions for binding in region.bindings)


def test_others_are_asked_for_room_only_where_what_is_free_does_not_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: Any = [SimpleNamespace(device=torch.device("cuda"))]
    free, asked = [3 << 30], []

    def more(device: torch.device) -> int:
        asked.append(device)
        return 1 << 30

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free[0], 1 << 40))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 1 << 20)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 1 << 20)
    assert room_for(kept, more) and not asked
    free[0] = 3 << 29
    assert room_for(kept, more) and asked == [torch.device("cuda")]
    free[0] = 1 << 29
    assert not room_for(kept, more)


def test_they_hold_on_to_no_weight() -> None:
    weight = torch.randn(4)
    kept = Kept.of([torch.ones(2)], "one", [weight])
    assert kept.holds("one", [weight]) and not kept.holds("two", [weight]) and not kept.holds(None, [weight])
    del weight
    assert kept.made_of[0]() is None and not kept.holds("one", [torch.randn(4)])  # type: ignore[misc]
