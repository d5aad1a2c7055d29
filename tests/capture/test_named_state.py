# SPDX-License-Identifier: Apache-2.0
"""What code changes by name: as uncompiled code leaves it, with its results, in a block that is compiled or is not."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from effect_forms import CHANGES, KEPT, Form, module_of

import nexfort_engine
from nexfort_engine.capture.named_state import NamedState


@pytest.fixture(autouse=True)
def _numbers_as_they_were() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy)


def _ran(form: Form, folder: Path, name: str, compiled: bool) -> tuple[list[torch.Tensor], Any, Any]:
    """The results of four calls of a network, the last two of another size; what the code left; and the report."""
    with module_of(form, folder, name) as module, torch.no_grad():
        torch.manual_seed(0)
        net = module.Net().eval().requires_grad_(False)
        if compiled:
            net = nexfort_engine.compile(net)
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(1)
        inputs = [torch.randn(2, 5, 8), torch.randn(2, 7, 8)]
        results = [net(inputs[number // 2]).clone() for number in range(4)]
        return results, form.seen(module), net.report.as_dict() if compiled else None


def _compare(form: Form, folder: Path, name: str) -> dict[str, Any]:
    """The report of a compiled network that gives and leaves what the uncompiled one does."""
    wanted, left, _ = _ran(form, folder, f"nexfort_effect_eager_{name}", False)
    found, now, report = _ran(form, folder, f"nexfort_effect_{name}", True)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(now, left, rtol=1e-5, atol=1e-5)
    return dict(report)


@pytest.mark.parametrize("name", CHANGES)
def test_code_that_changes_what_it_reaches_by_name_runs_as_it_is(name: str, tmp_path: Path) -> None:
    report = _compare(CHANGES[name], tmp_path, f"changed_{list(CHANGES).index(name)}")
    assert not report["artefacts_compiled"]
    reasons = [row["reason"] for row in report["eager"]]
    assert any("and compiled code would" in reason for reason in reasons), reasons


@pytest.mark.parametrize("name", KEPT)
def test_a_table_that_code_makes_once_is_no_hindrance(name: str, tmp_path: Path) -> None:
    report = _compare(KEPT[name], tmp_path, f"kept_{list(KEPT).index(name)}")
    assert report["artefacts_compiled"] + report["artefacts_loaded"]
    assert not [row["reason"] for row in report["eager"] if "compiled code would" in row["reason"]]


class _Raises:
    """Whatever it is asked, it raises, as a package that is loaded when it is needed, and is not there."""

    def __getattribute__(self, name: str) -> Any:
        raise ImportError(name)


ODD = {"a package that is not there": _Raises(), "operators of torch": torch.ops, "the system's": random.SystemRandom()}
NEVER = False


@pytest.mark.parametrize("name", ODD)
def test_a_value_that_raises_when_it_is_asked_is_none_of_its_business(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "odd", ODD[name])

    class Block(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if NEVER:
                odd.next(odd.random(x)).mul_(2)  # type: ignore[name-defined] # noqa: F821
            return x * 2

    with NamedState([Block()]).kept(lambda: [Block.forward.__code__], lambda _: True):
        pass


def test_what_another_thread_does_meanwhile_stays() -> None:
    class Block(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            SEEN["block"] = 1
            return x * 2

    SEEN.clear()
    with NamedState([Block()]).kept(lambda: [Block.forward.__code__], lambda _: True):
        SEEN["other"] = 3
        random.random()  # the block draws none
    assert list(SEEN) == ["other"]


SEEN: dict[str, Any] = {}
