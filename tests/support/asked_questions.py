# SPDX-License-Identifier: Apache-2.0
"""Blocks whose code asks a tensor, an option or an argument for more than sizes, and calls with other answers.

As a program it makes such calls with the cache that NEXFORT_CACHE_DIR names: `python asked_questions.py ORDER KIND...`,
ORDER 1 or -1. It prints how far each is from eager.
"""

from __future__ import annotations

import collections
import enum
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Given = Callable[[], dict[str, Any]]


class Block(nn.Module):
    """Adds a layer times what its question gives."""

    ask: Callable[..., Any]

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("table", torch.ones(4, 8))
        self.held: Any = None

    def forward(self, x: torch.Tensor, given: Any = None, options: Any = None) -> torch.Tensor:
        return x + self.layer(x) * float(self.ask(x, given, options))


class Net(nn.Module):
    """Some of them."""

    def __init__(self, kind: type[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: torch.Tensor, **given: Any) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, **given)
        return x


@dataclass
class Question:
    """ask: what a block does (block, x, given, options). states: calls, or what is done to the network before one."""

    ask: Callable[..., Any]
    calls: tuple[Given, ...] = (dict,)
    states: tuple[Callable[[Block], None], ...] = (lambda block: None,)

    def block(self, name: str) -> type[Block]:
        """A class of blocks of its own, so that no other question's artefacts serve it."""
        return type("".join(part.title() for part in name.split()), (Block,), {"ask": self.ask})

    def every(self) -> list[tuple[Given, Callable[[Block], None]]]:
        """Every call in every state."""
        return [(call, state) for state in self.states for call in self.calls]


def _tagged(*values: Any) -> list[Callable[[], torch.Tensor]]:
    def tagged(value: Any) -> torch.Tensor:
        one = torch.ones(4)
        if value is not None:
            one.tag = value  # type: ignore[attr-defined]
        return one

    return [lambda value=value: tagged(value) for value in values]


def _of_given(ask: Callable[[torch.Tensor], bool], *made: Callable[[], Any]) -> Question:
    def number(self: Block, x: torch.Tensor, given: Any, options: Any) -> float:
        return 2.0 if ask(given) else 5.0

    return Question(number, tuple([lambda make=make: {"given": make()} for make in made]))


def _of_option(ask: Callable[[Any], bool], *made: Callable[[], Any]) -> Question:
    def number(self: Block, x: torch.Tensor, given: Any, options: Any) -> float:
        return 2.0 if ask(options["of"]) else 5.0

    return Question(number, tuple([lambda make=make: {"options": {"of": make()}} for make in made]))


def _of_held(ask: Callable[[Any], Any], *values: Any) -> Question:
    def number(self: Block, x: torch.Tensor, given: Any, options: Any) -> Any:
        return ask(self.held)

    return Question(
        number, states=tuple([lambda block, value=value: setattr(block, "held", value) for value in values])
    )


def _wide() -> torch.Tensor:
    return torch.ones(4, 8)[:, :4]


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(4, 4)


class Numbered(enum.IntEnum):
    """A number of another class."""

    ONE = 1


class Marked(torch.Tensor):
    """A tensor of another class."""


ONE = torch.ones(4)
LIST = [1.0]


def square() -> torch.Tensor:
    return torch.ones(4, 4)


def of_sizes(sizes: tuple[int, ...]) -> list[Callable[[], torch.Tensor]]:
    return [lambda size=size: torch.ones(size) for size in sizes]


def _exchange(value: torch.Tensor) -> Callable[[Block], None]:
    """What puts a tensor where a global name leads to."""
    return lambda block: globals().__setitem__("TENSOR", value)


TENSOR = torch.ones(4, 4)


def _pairs() -> list[Given]:
    return [lambda other=other: {"a": ONE, "b": other} for other in (ONE, ONE + 0)]


def first(x: Any) -> Any:
    return x


def second(x: Any) -> Any:
    return x


