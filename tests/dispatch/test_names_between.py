# SPDX-License-Identifier: Apache-2.0
"""What code sets or takes by name while a step runs, and what is another thing in each thread."""

from __future__ import annotations

import collections
import contextvars
import copy
import threading
from typing import Any

import pytest
import torch
from reached_state import Block, Net, apart, given, made
from torch import nn

import nexfort_engine

pytestmark = pytest.mark.usefixtures("threads", "artefact_cache")
NEAR, FAR = 1e-4, 1e-2
FACTOR = 2.0
SETTINGS = {"factor": 2.0}
TAKEN: list[float] = []
OF_A_PROMPT: contextvars.ContextVar[float] = contextvars.ContextVar("OF_A_PROMPT", default=2.0)


def set_factor(value: float) -> None:
    global FACTOR
    FACTOR = value


def set_setting(value: float) -> None:
    SETTINGS["factor"] = value


def take() -> float:
    return TAKEN.pop()


class OfAGlobal(Block):
    def factor(self, x: torch.Tensor) -> Any:
        return FACTOR


class OfASetting(Block):
    def factor(self, x: torch.Tensor) -> Any:
        return SETTINGS["factor"]


class Taking(Block):
    def factor(self, x: torch.Tensor) -> Any:
        return TAKEN.pop()


class TakingElsewhere(Block):
    def factor(self, x: torch.Tensor) -> Any:
        return take()


class OfAContext(Block):
    def factor(self, x: torch.Tensor) -> Any:
        return OF_A_PROMPT.get()


class Setting(Net):
    """A network that sets for each block what its code reads, by functions beside it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            set_factor(2.0 + 3 * number)
            set_setting(2.0 + 3 * number)
            x = block(x)
        return x


@pytest.mark.parametrize("kind", [OfAGlobal, OfASetting])
@torch.no_grad()
def test_what_is_set_between_blocks_is_felt_in_the_same_step(kind: type[Block]) -> None:
    torch.manual_seed(0)
    net: nn.Module = Setting(kind).eval().requires_grad_(False)
    one = nn.Module.__call__(net, given(5))
    set_factor(2.0)
    set_setting(2.0)
    unset = net.blocks[1](net.blocks[0](given(5)))  # type: ignore[index,operator]
    assert apart(unset, one) > FAR, "what is set does not matter to the network"
    compiled = nexfort_engine.compile(net)
    for rows in (5, 5, 7):
        assert apart(compiled(given(rows)), net(given(rows))) < NEAR
    assert not compiled.report.as_dict()["eager"]


@pytest.mark.parametrize("kind", [Taking, TakingElsewhere])
@torch.no_grad()
def test_what_a_block_takes_out_of_a_list_is_there_for_its_own_call(kind: type[Block]) -> None:
    net = made(kind)
    compiled = nexfort_engine.compile(net)
    for first in (2.0, 5.0):
        TAKEN[:] = [first, first + 1]
        wanted = net(given(5))
        TAKEN[:] = [first, first + 1]
        assert apart(compiled(given(5)), wanted) < NEAR and not TAKEN
    reasons = [row["reason"] for row in compiled.report.as_dict()["eager"]]
    assert any("it changes a list that it reaches by name" in reason for reason in reasons)


NOTED: collections.deque[torch.Tensor] = collections.deque(maxlen=100)


class Noting(Block):
    """A block that leaves its results in a container that it reaches by name."""

    def factor(self, x: torch.Tensor) -> Any:
        NOTED.append(x.mean())
        return 2.0


@torch.no_grad()
def test_what_a_block_leaves_in_a_list_is_left_in_each_call() -> None:
    net = made(Noting)
    compiled = nexfort_engine.compile(net)
    for rows in (5, 5, 7):
        left = []
        for network in (net, compiled):
            NOTED.clear()
            network(given(rows))
            left.append(torch.stack(list(NOTED)))
        torch.testing.assert_close(*left)


def test_threads_with_values_of_their_own_have_their_own_results() -> None:
    net = made(OfAContext)
    compiled = nexfort_engine.compile(net)
    far: list[bool] = []

    def step(value: float, times: int) -> None:
        OF_A_PROMPT.set(value)
        with torch.no_grad():
            wanted = net(given(5))
            far.extend(apart(compiled(given(5)), wanted) > NEAR for _ in range(times))

    for times in (2, 60):  # one after another, until all is made, and side by side
        running = [threading.Thread(target=step, args=(value, times)) for value in (2.0, 5.0)]
        for one in running:
            one.start()
            if times == 2:
                one.join()
        for one in running:
            one.join()
    assert len(far) == 124 and not any(far)
    assert compiled.report.as_dict()["artefacts_compiled"] <= 2


class Toggled(Block):
    """A block that does what its network tells it, and calls the layer that its network puts there."""

    told: str | None = "twice"

    def factor(self, x: torch.Tensor) -> Any:
        return 2.0 if self.told == "twice" else 5.0


class Toggling(nn.Module):
    """A network that calls each block in two ways, and reads itself what it told them."""

    def __init__(self, *, submodules: bool, bias: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Toggled() for _ in range(3))
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8, bias=bias)])
        self.submodules, self.now = submodules, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            for way, layer in zip(("twice", None), self.layers, strict=True):
                self.now = way
                if self.submodules:
                    block.layer = layer
                else:
                    block.told = way
                x = block(x) / (2.0 if self.now == "twice" else 5.0)
        return x


@pytest.mark.parametrize(("submodules", "bias"), [(False, True), (True, True), (True, False)])
@torch.no_grad()
def test_blocks_that_their_network_exchanges_in_each_call_are_as_they_are_then(submodules: bool, bias: bool) -> None:
    torch.manual_seed(0)
    net = Toggling(submodules=submodules, bias=bias).eval().requires_grad_(False)
    compiled = nexfort_engine.compile(net)
    for rows in (5, 5, 7, 5):
        assert apart(compiled(given(rows)), copy.deepcopy(net)(given(rows))) < NEAR
    assert not compiled.report.as_dict()["eager"]
