# SPDX-License-Identifier: Apache-2.0
"""What an artefact does is watched until it is known that all of it stays on the GPU, which is "meta" here."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_host_constants import AWAY, OUTSIDE, X, _mode  # noqa: F401  # both modes in which operators come
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from nexfort_engine.cudagraphs.capture_check import CaptureCheck
from nexfort_engine.cudagraphs.host_constants import Answering, Constants, Remembering, unwatched
from nexfort_engine.runtime import artifact


class Artefact:
    """What is remembered of one."""

    unwatched = foreign = False
    note_watched, note_foreign = artifact.Artefact.note_watched, artifact.Artefact.note_foreign


def _on_the_gpu() -> torch.Tensor:
    return torch.cat([X * 2.0, X.view(4, 3).t() + torch.empty_like(X)])


@pytest.mark.parametrize("kind", [Remembering, CaptureCheck])
def test_an_artefact_that_stays_on_the_gpu_is_watched_once(kind: Callable[[], Constants]) -> None:
    artefact, seen = Artefact(), list[int]()
    with torch.device(AWAY), kind() as watching:
        for _ in range(2):
            with watching.around(artefact):
                _on_the_gpu()
                seen.append(len(_get_current_dispatch_mode_stack()))
        assert len(_get_current_dispatch_mode_stack()) == 1 and len(_get_current_function_mode_stack()) == 2
        assert artefact.unwatched and watching.reason is None
        torch.arange(4, device="cpu").to(AWAY)  # what comes after it is watched as ever
    assert seen == [1, 0] and len(watching.sent) == 1


def test_only_what_runs_and_is_seen_is_learnt() -> None:
    artefact, answered = Artefact(), itertools.count()
    with Remembering() as watching:
        with watching.around(artefact, lambda: next(answered)):
            _on_the_gpu()  # or rather, what it made before
        with unwatched(), watching.around(artefact):
            torch.arange(4).to(AWAY)
    with watching.around(artefact):  # a step that is refused runs when nobody watches any more
        torch.arange(4).to(AWAY)
    with Answering([]) as answering, answering.around(artefact):
        _on_the_gpu()
    assert not artefact.unwatched
    artefact.unwatched = True
    with Answering([]) as answering, answering.around(artefact):
        assert not _get_current_dispatch_mode_stack()


@pytest.mark.parametrize(
    "does",
    [
        lambda: torch.arange(4),
        lambda: torch.arange(4).to(AWAY),
        lambda: OUTSIDE.to(AWAY),
        lambda: X * OUTSIDE[:1].view(()),
        lambda: torch.tensor([1.0], device=AWAY),
        lambda: X[[0, 1]],
        lambda: OUTSIDE.sum().item(),
        lambda: torch.cond(torch.tensor(True), lambda x: x + 1, lambda x: x - 1, (X,)),
    ],
    ids=["made", "copied", "from outside", "number", "literal", "looked up", "read", "of another order"],
)
def test_an_artefact_that_does_not_is_watched_each_time(does: Callable[[], Any]) -> None:
    artefact = Artefact()
    with Remembering() as watching:
        for _ in range(2):
            with watching.around(artefact):
                _on_the_gpu()
                does()
    assert not artefact.unwatched


def test_what_follows_a_reason_against_a_graph_is_watched_again() -> None:
    artefact = Artefact()
    with CaptureCheck() as watching:
        OUTSIDE.sum().item()
        with watching.around(artefact):
            _on_the_gpu()
    assert watching.reason and not artefact.unwatched


def test_an_artefact_that_fails_is_watched_again() -> None:
    artefact = Artefact()
    with Remembering() as watching, pytest.raises(ZeroDivisionError), watching.around(artefact):
        _on_the_gpu()
        1 / 0
    assert not artefact.unwatched
    artefact.unwatched = True
    with Remembering() as watching:
        with pytest.raises(ZeroDivisionError), watching.around(artefact):
            1 / 0
        torch.arange(4).to(AWAY)
    assert len(watching.sent) == 1


def test_modes_of_others_see_what_an_unwatched_artefact_does() -> None:
    class Theirs(TorchDispatchMode):
        saw = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.saw += 1
            return func(*args, **(kwargs or {}))

    artefact = Artefact()
    artefact.unwatched = True
    with Theirs() as theirs, Remembering() as watching, watching.around(artefact):
        X.neg()
    assert theirs.saw == 1
