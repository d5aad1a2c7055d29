# SPDX-License-Identifier: Apache-2.0
"""A call that eager refuses as well leaves nothing behind; one that only the artefact refuses makes its block eager.

Lowered: what fails here fails in compiled code.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from large_rows import few
from pretended_graph import pretend
from torch import nn

import nexfort_engine

pytestmark = pytest.mark.usefixtures("artefact_cache")
T = torch.Tensor


class Looking(nn.Module):
    """A block that looks its input up in a table by numbers, which may lie outside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(8, 8), nn.Parameter(torch.randn(5, 8))

    def forward(self, x: T, places: T) -> T:
        return torch.tanh(self.linear(x)) + self.table[places]


class Adding(nn.Module):
    """A block that adds to what it is given, in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: T, places: T) -> T:
        x += torch.tanh(self.linear(x)) + places.unsqueeze(-1)
        return x


class Network(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x: T, places: T, **more: Any) -> T:
        x = x * 2
        for block in self.blocks:
            x = block(x, places)
        return x


class Both:
    """A network and its compiled self."""

    def __init__(self, kind: Callable[[], nn.Module] = Looking, network: Callable[..., nn.Module] = Network) -> None:
        torch.manual_seed(0)
        self.module = network(kind).eval().requires_grad_(False)
        self.compiled = nexfort_engine.compile(self.module)
        self.report, self.engine = self.compiled.report, self.compiled._nexfort_engine

    def agrees(self, *args: Any, **more: Any) -> dict[str, Any]:
        """What the report gained by a call that both take."""
        mark = self.report.mark()
        with torch.inference_mode():
            wanted, found = self.module(*copy.deepcopy(args), **more), self.compiled(*copy.deepcopy(args), **more)
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)
        return self.report.since(mark)

    def refuses(self, *args: Any) -> dict[str, Any]:
        """What the report gained by a call that both refuse, by the same error."""
        mark = self.report.mark()
        with torch.inference_mode():
            with pytest.raises(Exception) as wanted:  # whatever eager raises
                self.module(*args)
            with pytest.raises(type(wanted.value)) as found:
                self.compiled(*args)
        assert str(found.value) == str(wanted.value) and found.value.__context__ is None
        return self.report.since(mark)


def x(batch: int = 2, length: int = 6, width: int = 8) -> T:
    return torch.randn(batch, length, width, generator=torch.Generator().manual_seed(1))


def places(batch: int = 2, length: int = 6, to: int = 4) -> T:
    return torch.arange(batch * length).reshape(batch, length) % 5 if to == 4 else torch.full((batch, length), to)


@pytest.fixture
def warnings_logged(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """What was said on the user's terminal."""
    with caplog.at_level(logging.WARNING, logger="nexfort"):
        yield lambda: [record.getMessage() for record in caplog.records if record.name == "nexfort"]


def test_a_call_that_eager_refuses_latches_nothing(warnings_logged: Callable[[], list[str]]) -> None:
    both = Both()
    both.agrees(x(), places())
    for _ in range(3):
        assert not both.refuses(x(), places(to=77))["eager"]
    assert not [region.path for region in both.engine.regions if region.disabled_reason] and not warnings_logged()
    new = both.agrees(x(3), places(3))
    assert not new["eager"] and not new["artefacts"], "good calls run compiled as before"


def test_one_failure_where_eager_succeeds_is_enough() -> None:
    both = Both()
    both.agrees(x(), places())
    both.refuses(x(), places(to=77))
    (first, *_) = both.engine.regions
    first.bindings[0].code = _failing()
    assert [row["region"] for row in both.agrees(x(), places())["eager"]] == [first.path]
    assert "the card fell off" in str(first.disabled_reason)
    assert not both.agrees(x(), places())["eager"]
    assert both.refuses(x(), places(to=77)) and first.disabled_reason, "what was seen is not forgotten"


def _failing(first: Callable[[list[Any]], Any] = lambda inputs: None) -> Callable[[list[Any]], Any]:
    def code(inputs: list[Any]) -> Any:
        first(inputs)
        raise RuntimeError("the card fell off")

    return code


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_what_an_artefact_changed_before_it_failed_is_no_eager_run_s_input(mode: Any) -> None:
    both = Both(Adding)
    both.agrees(x(), places())
    region = both.engine.regions[1]
    (binding,) = region.bindings
    assert binding.artefact.mutated
    place = len(binding.artefact.weights) + binding.artefact.mutated[0]
    binding.code = _failing(lambda inputs: inputs[place].add_(100.0))
    with mode():
        wanted, found = both.module(x(), places()), both.compiled(x(), places())
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert region.disabled_reason and "the card fell off" in region.disabled_reason
    assert [row["region"] for row in both.report.as_dict()["eager"]] == [region.path]
    both.agrees(x(), places())


