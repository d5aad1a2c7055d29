# SPDX-License-Identifier: Apache-2.0
"""Blocks that read state beside them, and what changes that state as other code may.

As a program it runs some of them before and after the change, with the cache that NEXFORT_CACHE_DIR names:
`python reached_state.py STATES KIND...`, STATES a list such as "plain,changed". It prints how far each is from eager.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import json
import random
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import nn

FACTOR = 1.0
TABLE = torch.full((1,), 2.0)
WRAPPED: Any = collections.UserDict(factor=2.0)
IN_CONTEXT = {"factor": 2.0}
VARIABLE: contextvars.ContextVar[dict[str, float]] = contextvars.ContextVar("VARIABLE", default=IN_CONTEXT)
OUTSIDE = types.SimpleNamespace(layer=nn.Linear(8, 8).requires_grad_(False))
COUNTER = {"calls": 0}
ARRAY = numpy.full((1,), 2.0, dtype=numpy.float32)
KNOWN: dict[Any, float] = {}
INSIDE = contextlib.ExitStack()


class Slotted:
    """An object without a dictionary."""

    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 2.0


SLOTTED = Slotted()
HELD = [SLOTTED]


def helper() -> float:
    return FACTOR


@functools.lru_cache
def remembered(n: int) -> float:
    return n * helper()


class Block(nn.Module):
    """Adds a layer times a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def factor(self, x: torch.Tensor) -> Any:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x) * self.factor(x)


class OfTable(Block):
    def factor(self, x: torch.Tensor) -> Any:
        return TABLE


class OfDefault(Block):
    def factor(self, x: torch.Tensor, given: list[float] = [2.0]) -> Any:  # noqa: B006  it is what others change
        return given[0]


class OfWrapped(Block):
    def factor(self, x: torch.Tensor) -> Any:
        return WRAPPED["factor"]


class OfVariable(Block):
    def factor(self, x: torch.Tensor) -> Any:
        return VARIABLE.get()["factor"]


class OfSlots(Block):
    def factor(self, x: torch.Tensor) -> Any:
        return (lambda held: held[0].factor)(HELD)


class OfRemembered(Block):
    def factor(self, x: torch.Tensor) -> Any:
        return remembered(2)


class OfOutside(Block):
    def factor(self, x: torch.Tensor) -> Any:
        return OUTSIDE.layer(x)


class Thrice(nn.Linear):
    """A layer that gives three times as much."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 3


class OfClass(Block):
    def factor(self, x: torch.Tensor) -> Any:
        return 1.0


class OfAnArray(Block):
    def factor(self, x: torch.Tensor) -> Any:
        return float(ARRAY[0])


class OfATableOfItsOwn(Block):
    def __init__(self) -> None:
        super().__init__()
        self.number = 2.0

    def factor(self, x: torch.Tensor) -> Any:
        return vars(self)["number"]


class OfWhatItMayHold(Block):
    def factor(self, x: torch.Tensor) -> Any:
        found = self._buffers.get("found")
        return 2.0 if found is None else found


class OfACall(Block):
    def factor(self, x: torch.Tensor) -> Any:
        return 1.0


class OfAMissingAttribute(Block):
    def factor(self, x: torch.Tensor) -> Any:
        return getattr(self.layer, "factor_of_a_pack", 2.0)


class OfALoop(Block):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))

    def factor(self, x: torch.Tensor) -> Any:
        return self.layers(x)


class OfAProperty(Block):
    def factor(self, x: torch.Tensor) -> Any:
        return 1.0


class OfGradients(Block):
    def factor(self, x: torch.Tensor) -> Any:
        return 5.0 if torch.is_grad_enabled() else 2.0


class OfAWeightsGradients(Block):
    def factor(self, x: torch.Tensor) -> Any:
        return 5.0 if self.layer.weight.requires_grad else 2.0


class OfInference(Block):
    def factor(self, x: torch.Tensor) -> Any:
        return 5.0 if torch.is_inference_mode_enabled() and (x * 1.0).is_inference() else 2.0


class OfItsLayersType(Block):
    def factor(self, x: torch.Tensor) -> Any:
        return 5.0 if type(self.layer) is nn.Linear else 2.0


class OfANumber(Block):
    def factor(self, x: torch.Tensor) -> Any:
        return 5.0 if isinstance(x.shape[1], int) else 2.0


class OfAText(Block):
    def factor(self, x: torch.Tensor) -> Any:
        return {"5": 5.0, "7": 7.0}.get(f"{x.shape[1]}", 2.0)


class OfATensor(Block):
    def factor(self, x: torch.Tensor) -> Any:
        return 5.0 if type(x) is torch.Tensor else 2.0


class OfTracing(Block):
    def factor(self, x: torch.Tensor) -> Any:
        return 2.0 if torch.compiler.is_compiling() else 5.0


class OfItself(Block):
    def __init__(self) -> None:
        super().__init__()
        KNOWN[self] = 5.0

    def factor(self, x: torch.Tensor) -> Any:
        return KNOWN.get(self, 2.0)


class OfACounter(Block):
    def factor(self, x: torch.Tensor) -> Any:
        COUNTER["calls"] += 1
        return COUNTER["calls"]


class OfChance(Block):
    def factor(self, x: torch.Tensor) -> Any:
        return random.choice((2.0, 20.0, 200.0))


class Net(nn.Module):
    """Two blocks of a kind."""

    def __init__(self, kind: type[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _set_factor(value: float) -> None:
    global FACTOR
    FACTOR = value
    remembered.cache_clear()


def _set_default(value: float) -> None:
    OfDefault.factor.__defaults__[0][0] = value  # type: ignore[index]


def _set_class(net: Net, kind: type[nn.Module]) -> None:
    for block in net.blocks:
        block.layer.__class__ = kind


def _thrice(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return nn.Module._call_impl(self, *args, **kwargs) * 3


def _with_more(self: nn.Module, name: str) -> Any:
    return 5.0 if name == "factor_of_a_pack" else nn.Module.__getattr__(self, name)


def _reversed(self: nn.Module) -> Any:
    return iter([*self._modules.values()][::-1])


def _put(kind: type, name: str, value: Any) -> tuple[Callable[[Net], Any], Callable[[Net], Any]]:
    """What puts a thing on a class of torch's, as packs do, and what takes it away."""
    before = vars(kind).get(name)
    return lambda _: setattr(
        kind, name, value
    ), lambda _: setattr(kind, name, before) if before is not None else delattr(kind, name)


