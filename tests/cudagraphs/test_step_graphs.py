# SPDX-License-Identifier: Apache-2.0
"""What a graph of a step is fed with, and when it is made anew: on the CPU, with graphs that are pretended."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pretended_graph import Graph, pretend
from torch import nn

import nexfort_engine
from nexfort_engine.compilation import lookup
from nexfort_engine.cudagraphs import host_constants

pytestmark = pytest.mark.usefixtures("artefact_cache")
T = torch.Tensor
Options = dict[str, Any]
X = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: T) -> T:
        return torch.tanh(self.linear(x))


class Taking(Plain):
    """A block that takes a tensor of the options."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key

    def forward(self, x: T, options: Options) -> T:  # type: ignore[override]
        return self.linear(x) * options[self.key] if options[self.key].shape[0] > 6 else self.linear(x)


class Network(nn.Module):
    """Blocks, and code of its own behind them, which a test gives."""

    def __init__(self, own: Callable[[Any, T, Options], T]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Plain() for _ in range(2))
        self.first, self.second = Taking("a"), Taking("b")
        self.__dict__["own"] = own

    def forward(self, x: T, options: Options) -> T:
        for block in self.blocks:
            x = block(x)
        return self.own(self, x, options)


class Steps:
    """A network run compiled, each step compared with eager."""

    def __init__(self, own: Callable[[Any, T, Options], T], mode: Any = torch.inference_mode) -> None:
        torch.manual_seed(0)
        self.mode = mode
        self.module = Network(own).eval().requires_grad_(False)
        self.compiled = nexfort_engine.compile(self.module)
        self.generator = torch.Generator().manual_seed(5)

    def number(self, size: int = 8) -> T:
        return torch.randn(size, generator=self.generator)

    def __call__(self, options: Options, copied: bool = False, x: T = X) -> None:
        theirs = {k: v.clone() for k, v in options.items()} if copied else dict(options)
        with self.mode():
            wanted, found = self.module(x, theirs), self.compiled(x, options)
        assert torch.allclose(found, wanted, atol=1e-4), float((found - wanted).abs().max())
        if copied:
            assert all(torch.equal(options[key], theirs[key]) for key in theirs), "what it writes to is the caller's"

    def graphs(self) -> int:
        return sum(step.graph is not None for step in self.compiled._nexfort_engine.graphs._steps.values())

    def notes(self) -> str:
        data = self.compiled.report.as_dict()
        return "; ".join(data["notes"] + [row["reason"] for row in data["eager"]])


@pytest.fixture(autouse=True)
def _pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    monkeypatch.setattr(lookup, "_loaded", weakref.WeakValueDictionary())  # what is known of them


def both(network: Any, x: T, options: Options) -> T:
    return network.second(network.first(x, options), options)


def test_a_step_is_captured_once_and_replayed_with_other_tensors() -> None:
    step = Steps(both)
    for _ in range(6):
        step({"a": step.number(), "b": step.number()})
    assert step.graphs() == len(Graph.made) == 1 and not step.notes()


def test_one_tensor_in_several_places_may_be_several_later() -> None:
    step = Steps(both)
    for number in range(6):
        one = step.number()
        step({"a": one, "b": one if number < 3 else step.number()})
    assert step.graphs() == 1
    own = Steps(lambda network, x, options: network.first(x, options) + options["b"])
    for number in range(6):
        one = own.number()
        own({"a": one, "b": one if number % 2 else own.number()})
    assert own.graphs() >= 1


