# SPDX-License-Identifier: Apache-2.0
"""A block captured at one call and compared with its graph at others. No test lives here."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from nexfort_engine.capture.exporter import capture
from nexfort_engine.capture.types import Captured, Example
from nexfort_engine.guards.call_spec import Flat, flatten_call
from nexfort_engine.modules.tree import WeightSlots
from nexfort_engine.runtime import artifact

T = torch.Tensor


class Block(nn.Module):
    """A block around a function of itself and its arguments, with one weight."""

    def __init__(self, function: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.randn(10, 8))
        for name, value in attributes.items():
            setattr(self, name, value)
        self.__dict__["function"] = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self).run(self, *args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def block_of(function: Callable[..., Any], **attributes: Any) -> Block:
    """A block whose forward is the function: of a class of its own, so that nothing has to be read from it."""
    torch.manual_seed(0)
    kind = type("Block", (Block,), {"run": function})
    return kind(function, **attributes).eval().requires_grad_(False)


class Probe:
    """A block captured at one call, and compared with its graph at others. lists: as one that changes lists."""

    def __init__(
        self,
        block: nn.Module,
        *args: Any,
        dynamic: bool = True,
        images: bool = False,
        lists: bool = False,
        **kwargs: Any,
    ) -> None:
        self.lists = lists
        self.block, flat = block, Flat(lists=lists)
        self.spec = flatten_call(args, kwargs, flat)
        self.captured: Captured = capture(block, Example.of(self.spec, flat), dynamic=dynamic, images=images)
        manifest = artifact.manifest_of(self.captured, "Block", None, {"region": "block"})
        self.artefact = artifact.Artefact("id", "primary", manifest)
        graph, weights, constants = self.captured.graph, self.artefact.weights, self.captured.constants
        self.artefact.code = lambda inputs: graph(*inputs[: len(weights)], *constants, *inputs[len(weights) :])
        assert self.refuses(*args, **kwargs) is None, "its own call"
        self.agrees(*args, **kwargs)

    @property
    def weights(self) -> list[torch.Tensor]:
        """Those that the captured graph is called with."""
        slots = WeightSlots(self.block).read()
        return [slots[i] for i in self.captured.weights]

    def refuses(self, *args: Any, **kwargs: Any) -> str | None:
        """Why a call may not use the graph."""
        flat = Flat(lists=self.lists)
        if flatten_call(args, kwargs, flat) != self.spec:
            return "another structure"
        failure = self.artefact.guard_failure(flat)
        return failure.reason if failure else None

    def graph(self, *args: Any, **kwargs: Any) -> Any:
        """What the graph gives."""
        flat = Flat(lists=self.lists)
        flatten_call(args, kwargs, flat)
        binding = artifact.Binding(self.artefact, self.block)
        with torch.no_grad():
            return binding.run(WeightSlots(self.block).read(), flat, [t.contiguous() for t in flat.tensors])

    def agrees(self, *args: Any, **kwargs: Any) -> bool:
        """Whether the graph may serve a call. If so, results, changed arguments and written options are compared."""
        given = copy.deepcopy((args, kwargs))
        theirs = copy.deepcopy((args, kwargs))
        refused = self.refuses(*args, **kwargs)
        try:
            with torch.no_grad():
                wanted = self.block(*theirs[0], **theirs[1])
        except Exception as error:
            assert refused is not None, f"the block raises {error!r} and the graph would not"
            return False
        if refused is not None:
            return False
        found = self.graph(*given[0], **given[1])
        assert same(found, wanted), "another result than the block's"
        assert same(given, theirs), "other changes to the arguments than the block's"
        assert shared((given, found)) == shared((theirs, wanted)), "other objects at the places of one"
        return True


def shared(value: Any) -> list[int]:
    """Which places of a value hold one object: for each tensor and list, the first place that has it."""
    found: list[Any] = []

    def walk(one: Any) -> None:
        if isinstance(one, (torch.Tensor, list, dict)):
            found.append(one)
        if isinstance(one, (list, tuple)):
            for item in one:
                walk(item)
        elif isinstance(one, dict):
            for item in one.values():
                walk(item)

    walk(value)
    return [next(i for i, other in enumerate(found) if other is one) for one in found]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    return a == b


def error(found: T, truth: T) -> float:
    """How far a result is from the truth, as a relative norm."""
    return float((found.double() - truth).norm() / truth.norm().clamp_min(1e-12))


def x(batch: int = 2, length: int = 6, width: int = 8, seed: int = 1) -> T:
    return torch.randn(batch, length, width, generator=torch.Generator().manual_seed(seed))


def check_near(ways: Sequence[Sequence[T]], theirs: Sequence[T], truth: Sequence[T]) -> None:
    """Each way's results lie as eager's, have their dtype, and are as near to the truth."""
    for way in ways:
        for found, one, right in zip(way, theirs, truth, strict=True):
            assert found.stride() == one.stride() and found.dtype == one.dtype
            assert error(found, right) <= 1.1 * error(one, right) + 1e-3
