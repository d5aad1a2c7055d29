# SPDX-License-Identifier: Apache-2.0
"""One run of a pipeline and what is measured of it, in the old engine's terms.

Iterations per second are (steps - 1) over the time from the end of the first step to the end of the last: without text
encoders, first step and VAE. Inference time is the wall clock around the whole call, pictures included.
"""

from __future__ import annotations

import inspect
import time
from dataclasses import dataclass
from typing import Any

import torch

GIB = 2**30


class StepClock:
    """Notes when steps end, by the device's own clock where it has one. Keeps the latents of the last step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ends: list[Any] = []
        self.latents: torch.Tensor | None = None

    def keywords(self, pipe: Any) -> dict[str, Any]:
        """How a pipeline is told to call back: the new way, or the one of older custom pipelines."""
        names = inspect.signature(type(pipe).__call__).parameters
        if "callback_on_step_end" in names:
            return {"callback_on_step_end": self._on_step_end}
        if "callback" in names:
            return {"callback": self._on_old_callback, "callback_steps": 1}
        return {}

    def _on_step_end(self, _pipe: Any, _step: int, _timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        self._note(values.get("latents"))
        return {}

    def _on_old_callback(self, _step: int, _timestep: Any, latents: torch.Tensor) -> None:
        self._note(latents)

    def _note(self, latents: torch.Tensor | None) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()  # type: ignore[no-untyped-call]
            self._ends.append(event)
        else:
            self._ends.append(time.perf_counter())
        self.latents = latents

    @property
    def steps(self) -> int:
        """How many steps have ended."""
        return len(self._ends)

    def iterations_per_second(self) -> float | None:
        """None where fewer than two steps ended."""
        if len(self._ends) < 2:
            return None
        first, last = self._ends[0], self._ends[-1]
        if self._device.type == "cuda":
            last.synchronize()
            seconds = first.elapsed_time(last) / 1e3
        else:
            seconds = last - first
        return (len(self._ends) - 1) / seconds


@dataclass
class Result:
    """What one run gave: pictures (or the frames of videos) as PIL, seconds, iterations per second."""

    pictures: list[Any]
    seconds: float
    rate: float | None
    steps: int
    latents: torch.Tensor | None

    def kept(self) -> dict[str, torch.Tensor]:
        """Pixels (N, 3, H, W) from 0 to 255 and final latents, on the CPU, for a comparison."""
        pixels = [_pixels(picture) for picture in self.pictures]
        latents = self.latents if self.latents is not None else torch.zeros(0)
        return {"pixels": torch.stack(pixels), "latents": latents.float().cpu()}


def _pixels(picture: Any) -> torch.Tensor:
    raw = torch.frombuffer(bytearray(picture.convert("RGB").tobytes()), dtype=torch.uint8)
    return raw.view(picture.height, picture.width, 3).permute(2, 0, 1)


def generate(pipe: Any, call: dict[str, Any], seed: int, device: torch.device) -> Result:
    """Run a pipeline once, from a fresh generator, and wait for the device."""
    clock = StepClock(device)
    began = time.perf_counter()
    out = pipe(**call, generator=torch.Generator(device).manual_seed(seed), **clock.keywords(pipe))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - began
    pictures = out.images if hasattr(out, "images") else [frame for video in out.frames for frame in video]
    return Result(pictures, seconds, clock.iterations_per_second(), clock.steps, clock.latents)


def peak_gib(device: torch.device) -> dict[str, float]:
    """GiB at most allocated and reserved on a GPU since the counters began; empty elsewhere."""
    if device.type != "cuda":
        return {}
    return {
        "max_used_gib": torch.cuda.max_memory_allocated(device) / GIB,
        "max_reserved_gib": torch.cuda.max_memory_reserved(device) / GIB,
    }


def begin_peak(device: torch.device) -> None:
    """Begin the counters of `peak_gib` anew."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def line_through(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Slope and beginning of the straight line nearest to (steps, seconds)."""
    x = torch.tensor([float(steps) for steps, _ in points], dtype=torch.float64)
    y = torch.tensor([seconds for _, seconds in points], dtype=torch.float64)
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())
    return slope, float(y.mean() - slope * x.mean())