@pytest.mark.parametrize("run", [1, 2])
def test_calls_of_two_kinds_have_a_graph_each(run: int) -> None:
    step = Steps(lambda net, x, options: net.first(x, options) * options.get("b", 1.0))
    for number in range(12):
        step({"a": step.number(), **({"b": step.number()} if number // run % 2 else {})})
    # one is given up once, before it is known what the other kind uses
    assert step.graphs() == 2 and len(Graph.made) <= 3 and not step.notes()


def test_a_tensor_of_another_size_type_or_rank_gets_code_of_its_own() -> None:
    step = Steps(lambda network, x, options: network.first(x, options))
    for _ in range(2):
        for kind in (lambda: step.number(), lambda: step.number().double(), lambda: step.number(1)):
            for _ in range(3):
                step({"a": kind()})
        step({"a": step.number().reshape(8, 1)[:, 0]})
    assert not any("failed" in note for note in step.notes().split("; "))


def test_a_tensor_with_an_attribute_is_another_kind_of_call() -> None:
    step = Steps(lambda network, x, options: network.first(x, options) * getattr(options["a"], "factor", 1.0))
    for factor in (None, 2.0, 3.0, None, 2.0) * 2:
        for _ in range(2):
            one = step.number()
            if factor is not None:
                one.factor = factor  # type: ignore[attr-defined]
            step({"a": one})
    assert step.graphs() >= 2


def test_a_tensor_that_is_not_there_is_another_kind_of_call() -> None:
    step = Steps(lambda net, x, options: x + sum(v for v in (options.get("a"), options.get("b")) if v is not None))
    for _ in range(4):
        for keys in ("a", "b", "ab", ""):
            step({key: step.number() for key in keys})
    assert step.graphs() >= 2


def added(_: Any, x: T, options: Options) -> T:
    return x * options["a"].add_(1.0)


class Adding(Plain):
    def forward(self, x: T, options: Options) -> T:  # type: ignore[override]
        return self.linear(x) * options["a"].add_(1.0)


def test_what_is_written_into_a_tensor_of_the_options_reaches_the_caller() -> None:
    step = Steps(added)
    for _ in range(5):
        step({"a": step.number()}, copied=True)
    assert step.graphs() == 0 and "the backbone writes to the tensor options['a']" in step.notes()
    step = Steps(lambda network, x, options: network.first(x, options), torch.no_grad)
    step.module.first = Adding().eval().requires_grad_(False)
    for _ in range(5):
        step({"a": step.number()}, copied=True)
    assert "it writes to a tensor of its options" in step.notes()


OFFSETS = torch.arange(8)
_number = itertools.count().__next__


@pytest.fixture
def whole_numbers_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole numbers lie in main memory and all others on the GPU, as far as copies are looked at."""
    monkeypatch.setattr(host_constants, "_is_here", lambda tensor: not tensor.dtype.is_floating_point)
    monkeypatch.setattr(host_constants, "_is_away", lambda device: device is not None)


def positioned(network: Any, x: T, options: Options) -> T:
    """Code between regions, with every kind of constant."""
    place = torch.zeros(8)
    place.copy_(torch.tensor([1, 2, 3, 4, 5, 6, 7, 8]))
    return x * torch.cos(torch.arange(8).to(x)) + torch.full((8,), 2).to(x) * place + options["a"]


@pytest.mark.usefixtures("whole_numbers_elsewhere")
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_constants_that_glue_copies_are_part_of_the_graph(mode: Any) -> None:
    step = Steps(positioned, mode)
    for _ in range(6):
        step({"a": step.number()})
    assert step.graphs() == len(Graph.made) == 1 and not step.notes()
    graphs = step.compiled._nexfort_engine.graphs
    (only,) = graphs._steps.values()
    assert len(only.sent) == 3, "arange, literal and full"
    kept = [weakref.ref(one.there) for one in only.sent]
    del only
    graphs.release()
    Graph.made.clear()  # what pretends to be a graph holds on to its step, which holds on to it
    gc.collect()
    assert not any(ref() is not None for ref in kept), "they go with the graph"


@pytest.mark.usefixtures("whole_numbers_elsewhere")
@pytest.mark.parametrize(
    "own, reason",
    [
        (lambda network, x, options: x + 0.0 * torch.randint(9, (8,)).to(x), "copies between"),
        (lambda network, x, options: x * OFFSETS.to(x), "copies between"),
        (lambda network, x, options: x * network.table.to(x), "copies between"),
        (lambda network, x, options: x + 0.0 * torch.tensor([_number()]).to(x), "another one in each step"),
    ],
    ids=["random", "outside", "attribute", "counted"],
)
def test_other_copies_refuse_the_graph(own: Any, reason: str) -> None:
    step = Steps(own)
    step.module.table = torch.arange(8)
    for _ in range(4):
        step({})
    assert step.graphs() == 0 and reason in step.notes()


def _artefacts(step: Steps) -> list[Any]:
    return [binding.artefact for region in step.compiled._nexfort_engine.regions for binding in region.bindings]


@pytest.mark.usefixtures("whole_numbers_elsewhere")
def test_artefacts_that_stay_on_the_gpu_are_watched_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps of other sizes what regions do is not looked at any more; what the network itself does is."""
    seen, own = list[str](), host_constants.Constants._sending

    def noted(self: Any, func: Any, args: Any, kwargs: Any) -> Any:
        seen.append(func._schema.name)
        return own(self, func, args, kwargs)

    monkeypatch.setattr(host_constants.Constants, "_sending", noted)
    step = Steps(positioned)
    for rows, products in ((2, 1), (1, 0), (4, 0)):  # one artefact serves both blocks
        seen.clear()
        for _ in range(4):
            step({"a": step.number()}, x=X.repeat(2, 1, 1)[:rows])
        assert seen.count("aten::addmm") == products and seen.count("aten::cos") >= 2
        assert all(artefact.unwatched for artefact in _artefacts(step))
    assert step.graphs() == len(Graph.made) == 3 and not step.notes()


def test_artefacts_in_main_memory_are_watched_whatever_is_refused() -> None:
    def own(network: Any, x: T, options: Options) -> T:
        return x * (2.0 if options.get("kind") else 3.0)

    step = Steps(own)
    for options in ({"kind": object()}, {}, {"kind": object()}):
        for _ in range(3):
            step(dict(options))
    assert "no CUDA graph" in step.notes() and not step.graphs()
    assert _artefacts(step) and not any(artefact.unwatched for artefact in _artefacts(step))


@pytest.mark.usefixtures("whole_numbers_elsewhere")
def test_a_number_that_constants_are_made_of_is_compared() -> None:
    step = Steps(lambda network, x, options: x * torch.full((8,), network.factor).to(x))
    for factor in (2, 2, 2, 2, 3, 3, 3, 3, 2):
        step.module.factor = factor
        step({})
    assert len(Graph.made) == 2 and not step.notes()
