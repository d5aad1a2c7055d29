# SPDX-License-Identifier: Apache-2.0
"""Blocks that keep something for each thread: what one thread keeps is no other's, whoever was compiled first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reached_state import Block, apart, given, made

import nexfort_engine
from nexfort_engine.capture.thread_number import ThreadNumber, holds_thread

pytestmark = pytest.mark.usefixtures("threads", "artefact_cache")
NEAR = 1e-4


class Ended(Block):
    """A block that puts back the entry of its thread where there is one, as a video VAE does at the end of a video."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: dict[int, Any] = {}

    def factor(self, x: torch.Tensor) -> float:
        thread = threading.get_ident()
        if not self.ends.get(thread, False):
            return 1.0
        self.ends[thread] = True
        return 3.0

    def belongs_to(self, thread: int) -> None:
        self.ends = {thread: True}


class Owned(Block):
    """A block that notes which thread it belongs to."""

    def __init__(self) -> None:
        super().__init__()
        self.owner = 0

    def factor(self, x: torch.Tensor) -> float:
        return 3.0 if self.owner == threading.get_ident() else 1.0

    def belongs_to(self, thread: int) -> None:
        self.owner = thread


def elsewhere(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The result of a call on another thread, while this one lives."""
    found: list[torch.Tensor] = []

    def called() -> None:
        with torch.no_grad():
            found.append(call())

    thread = threading.Thread(target=called)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("here_first", [True, False])
@pytest.mark.parametrize("kind", [Ended, Owned])
@torch.no_grad()
def test_what_a_block_keeps_for_one_thread_is_not_another_s(kind: type[Any], here_first: bool) -> None:
    net = made(kind)
    compiled = nexfort_engine.compile(net)
    for block in net.blocks:
        block.belongs_to(threading.get_ident())
    owner, other = net(given(5)), elsewhere(lambda: net(given(5)))
    assert apart(owner, other) > 0.1
    for here in (here_first, not here_first) * 2:
        found = compiled(given(5)) if here else elsewhere(lambda: compiled(given(5)))
        assert apart(found, owner if here else other) < NEAR


def test_the_number_of_a_thread_is_found_wherever_it_lies() -> None:
    here = threading.get_ident()
    assert all(map(holds_thread, (here, [here], {here: 1}, {"a": (here,)}, {here})))
    assert not any(map(holds_thread, (here + 1, [1.0], {"a": here / 2}, str(here), None)))


def test_only_code_of_the_host_is_told_another_number() -> None:
    number, found = ThreadNumber(5), dict[str, Any]()
    asks = compile("import threading\nnumber = threading.get_ident()", nexfort_engine.__file__, "exec")
    with number.told():
        exec(asks, found)  # noqa: S102  it stands for code of the engine
        assert found["number"] == threading.current_thread().ident and not number.asked
        assert threading.get_ident() == 5 and number.asked