def _number(net: Net, value: float) -> None:
    for block in net.blocks:
        block.number = value  # type: ignore[assignment]


def _found(net: Net, value: torch.Tensor | None) -> None:
    for block in net.blocks:
        block._buffers.pop("found", None)
        if value is not None:
            block.register_buffer("found", value)


def _scale(value: float) -> None:
    OUTSIDE.layer.weight.mul_(value)


# kind -> what changes it, and what brings it back
CHANGES: dict[type[Block], tuple[Callable[[Net], Any], Callable[[Net], Any]]] = {
    OfTable: (lambda _: TABLE.fill_(5.0), lambda _: TABLE.fill_(2.0)),
    OfDefault: (lambda _: _set_default(5.0), lambda _: _set_default(2.0)),
    OfWrapped: (lambda _: WRAPPED.update(factor=5.0), lambda _: WRAPPED.update(factor=2.0)),
    OfVariable: (lambda _: VARIABLE.get().update(factor=5.0), lambda _: VARIABLE.get().update(factor=2.0)),
    OfSlots: (lambda _: setattr(SLOTTED, "factor", 5.0), lambda _: setattr(SLOTTED, "factor", 2.0)),
    OfRemembered: (lambda _: _set_factor(7.0), lambda _: _set_factor(1.0)),
    OfOutside: (lambda _: _scale(4.0), lambda _: _scale(0.25)),
    OfAnArray: (lambda _: ARRAY.fill(5.0), lambda _: ARRAY.fill(2.0)),
    OfATableOfItsOwn: (lambda net: _number(net, 5.0), lambda net: _number(net, 2.0)),
    OfWhatItMayHold: (lambda net: _found(net, torch.full((1,), 5.0)), lambda net: _found(net, None)),
    OfACall: _put(nn.Linear, "_call_impl", _thrice),
    OfAMissingAttribute: _put(nn.Linear, "__getattr__", _with_more),
    OfALoop: _put(nn.Sequential, "__iter__", _reversed),
    OfAProperty: _put(nn.Linear, "weight", property(lambda self: self._parameters["weight"] * 3)),
    OfGradients: (lambda _: torch.set_grad_enabled(True), lambda _: torch.set_grad_enabled(False)),
    OfAWeightsGradients: (lambda net: net.requires_grad_(True), lambda net: net.requires_grad_(False)),
    OfInference: (lambda _: INSIDE.enter_context(torch.inference_mode()), lambda _: INSIDE.close()),
    OfClass: (lambda net: _set_class(net, Thrice), lambda net: _set_class(net, nn.Linear)),
}
# what a trace answers otherwise than a call
ANSWERED = (OfItsLayersType, OfANumber, OfAText, OfATensor, OfTracing, OfItself)


def made(kind: type[Block]) -> Net:
    """A network of random weights, the same in each process."""
    torch.manual_seed(0)
    net = Net(kind).eval().requires_grad_(False)
    for number, weight in enumerate((*net.parameters(), *OUTSIDE.layer.parameters())):
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)))
    return net


def given(rows: int) -> torch.Tensor:
    """An input of so many rows."""
    return torch.randn(2, rows, 8, generator=torch.Generator().manual_seed(rows))


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative."""
    return float((found - wanted).norm() / wanted.norm())


def main(states: str, names: list[str]) -> None:
    """Run and print."""
    import nexfort_engine

    rows: dict[str, list[float]] = {}
    for name in names:
        kind = globals()[name]
        net = made(kind)
        compiled, (change, back) = nexfort_engine.compile(net), CHANGES[kind]
        ran: list[str] = []
        with torch.no_grad():
            for state in states.split(","):
                if state == "changed":
                    change(net)
                elif "changed" in ran:
                    back(net)
                ran.append(state)
                rows.setdefault(name, []).append(max(apart(compiled(given(n)), net(given(n))) for n in (5, 7)))
            if ran[-1] == "changed":  # what is on a class of torch's would meet the next network
                back(net)
    print(json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
