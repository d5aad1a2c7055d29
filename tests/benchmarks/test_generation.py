# SPDX-License-Identifier: Apache-2.0
"""What the old engine's metrics mean: which steps are timed, how a pipeline is told to call back, the fitted line."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from benchmarks.generation import Result, StepClock, generate, line_through

CPU = torch.device("cpu")


class Pipe:
    """Four steps, each a second of a clock that the test holds."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock

    def _step(self) -> torch.Tensor:
        self.clock[0] += 1.0
        return torch.full((1, 4, 2, 2), self.clock[0])

    def __call__(self, generator: Any, callback_on_step_end: Any = None, height: int = 0) -> Any:
        self.clock[0] += 100.0  # a text encoder
        for step in range(4):
            callback_on_step_end(self, step, 0, {"latents": self._step()})
        self.clock[0] += 50.0  # a VAE
        return SimpleNamespace(images=[Image.new("RGB", (4, 2), (1, 2, 3))])


class OldPipe(Pipe):
    """One that calls back as pipelines did before."""

    def __call__(self, generator: Any, callback: Any = None, callback_steps: int = 2, height: int = 0) -> Any:  # type: ignore[override]
        assert callback_steps == 1
        return super().__call__(generator, lambda _p, step, t, values: callback(step, t, values["latents"]))


@pytest.mark.parametrize("kind", [Pipe, OldPipe])
def test_the_rate_is_of_the_steps_after_the_first(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    found = generate(kind(clock), {"height": 16}, 1, CPU)
    assert found.rate == pytest.approx(1.0), "three steps in three seconds: neither text encoder nor VAE"
    assert found.seconds == pytest.approx(154.0)
    assert found.steps == 4 and float(found.latents[0, 0, 0, 0]) == 104.0  # type: ignore[index]


def test_one_step_has_no_rate() -> None:
    clock = StepClock(CPU)
    assert clock.iterations_per_second() is None
    clock._note(None)
    assert clock.iterations_per_second() is None


def test_a_result_keeps_pixels_by_channel() -> None:
    kept = Result([Image.new("RGB", (4, 2), (1, 2, 3))], 0.0, None, 1, torch.ones(1).half()).kept()
    assert kept["pixels"].shape == (1, 3, 2, 4)
    assert kept["pixels"][0, :, 1, 3].tolist() == [1, 2, 3]
    assert kept["latents"].dtype == torch.float32


def test_the_line_is_the_nearest() -> None:
    assert line_through([(steps, 0.25 * steps + 3) for steps in range(1, 9)]) == pytest.approx((0.25, 3.0))
    assert line_through([(1, 0.0), (2, 1.0), (3, 1.0), (4, 2.0)])[0] == pytest.approx(0.6)
