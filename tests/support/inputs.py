# SPDX-License-Identifier: Apache-2.0
"""Random inputs for the tiny backbones: noise, conditioning and time that vary apart, and a sampler's options."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

Size = tuple[int, ...]
Call = tuple[tuple[Any, ...], dict[str, Any]]


class Draw:
    """Random inputs. `seed` decides the noise, `prompt` the conditioning, `step` the time: each varies alone."""

    def __init__(self, seed: int, prompt: int, step: int) -> None:
        self._noise = torch.Generator().manual_seed(1000 + seed)
        self._prompt = torch.Generator().manual_seed(2000 + prompt)
        self._step = step

    def noise(self, *shape: int) -> torch.Tensor:
        """What the sampler denoises."""
        return torch.randn(shape, generator=self._noise)

    def prompt(self, *shape: int) -> torch.Tensor:
        """What a text encoder gives. Different in every row of the batch."""
        return torch.randn(shape, generator=self._prompt)

    def time(self, batch: int, greatest: float) -> torch.Tensor:
        """A time between 0 and `greatest`, one for each row and all of them different."""
        return greatest * (0.9 - 0.17 * self._step - 0.01 * torch.arange(batch))


def sampler_options(batch: int = 2, step: int = 0) -> dict[str, Any]:
    """The part of transformer_options that ComfyUI's sampler writes on every step."""
    sigmas = torch.linspace(1.0, 0.0, 5)
    return {
        "wrappers": {},
        "callbacks": {},
        "cond_or_uncond": [0, 1][:batch],
        "uuids": [object() for _ in range(batch)],  # fresh on every step, as the sampler's are
        "sample_sigmas": sigmas,
        "sigmas": sigmas[step : step + 1],
        "prefetch_dynamic_vbars": False,
    }


def tensors_of(result: Any) -> list[torch.Tensor]:
    """The tensors in what a backbone returns."""
    if isinstance(result, torch.Tensor):
        return [result]
    values = result.values() if isinstance(result, Mapping) else result
    return [t for value in values for t in tensors_of(value)]


def latent_call(d: Draw, batch: int, size: Size, length: int, *, greatest: float, channels: int = 4) -> Call:
    """A call as ComfyUI's samplers make it: noise, time, context and options."""
    args = (d.noise(batch, channels, *size), d.time(batch, greatest))
    return args, {"context": d.prompt(batch, length, 16), "control": None, "transformer_options": {}}


def shuffled_calls(sizes: Sequence[Size], lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Every size, prompt length and batch from 1 to 4, as keywords of a call, in an order that is always the same."""
    calls = [
        {"batch": batch, "size": size, "length": length, "seed": batch, "step": batch % 2}
        for batch in (1, 2, 3, 4)
        for size in sizes
        for length in lengths
    ]
    random.Random(7).shuffle(calls)
    return calls
