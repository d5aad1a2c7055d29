# SPDX-License-Identifier: Apache-2.0
"""Functional collectives in captured graphs, in a group of two ranks of which only this one is there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from probe import block_of, x
from torch import nn

from nexfort_engine.capture.exporter import capture
from nexfort_engine.capture.types import Captured, Example
from nexfort_engine.guards import collectives
from nexfort_engine.guards.call_spec import Flat, flatten_call
from nexfort_engine.guards.module_guards import describe, matches_text
from nexfort_engine.guards.option_recorder import Refused

dist = torch.distributed
T = torch.Tensor


@pytest.fixture(autouse=True)
def group() -> Iterator[Any]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


class Config:
    """As diffusers' config of context parallelism: a group beside facts that differ from rank to rank."""

    def __init__(self, group: Any, rank: int = 1) -> None:
        self.group, self.my_rank, self.place = group, rank, torch.device("cpu", rank)


def exchanged(block: nn.Module, h: T) -> T:
    import torch.distributed._functional_collectives as functional

    gathered = functional.all_gather_tensor(block.linear(h), 1, block.config.group)
    one = functional.all_to_all_single(h.flatten(), None, None, block.config.group).reshape(h.shape)
    return functional.all_reduce(one, "sum", block.config.group) + gathered[:, : h.shape[1]]


def captured(block: nn.Module, *args: Any) -> Captured:
    flat = Flat()
    spec = flatten_call(args, {}, flat)
    return capture(block, Example.of(spec, flat))


def kinds(found: Captured) -> list[Any]:
    calls = [node for node in found.graph.graph.nodes if node.target is collectives.operator()]
    return [call.args[1] for call in calls]


def test_collectives_stand_in_the_order_of_the_code_and_know_their_group_by_a_number(group: Any) -> None:
    block = block_of(exchanged, config=Config(group))
    found = captured(block, x())
    assert kinds(found) == ["all_gather_into_tensor", "all_to_all_single", "all_reduce"]
    assert found.groups == [[0, 2, -1]] and "_c10d_functional" not in found.graph.code
    calls = [node for node in found.graph.graph.nodes if node.target is collectives.operator()]
    assert not calls[0].args[6] and all(
        before in [token.args[0] for token in call.args[6]] for before, call in itertools.pairwise(calls)
    )
    names = collectives.group_names(block, found.reads)
    assert names == [group.group_name]
    with collectives.speaking_in(names), torch.no_grad():
        result = found.graph(*[block.linear.weight, block.linear.bias], *found.constants, x(4, 10))[0]
    assert result.shape == (4, 10, 8)


def test_what_differs_from_rank_to_rank_is_left_out_where_no_code_asks_for_it(group: Any) -> None:
    block = block_of(exchanged, config=Config(group))
    found = captured(block, x())
    assert matches_text(block_of(exchanged, config=Config(group, rank=0)), found.reads)
    assert describe(Config(group)) == describe(Config(group, rank=0))
    assert describe(group) == ["process group", 2]


def test_a_rank_that_code_asks_for_is_what_the_artefact_rests_on(group: Any) -> None:
    def shifted(block: nn.Module, h: T) -> T:
        return exchanged(block, h) + block.config.my_rank

    assert captured(block_of(shifted, config=Config(group)), x()).groups == [[0, 2, 1]]


def test_a_group_that_the_block_does_not_hold_is_refused() -> None:
    other = dist.new_group([0, 1])

    def strays(block: nn.Module, h: T) -> T:
        import torch.distributed._functional_collectives as functional

        return functional.all_reduce(block.linear(h), "sum", other)

    with pytest.raises(Refused, match="a process group that it holds nowhere"):
        captured(block_of(strays), x())


def test_the_group_of_all_processes_need_not_be_held(group: Any) -> None:
    def sums(block: nn.Module, h: T) -> T:
        import torch.distributed._functional_collectives as functional

        return functional.all_reduce(block.linear(h), "sum", dist.group.WORLD)

    assert captured(block_of(sums), x()).groups == [[collectives.WHOLE, 2, -1]]
