# SPDX-License-Identifier: Apache-2.0
"""What code asks about gradients is guarded where it asks; who asks nothing has one artefact for all callers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reached_state import Block, OfGradients, apart, given, made

import nexfort_engine

pytestmark = pytest.mark.usefixtures("threads", "artefact_cache")
NEAR = 1e-4
MODES: dict[str, Callable[[], Any]] = {
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "gradients": torch.enable_grad,
}


class AsksNothing(Block):
    """A block that is the same in all modes."""

    def factor(self, x: torch.Tensor) -> Any:
        return 3.0


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that no other test fills."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path))


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize(("kind", "count"), [(AsksNothing, 1), (OfGradients, 2)])
def test_callers_in_other_modes_share_an_artefact_unless_code_asks(kind: type[Block], count: int) -> None:
    net = made(kind)
    compiled = nexfort_engine.compile(net)
    for mode in ("no gradients", "inference", "gradients", "no gradients"):
        with MODES[mode]():
            assert apart(compiled(given(5)), net(given(5))) < NEAR, mode
    report = compiled.report.as_dict()
    assert report["artefacts_compiled"] == count and not report["eager"]


class OfItsInput(Block):
    """A block that asks whether its input needs a gradient."""

    def factor(self, x: torch.Tensor) -> Any:
        return 5.0 if x.requires_grad else 2.0


@torch.no_grad()
def test_an_input_that_needs_a_gradient_is_another_call() -> None:
    net = made(OfItsInput)
    compiled = nexfort_engine.compile(net)
    plain, needs = given(5), given(5).requires_grad_(True)
    assert apart(net(plain), net(needs)) > NEAR
    for x in (plain, needs, plain):
        assert apart(compiled(x), net(x)) < NEAR
