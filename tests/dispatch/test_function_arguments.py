# SPDX-License-Identifier: Apache-2.0
"""Blocks that are called with a function made in the step, as Qwen-Image-2.1 hands its attention to its blocks."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from large_rows import few
from subjects import MOVES, TOLERANCE, graphs_as_they_are
from torch import nn
from torch.nn import functional

import nexfort_engine

T = torch.Tensor
WIDTH = 8


class Block(nn.Module):
    """Attention as the caller wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: T, attend: Callable[..., T], options: dict[str, Any]) -> T:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out(attend(q, k, v, scale=options.get("scale", 1.0)))


class Network(nn.Module):
    """Text and image in one sequence; the text looks at itself alone."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.kind = kind
        self.calls: list[int] = []

    def forward(self, text: T, image: T, options: dict[str, Any]) -> T:
        x, length = torch.cat([text, image], 1), text.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        segments = ((0, length, mask), (length, x.shape[1], None))
        attend = getattr(self, self.kind)(segments, options)
        for block in self.blocks:
            x = block(x, attend, options)
        return x[:, length:]

    def closure(self, segments: Any, options: dict[str, Any]) -> Callable[..., T]:
        def attend(q: T, k: T, v: T, scale: float) -> T:
            parts = []
            for start, end, mask in segments:
                given = q[:, start:end] * options.get("warmth", 1.0)
                parts.append(functional.scaled_dot_product_attention(given, k[:, :end], v[:, :end], mask, scale=scale))
            return torch.cat(parts, 1)

        return attend

    def partial(self, segments: Any, options: dict[str, Any]) -> Callable[..., T]:
        return functools.partial(_by_segments, segments, warmth=options.get("warmth", 1.0))

    def counting(self, segments: Any, options: dict[str, Any]) -> Callable[..., T]:
        inner, calls = self.closure(segments, options), self.calls

        def attend(q: T, k: T, v: T, scale: float) -> T:
            calls.append(len(calls))
            return inner(q, k, v, scale)

        return attend


def _by_segments(segments: Any, q: T, k: T, v: T, scale: float, warmth: float) -> T:
    parts = []
    for start, end, mask in segments:
        given = q[:, start:end] * warmth
        parts.append(functional.scaled_dot_product_attention(given, k[:, :end], v[:, :end], mask, scale=scale))
    return torch.cat(parts, 1)


def inputs(
    text: int = 5, image: int = 12, batch: int = 1, seed: int = 0, **options: Any
) -> tuple[T, T, dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    return (*(torch.randn(batch, n, WIDTH, generator=generator) for n in (text, image)), dict(options))


def far(found: T, wanted: T) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.fixture(autouse=True)
def uncompiled(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path / "store"))
    with graphs_as_they_are(), torch.inference_mode():
        yield


def network(kind: str) -> Network:
    torch.manual_seed(0)
    return Network(kind).eval().requires_grad_(False)


@pytest.mark.parametrize("kind", few(["closure", "partial"], ["closure"]))
def test_a_function_of_the_step_is_part_of_the_block_at_every_size(kind: str) -> None:
    net = network(kind)
    compiled = nexfort_engine.compile(net)
    assert far(compiled(*inputs()), net(*inputs())) < TOLERANCE
    made = compiled.report.as_dict()["artefacts_compiled"]
    for row in ({"seed": 3}, {"image": 20}, {"text": 9, "image": 7}, {"batch": 2}, {"batch": 3, "text": 3}):
        assert far(compiled(*inputs(**row)), net(*inputs(**row))) < TOLERANCE, row
    report = compiled.report.as_dict()
    assert not report["eager"] and report["artefacts_compiled"] == made == 1


@pytest.mark.parametrize("kind", few(["closure", "partial"], ["closure"]))
def test_what_a_function_reads_of_the_options_is_followed(kind: str) -> None:
    net = network(kind)
    compiled = nexfort_engine.compile(net)
    plain = net(*inputs())
    assert far(compiled(*inputs()), plain) < TOLERANCE
    for options in ({"warmth": 3.0}, {"scale": 0.1}, {}):
        wanted = net(*inputs(**options))
        assert not options or far(wanted, plain) > MOVES
        assert far(compiled(*inputs(**options)), wanted) < TOLERANCE, options


def test_another_function_of_the_same_name_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    net = network("closure")
    compiled = nexfort_engine.compile(net)
    plain = net(*inputs())
    assert far(compiled(*inputs()), plain) < TOLERANCE

    def other(self: Network, segments: Any, options: dict[str, Any]) -> Callable[..., T]:
        def attend(q: T, k: T, v: T, scale: float) -> T:
            return v.flip(1) * scale

        return attend

    monkeypatch.setattr(Network, "closure", other)
    wanted = net(*inputs())
    assert far(wanted, plain) > MOVES
    assert far(compiled(*inputs()), wanted) < TOLERANCE


def test_a_function_that_keeps_count_is_called_as_often_as_without() -> None:
    net = network("counting")
    compiled = nexfort_engine.compile(net)
    for _ in range(2):
        net.calls.clear()
        wanted = net(*inputs())
        count = len(net.calls)
        net.calls.clear()
        assert far(compiled(*inputs()), wanted) < TOLERANCE
        assert len(net.calls) == count == 3
    assert not compiled.report.as_dict()["eager"]


class Asking(nn.Module):
    """A block that asks which function it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: T, activation: Callable[[T], T]) -> T:
        return x + activation(self.linear(x)) * {functional.silu: 3.0}.get(activation, 1.0)


class AskingNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Asking() for _ in range(2))

    def forward(self, x: T, activation: Callable[[T], T]) -> T:
        for block in self.blocks:
            x = block(x, activation)
        return x


def asking() -> AskingNetwork:
    torch.manual_seed(0)
    return AskingNetwork().eval().requires_grad_(False)


def test_code_that_asks_which_function_it_was_given_is_answered() -> None:
    net = asking()
    compiled, x = nexfort_engine.compile(net), torch.randn(1, 5, WIDTH)
    for activation in (functional.silu, functional.relu, functional.silu, torch.tanh):
        assert far(compiled(x, activation), net(x, activation)) < TOLERANCE
    assert compiled.report.as_dict()["artefacts_compiled"] == 3


FACTOR = 1.0


def scaled(x: T) -> T:
    return x * FACTOR


def test_names_that_a_function_of_no_file_reads_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("of_no_file")
    monkeypatch.setitem(sys.modules, "of_no_file", module)
    module.scaled = types.FunctionType(scaled.__code__, vars(module))
    net = asking()
    compiled, x = nexfort_engine.compile(net), torch.randn(1, 5, WIDTH)
    for module.FACTOR in (2.0, 5.0):
        assert far(compiled(x, module.scaled), net(x, module.scaled)) < TOLERANCE
    assert compiled.report.as_dict()["artefacts_compiled"] == 2


class Held:
    """An object with a tensor."""

    def __init__(self, seen: T) -> None:
        self.seen = seen


class Adding(nn.Module):
    """A network whose blocks add to a tensor that they reach through an object or a function."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        for block in self.blocks:
            block.__class__ = AddingBlock

    def forward(self, x: T, held: Any) -> T:
        for block in self.blocks:
            x = block(x, held)
        return x


class AddingBlock(Block):
    def forward(self, x: T, held: Any) -> T:  # type: ignore[override]
        seen = held.seen if isinstance(held, Held) else held()
        seen.add_(x)
        return x + self.out(x) * seen


@pytest.mark.parametrize("through", ["object", "function"])
def test_what_a_network_reaches_through_its_arguments_is_changed_once(through: str) -> None:
    """The engine runs no step ahead of the first one with what it cannot copy."""
    torch.manual_seed(0)
    net, x, found = Adding().eval().requires_grad_(False), torch.randn(1, 5, WIDTH), []
    for module in (net, nexfort_engine.compile(net)):
        seen = torch.zeros(1, 5, WIDTH)
        held = Held(seen) if through == "object" else lambda seen=seen: seen
        found.append([*(module(x, held) for _ in range(2)), seen])
    for wanted, got in zip(*found, strict=True):
        assert far(got, wanted) < TOLERANCE