QUESTIONS = {
    "size of an option": _of_option(lambda t: t.shape[0] > 4, *of_sizes((1, 4, 8))),
    "dtype of an option": _of_option(lambda t: t.dtype == torch.float64, lambda: ONE, lambda: ONE.double()),
    "layout of an argument": _of_given(lambda t: t.is_contiguous(), square, _wide),
    "strides of an argument": _of_given(lambda t: t.stride(0) > 4, square, _wide),
    "offset of an argument": _of_given(lambda t: t.storage_offset() > 0, square, lambda: torch.ones(5, 4)[1:]),
    "layout of a view": _of_given(lambda t: t.transpose(0, 1).is_contiguous(), square, lambda: square().t()),
    "layout of what is computed": _of_given(
        lambda t: (t * 2).is_contiguous(), square, _wide, lambda: square().t(), lambda: ONE[0].expand(4, 4)
    ),
    "layout of an option": _of_option(lambda t: t.is_contiguous(), square, _wide),
    "gradient of an option": _of_option(lambda t: t.requires_grad, square, lambda: square().requires_grad_()),
    "inference of an argument": _of_given(lambda t: t.is_inference(), square, _inference),
    "class of an argument": _of_given(lambda t: isinstance(t, nn.Parameter), square, lambda: nn.Parameter(square())),
    "class of an option": _of_option(lambda t: type(t) is Marked, square, lambda: square().as_subclass(Marked)),
    "attribute of an argument": _of_given(lambda t: getattr(t, "tag", 0) > 2, *_tagged(None, 1, 3)),
    "attribute of an option": _of_option(lambda t: hasattr(t, "tag"), *_tagged(None, 1)),
    "version of an argument": _of_given(lambda t: t._version > 0, square, lambda: square().add_(1)),
    "base of an argument": _of_given(lambda t: t._base is None, square, _wide),
    "two arguments": Question(
        lambda self, x, given, options: 2.0 if given is options["of"] else 5.0,
        (lambda: {"given": ONE, "options": {"of": ONE}}, lambda: {"given": ONE, "options": {"of": ONE.clone()}}),
    ),
    "two options": _of_option(lambda of: of["a"] is of["b"], *_pairs()),
    "two lists": _of_given(lambda of: of[0] is of[1], lambda: [LIST, LIST], lambda: [LIST, [1.0]]),
    "an argument and its own": Question(
        lambda self, x, given, options: 2.0 if given is self.held else 5.0,
        (lambda: {"given": ONE},),
        (lambda block: setattr(block, "held", ONE), lambda block: setattr(block, "held", ONE.clone())),
    ),
    "a parameter of its own": Question(
        lambda self, x, given, options: 2.0 if self.held[0] is self.scale else 5.0,
        states=(lambda block: setattr(block, "held", (block.scale,)), lambda block: setattr(block, "held", (ONE,))),
    ),
    "a global tensor": _of_given(lambda t: t is TENSOR, lambda: TENSOR, lambda: TENSOR + 0),
    "hashes": _of_option(lambda of: hash(of["a"]) == hash(of["b"]), *_pairs()),
    "attributes of an argument": _of_given(lambda t: "tag" in vars(t), *_tagged(None, 1)),
    "order of dimensions": _of_given(lambda t: t.dim_order()[0] == 0, square, lambda: square().t()),
    "shared memory": _of_given(lambda t: t.is_shared(), square, lambda: square().share_memory_()),
    "layout of a global": Question(
        lambda self, x, given, options: 2.0 if TENSOR.is_contiguous() else 5.0,
        states=(_exchange(torch.ones(4, 4)), _exchange(torch.ones(4, 8)[:, :4])),
    ),
    "attribute of a global": Question(
        lambda self, x, given, options: 2.0 if hasattr(TENSOR, "tag") else 5.0,
        states=tuple(map(_exchange, (torch.ones(4), *[make() for make in _tagged(1)]))),
    ),
    "gradient of a global": Question(
        lambda self, x, given, options: 2.0 if TENSOR.requires_grad else 5.0,
        states=(lambda block: TENSOR.requires_grad_(False), lambda block: TENSOR.requires_grad_(True)),  # type: ignore
    ),
    "function among the options": _of_option(lambda f: f is first, lambda: first, lambda: second),
    "true and one": _of_option(lambda v: v is True, lambda: True, lambda: 1),
    "sign of nothing": _of_option(lambda v: math.copysign(1.0, v) > 0, lambda: 0.0, lambda: -0.0),
    "order of keys": _of_option(lambda of: next(iter(of)) == "a", lambda: {"a": 1, "b": 2}, lambda: {"b": 2, "a": 1}),
    "whether it holds a tensor": _of_held(lambda held: 2.0 if held is None else 5.0, None, torch.ones(3)),
    "sign of what it holds": _of_held(lambda held: math.copysign(3.0, held), 0.0, -0.0),
    "class of a number that it holds": _of_held(lambda held: 2.0 if type(held) is int else 5.0, 1, Numbered.ONE),
    "class of a mapping that it holds": _of_held(
        lambda held: 2.0 if type(held) is dict else 5.0, {"a": 1}, collections.OrderedDict(a=1)
    ),
    "true and one that it holds": _of_held(lambda held: 2.0 if held[0] is True else 5.0, (1,), (True,)),
}


def made(name: str) -> Net:
    """A network of random weights, the same in each process."""
    torch.manual_seed(0)
    return Net(QUESTIONS[name].block(name)).eval().requires_grad_(False)


def distances(name: str, order: int, times: int = 2) -> tuple[list[float], list[torch.Tensor], Any]:
    """How far compiled results are from eager's, these, and the compiled network. order: 1, or -1 for backwards."""
    import nexfort_engine

    net = made(name)
    compiled, found, results = nexfort_engine.compile(net), [], []
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for call, state in QUESTIONS[name].every()[::order] * times:
            for block in net.blocks:
                state(block)
            given = call()
            results.append(net(x, **given))
            found.append(float((compiled(x, **given) - results[-1]).norm() / results[-1].norm()))
    return found, results, compiled


if __name__ == "__main__":
    print(json.dumps({name: max(distances(name, int(sys.argv[1]), 1)[0]) for name in sys.argv[2:]}))
