# SPDX-License-Identifier: Apache-2.0
"""diffusers' context parallelism in several processes on a CPU (gloo): compiled gives what the same setup gives eager.

Captured graphs run as they are where a test does not say otherwise. Nothing here was run on GPUs.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import parallel_ranks
import pytest
import torch
from parallel_ranks import Ended

pytest.importorskip("diffusers")
pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch without gloo")
TOLERANCE = 1e-4
FAMILIES = ["flux", "wan", "qwen", "ltx", "flux2"]


def agree(ended: list[Ended], names: list[str]) -> None:
    """Assert that each rank compiled each network, once for all sizes and lengths, and got what eager got."""
    for rank in ended:
        assert rank.told.keys() == set(names)
        for rows in rank.told.values():
            assert max(rows["distances"]) < TOLERANCE and rows["alone"] < 100 * TOLERANCE
            assert not rows["eager"] and rows["new"][0] and not any(rows["new"][1:]), rows
            assert rows["speak"] > 0, "no block speaks with another process"


def test_a_network_runs_compiled_in_two_processes(tmp_path: Path) -> None:
    """And what it cannot split is refused as in eager: here sides, below what else there is."""
    ended = parallel_ranks.run(2, "families", tmp_path, names=["flux"], first="compile", odd=((18, 18), 64))
    agree(ended, ["flux"])
    for rank in ended:
        eager, ours = rank.told["flux"]["refused"]
        assert eager and ours == eager


@pytest.mark.large
@pytest.mark.parametrize("first", ["compile", "parallel"])
def test_five_families_run_compiled_in_two_processes(tmp_path: Path, first: str) -> None:
    agree(parallel_ranks.run(2, "families", tmp_path, 500, names=FAMILIES, first=first), FAMILIES)


@pytest.mark.large
def test_two_families_run_compiled_in_four_processes(tmp_path: Path) -> None:
    names = ["flux", "wan"]
    agree(parallel_ranks.run(4, "families", tmp_path, 500, names=names, first="parallel", heads=4), names)


@pytest.mark.large
def test_a_rank_that_compiles_nothing_speaks_in_the_same_order(tmp_path: Path) -> None:
    """Its blocks run eager, and those of the other rank compiled: what they send each other is the same."""
    whole, alone = parallel_ranks.run(2, "small", tmp_path, 120, fails_on=1)
    assert max(*whole.told["distances"], *alone.told["distances"]) < TOLERANCE
    assert whole.told["artefacts"] and not whole.told["eager"]
    assert not alone.told["artefacts"] and "nothing is captured here" in alone.told["eager"][0]


def test_when_a_rank_is_killed_the_others_end_with_a_message(tmp_path: Path) -> None:
    ranks = parallel_ranks.start(2, "small", tmp_path, dies_on=1)
    ranks[1].wait(timeout=120)
    began = time.monotonic()
    left, killed = parallel_ranks.ends(ranks, 60)
    assert time.monotonic() - began < 30 and killed.code == -9
    assert left.code not in (0, None) and max(left.told["distances"]) < TOLERANCE
    if sys.version_info >= (3, 11):  # notes of errors
        assert "which speaks with other processes; one of them may have failed" in left.text


@pytest.mark.large
def test_one_process_compiles_and_the_other_loads(tmp_path: Path) -> None:
    """By Inductor, with one store for both."""
    ended = parallel_ranks.run(2, "small", tmp_path, 400, lower=True)
    assert all(max(rank.told["distances"]) < TOLERANCE and not rank.told["eager"] for rank in ended)
    assert sorted(rank.told["artefacts"] for rank in ended) == [["compiled"], ["loaded"]]


@pytest.mark.large
@pytest.mark.parametrize(
    ("size", "length", "heads"), [((16, 16), 63, None), ((16, 16), 64, 3)], ids=["length", "heads"]
)
def test_what_cannot_be_split_is_refused_as_in_eager(
    tmp_path: Path, size: tuple[int, int], length: int, heads: int | None
) -> None:
    ended = parallel_ranks.run(2, "refused", tmp_path, 120, names=["flux"], size=size, length=length, heads=heads)
    for rank in ended:
        eager, ours = rank.told["flux"]
        assert eager and ours == eager