def test_a_first_call_that_eager_refuses_keeps_no_later_one_from_being_compiled() -> None:
    both = Both()
    for wrong in ((x(width=7), places()), (x(), places(3)), (x(), places(to=77))):
        assert not both.refuses(*wrong)["eager"], "nothing runs eager from now on"
    new = both.agrees(x(3, 9), places(3, 9))
    assert not new["eager"] and not both.report.as_dict()["eager"]
    assert {row["name"] for row in both.report.as_dict()["regions"]} == {"blocks.0", "blocks.1"}


def test_what_no_graph_holds_stays_refused_after_one_call() -> None:
    class Stubborn(Looking):
        def forward(self, x: T, places: T) -> T:
            return super().forward(x, places) if float(x.sum()) > -1e9 else x

    both = Both(Stubborn)
    both.refuses(x(width=7), places())
    assert "branches on the value" in both.agrees(x(), places())["eager"][0]["reason"]
    refusals = [len(found) for found in both.engine.state.known.refusals.values()]
    assert refusals == [1]
    both.agrees(x(), places())
    assert [len(found) for found in both.engine.state.known.refusals.values()] == refusals, "it is not tried again"


def test_a_step_that_eager_refuses_refuses_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    wrong: list[str] = []

    class Own(Network):
        def forward(self, x: T, places: T, **more: Any) -> T:
            if wrong:
                raise ValueError(wrong[0])
            return super().forward(x, places) * 2

    both = Both(Adding, Own)
    for _ in range(2):
        both.agrees(x(), places())
    wrong.append("not this time")
    both.engine.graphs.release()
    both.refuses(x(), places())
    wrong.clear()
    both.agrees(x(), places())
    wrong.append("nor while it is captured")
    both.refuses(x(), places())
    assert not both.engine.graphs._refused and not both.report.as_dict()["notes"]
    wrong.clear()
    for _ in range(3):
        both.agrees(x(), places())
    assert any(step.graph is not None for step in both.engine.graphs._steps.values())


# ---- arguments and attributes whose own code raises ------------------------------------------------------------------


def _raises(*_: Any, **__: Any) -> Any:
    raise ArithmeticError("it is not to be looked at")


def hostile(base: type = object, *args: Any, **names: bool) -> Any:
    """An object of which nothing may be asked by these methods."""
    return type("Hostile", (base,), {f"__{name}__": _raises for name in names})(*args)


HOSTILE: dict[str, Callable[[], Any]] = {
    "__getattr__": lambda: hostile(getattr=True),
    "__getattribute__": lambda: hostile(getattribute=True),
    "__len__ and __bool__": lambda: hostile(len=True, bool=True),
    "__eq__": lambda: hostile(eq=True),
    "__repr__ and __str__": lambda: hostile(repr=True, str=True),
    "__iter__ and __getitem__": lambda: hostile(iter=True, getitem=True),
    "a tuple": lambda: hostile(tuple, (1, 2), iter=True, len=True),
    "a text": lambda: hostile(str, "a", eq=True, hash=True, repr=True),
    "a number": lambda: hostile(float, 1.5, eq=True, hash=True, bool=True),
    "a mapping": lambda: type("Mapping", (dict,), {"items": _raises, "get": _raises, "keys": _raises})(a=1),
}


class Heedless(Looking):
    """A block that is given what it does not use, and holds something that it compares with None alone."""

    extra: Any = None

    def forward(self, x: T, places: T, given: Any = None, options: Any = None) -> T:  # type: ignore[override]
        if self.extra is not None or given is not None:
            x = x * 2
        return super().forward(x, places)


class Handing(Network):
    def forward(self, x: T, places: T, **more: Any) -> T:
        for block in self.blocks:
            x = block(x, places, **more)
        return x


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize(
    "at", few(["an argument", "in a list", "an option", "an attribute"], ("an argument", "an attribute"))
)
def test_what_raises_when_it_is_looked_at_is_eager_s_alone(name: str, at: str) -> None:
    both = Both(Heedless, Handing)
    mark = both.report.mark()
    bad = HOSTILE[name]()
    more = {"given": bad} if at == "an argument" else {"given": [bad]} if at == "in a list" else {}
    more = {"options": {"bad": bad}} if at == "an option" else more
    if at == "an attribute":
        both.module.blocks[0].__dict__["extra"] = bad
    for _ in range(2):
        both.agrees(x(), places(), **more)
    if at in ("an argument", "in a list"):
        found = both.report.since(mark)
        assert found["eager"] or found["artefacts"], "it runs compiled, or the report says why not"
    both.module.blocks[0].__dict__.pop("extra", None)
    good = {"options": {"bad": 1}} if at == "an option" else {"given": None} if at != "an attribute" else {}
    assert not both.agrees(x(), places(), **good)["eager"]
