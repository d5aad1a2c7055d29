# SPDX-License-Identifier: Apache-2.0
"""How near a picture is to another of the same seed: PSNR and SSIM of the pixels, and the distance of the latents."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.functional import conv2d

_WINDOW, _SIGMA = 11, 1.5  # SSIM as its authors have it


def likeness(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> dict[str, float | None]:
    """Figures of two results of `generation.Result.kept()`: psnr in dB (None for the same pixels), ssim, latents.

    latents: ||ours - theirs|| / ||theirs||. Raises ValueError where shapes differ.
    """
    found: dict[str, float | None] = {}
    for name in ("pixels", "latents"):
        if ours[name].shape != theirs[name].shape:
            raise ValueError(f"{name} of {tuple(ours[name].shape)} and {tuple(theirs[name].shape)} cannot be compared")
    a, b = (one["pixels"].double() for one in (ours, theirs))
    found["psnr"], found["ssim"] = psnr(a, b), ssim(a, b)
    x, y = (one["latents"].double() for one in (ours, theirs))
    found["latents"] = float((x - y).norm() / y.norm())
    return found


def psnr(a: torch.Tensor, b: torch.Tensor) -> float | None:
    """Peak signal to noise in dB, of pixels from 0 to 255; None where there is no noise."""
    error = float((a - b).square().mean())
    return 10 * math.log10(255**2 / error) if error else None


def ssim(a: torch.Tensor, b: torch.Tensor) -> float:
    """Mean structural similarity of pictures (N, C, H, W) from 0 to 255; the window shrinks to a small picture."""
    side = min(_WINDOW, a.shape[-1], a.shape[-2])
    line = torch.arange(side, dtype=a.dtype) - (side - 1) / 2
    line = torch.exp(-line.square() / (2 * _SIGMA**2))
    line = line / line.sum()
    kernel = (line[:, None] * line[None])[None, None]

    def mean(x: torch.Tensor) -> torch.Tensor:
        return conv2d(x.flatten(0, 1)[:, None], kernel)

    mean_a, mean_b = mean(a), mean(b)
    var_a, var_b = mean(a * a) - mean_a**2, mean(b * b) - mean_b**2
    both = mean(a * b) - mean_a * mean_b
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    value = (2 * mean_a * mean_b + c1) * (2 * both + c2) / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))
    return float(value.mean())


def as_text(found: dict[str, Any]) -> str:
    """One line."""
    noise = "same pixels" if found["psnr"] is None else f"PSNR {found['psnr']:.2f} dB"
    return f"{noise}, SSIM {found['ssim']:.5f}, latent distance {found['latents']:.3g}"
