# SPDX-License-Identifier: Apache-2.0
"""Pipelines made from their configurations: full size is the published size, tiny ones work and hang on the prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import random_pipelines
from benchmarks.random_pipelines import RECIPES, SHRINK, build, recipe_of
from benchmarks.unusable import Unusable

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
CPU = torch.device("cpu")
# millions of weights, as the published checkpoints have them; Latte's are those of its configuration
PUBLISHED = {
    **{("sd21", "unet"): 865.9, ("sd21", "text_encoder"): 340.4, ("sd21", "vae"): 83.7},
    **{("sdxl", "unet"): 2567.5, ("sdxl", "text_encoder"): 123.1, ("sdxl", "text_encoder_2"): 694.7},
    **{("pixart", "transformer"): 611.1, ("pixart", "text_encoder"): 4762.3},
    **{("flux", "transformer"): 11901.4, ("sd3", "transformer"): 2028.3, ("latte", "transformer"): 1057.2},
}


@pytest.mark.parametrize(("family", "part"), PUBLISHED, ids="-".join)
def test_full_size_is_the_published_size(family: str, part: str) -> None:
    with torch.device("meta"):
        net = random_pipelines._bare(RECIPES[family].parts[part], tiny=False)
    millions = sum(p.numel() for p in net.parameters()) / 1e6
    assert millions == pytest.approx(PUBLISHED[family, part], rel=2e-3)


def run(pipe: Any, family: str, prompt: str, steps: int = 2) -> torch.Tensor:
    recipe = RECIPES[family]
    side = recipe.size // SHRINK
    pipe.set_progress_bar_config(disable=True)
    out = pipe(
        prompt, height=side, width=side, num_inference_steps=steps, output_type="pt",
        generator=torch.Generator().manual_seed(1), **recipe.call, **recipe.tiny_call,
    )  # fmt: skip
    return out.images if hasattr(out, "images") else out.frames


@pytest.mark.parametrize("family", RECIPES)
def test_a_tiny_one_works_and_its_prompt_matters(family: str) -> None:
    pipe = build(f"tiny:{family}", CPU, torch.float32)
    one = run(pipe, family, "a beautiful girl")
    assert one.isfinite().all() and float(one.std()) > 0.05
    other = run(pipe, family, "a cat")
    assert float((one - other).norm() / one.norm()) > 0.02
    again = run(build(f"tiny:{family}", CPU, torch.float32), family, "a beautiful girl")
    assert torch.equal(one, again), "the same weights each time"


def test_float32_computes_with_the_weights_of_the_recipe_s_own_dtype() -> None:
    whole, half = (build("tiny:sd21", CPU, dtype).unet for dtype in (torch.float32, torch.float16))
    for name, weight in whole.named_parameters():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, half.get_parameter(name).float()), name


def test_the_default_dtype_is_put_back() -> None:
    before = torch.get_default_dtype()
    with pytest.raises(ZeroDivisionError), random_pipelines.made_in(torch.float16, CPU):
        1 / 0
    assert torch.get_default_dtype() == before


def test_an_unknown_family_names_the_nearest() -> None:
    with pytest.raises(Unusable, match=r"'random:sdlx'.*did you mean random:sdxl\?"):
        recipe_of("random:sdlx")
