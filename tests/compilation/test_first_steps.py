# SPDX-License-Identifier: Apache-2.0
"""First steps that are called otherwise than the others: with one time for all tokens, say, where those have two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from subjects import ask_instead, distance, graphs_as_they_are, ran
from torch import Tensor, nn

import nexfort_engine
from nexfort_engine.compilation import handover
from nexfort_engine.runtime.engine_state import Picture

pytestmark = pytest.mark.usefixtures("threads", "artefact_cache")
TOLERANCE = 1e-5
STEPS, BLOCKS = 5, 6


class Block(nn.Module):
    """Scaled by the time of each group of tokens, or by that of all."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.time = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return x + torch.tanh(self.tokens(x)) * self.time(time)


class Blocks(nn.Module):
    """A few of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, time)
        return x


class Name:
    """Of a picture."""


class Host:
    """Runs pictures, and counts the artefacts that run in each step."""

    def __init__(self, patch: pytest.MonkeyPatch, *, background: bool) -> None:
        self.net, self.now = Blocks(), Picture(Name(), STEPS, lambda: 0)
        self.compiled = nexfort_engine.compile(self.net, options={"options": {"compile.background": background}})
        ask_instead(patch, self.compiled._nexfort_engine, picture=lambda *_: self.now)

    def picture(self, groups: int = 2, first: int = 1) -> list[int]:
        """One picture, whose first step has as many times as `first` says; what is begun meanwhile is made after it."""
        self.now = Picture(Name(), STEPS, lambda: 0)
        times = [first] + [groups] * (STEPS - 1)
        counts = [self._step(torch.randn(groups, 7, 16), torch.randn(rows, 1, 16)) for rows in times]
        background = self.compiled._nexfort_engine.builder.background
        assert background is None or background.join(60)
        return counts

    def _step(self, *call: Tensor) -> int:
        with torch.inference_mode():
            count, found = ran(lambda: self.compiled(*call))
            assert distance([found], [self.net(*call)]) < TOLERANCE
        return count


@pytest.fixture
def patch(tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    tmp_path.chmod(0o700)
    with graphs_as_they_are(), pytest.MonkeyPatch.context() as made:
        made.setenv("NEXFORT_CACHE_DIR", str(tmp_path))
        yield made


def test_short_pictures_are_compiled_from_their_first_step_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(handover, "SHORT", 60.0)  # what a picture lacks is planned in its last step
    host = Host(patch, background=True)
    none, all_of_them = [0] * STEPS, [BLOCKS] * STEPS
    assert [host.picture() for _ in range(4)] == [none, none, all_of_them, all_of_them]
    report: dict[str, Any] = host.compiled.report.as_dict()
    assert report["artefacts_compiled"] == 2 and not report["eager"], "for one time and for more"


@pytest.mark.parametrize("first", [1, 2])
def test_where_steps_wait_both_kinds_are_compiled_in_whatever_order(patch: pytest.MonkeyPatch, first: int) -> None:
    host = Host(patch, background=False)
    for one in (first, 3 - first, 1, 2):
        assert host.picture(first=one) == [BLOCKS] * STEPS
    report: dict[str, Any] = host.compiled.report.as_dict()
    assert report["artefacts_compiled"] == 2 and not report["eager"]


def test_nothing_more_is_compiled_for_no_tokens_at_all(patch: pytest.MonkeyPatch) -> None:
    host = Host(patch, background=False)
    host.picture(first=2)
    call = torch.randn(2, 0, 16), torch.randn(2, 1, 16)
    with torch.inference_mode():
        assert host.compiled(*call).shape == host.net(*call).shape == (2, 0, 16)
    assert host.compiled.report.as_dict()["artefacts_compiled"] == 1
