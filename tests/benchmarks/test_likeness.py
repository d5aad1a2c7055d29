# SPDX-License-Identifier: Apache-2.0
"""PSNR, SSIM and the latents' distance: against figures that can be worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.likeness import as_text, likeness, psnr, ssim


def picture(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (2, 3, 24, 20), generator=torch.Generator().manual_seed(seed)).double()


def test_psnr_is_by_the_mean_square() -> None:
    black = torch.zeros(1, 3, 8, 8)
    assert psnr(black, black + 5) == pytest.approx(20 * math.log10(255 / 5))
    assert psnr(black, black) is None


def test_ssim_is_one_for_the_same_and_small_for_another() -> None:
    a, b = picture(), picture(1)
    assert ssim(a, a) == pytest.approx(1)
    assert abs(ssim(a, b)) < 0.1
    assert 0.5 < ssim(a, (a * 0.7 + b * 0.3)) < 1
    assert ssim(a[..., :5, :5], a[..., :5, :5]) == pytest.approx(1), "smaller than the window"


def test_ssim_of_flat_pictures_is_that_of_their_brightness() -> None:
    a, b = torch.full((1, 1, 16, 16), 100.0).double(), torch.full((1, 1, 16, 16), 120.0).double()
    c1 = (0.01 * 255) ** 2
    assert ssim(a, b) == pytest.approx((2 * 100 * 120 + c1) / (100**2 + 120**2 + c1))


def test_the_latents_distance_is_relative_to_the_reference() -> None:
    theirs = {"pixels": picture(), "latents": torch.full((1, 4, 2, 2), 2.0)}
    ours = {"pixels": picture(), "latents": torch.full((1, 4, 2, 2), 2.5)}
    found = likeness(ours, theirs)
    assert found["latents"] == pytest.approx(0.25) and found["psnr"] is None
    assert as_text(found) == "same pixels, SSIM 1.00000, latent distance 0.25"


def test_other_shapes_are_refused() -> None:
    theirs = {"pixels": picture(), "latents": torch.zeros(1, 4, 2, 2)}
    with pytest.raises(ValueError, match=r"latents of \(1, 4, 2, 3\) and \(1, 4, 2, 2\)"):
        likeness({**theirs, "latents": torch.zeros(1, 4, 2, 3)}, theirs)
