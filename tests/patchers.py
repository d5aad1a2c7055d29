# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's own model patchers around small networks, and its own sampler on them. No test lives here.

ComfyUI must be imported first (the fixture `comfyui` in conftest.py does it).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

STEPS = 2


def patcher_around(network: nn.Module, *, flux: bool = False) -> Any:
    """A ModelPatcher as a loader makes it; `flux` with that family's sampling and conditioning, else SD1.5's."""
    import comfy.model_base
    import comfy.model_management
    import comfy.model_patcher
    import comfy.supported_models

    kind = comfy.supported_models.Flux if flux else comfy.supported_models.SD15
    config = kind({"disable_unet_model_creation": True, "in_channels": 4, "out_channels": 4})
    model = (comfy.model_base.Flux if flux else comfy.model_base.BaseModel)(config, device="cpu")
    if not hasattr(network, "dtype"):
        network.dtype = torch.float32  # type: ignore[assignment]  # what every network of ComfyUI has
    model.diffusion_model = network.eval().requires_grad_(False)
    comfy.model_management.archive_model_dtypes(network)
    cpu = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(model, load_device=cpu, offload_device=cpu)


def sample(
    patcher: Any,
    *,
    seed: int = 0,
    prompt: int = 0,
    size: tuple[int, int] = (16, 16),
    length: int = 64,
    cfg: float = 4.0,
) -> torch.Tensor:
    """The latent of two steps of ComfyUI's sampler. With cfg 1 the network sees batch 1, else prompt and negative."""
    import comfy.sample

    noise = torch.randn(1, 4, *size, generator=torch.Generator().manual_seed(seed))
    words = torch.Generator().manual_seed(100 + prompt)
    positive, negative = (
        [[torch.randn(1, length, 16, generator=words), {"pooled_output": torch.randn(1, 8, generator=words)}]]
        for _ in range(2)
    )
    with torch.inference_mode():
        return comfy.sample.sample(
            patcher, noise, STEPS, cfg, "euler", "simple", positive, negative, torch.zeros_like(noise),
            disable_pbar=True, seed=seed,
        ).clone()  # fmt: skip
