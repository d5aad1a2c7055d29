# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints as ComfyUI's own loader takes them: a tiny Flux in each of its formats.

The weights are quantised by ComfyUI's own code for the format, and described to the loader by the keys that real files
have. What a machine cannot multiply natively the loader sets to be computed in full. No test lives here. ComfyUI must
be imported first (the fixture `comfyui` in conftest.py does it).
"""

from __future__ import annotations

import functools
import json
import math
import zlib
from typing import Any

import pytest
import torch

CHANNELS = 16  # of the latent; ComfyUI's loader presumes them for a Flux
# name of the format in a file -> what its layout is asked for when weights are quantised
FORMATS: dict[str, dict[str, Any]] = {
    "float8_e4m3fn": {"scale": "recalculate"},
    "float8_e5m2": {"scale": "recalculate"},
    "int8_tensorwise": {"per_channel": True},
    "nvfp4": {"scale": "recalculate"},
    "mxfp8": {},
}


@functools.cache
def plain_weights() -> dict[str, torch.Tensor]:
    """A Flux of two double and two single blocks, as small as the loader knows one."""
    import comfy.ops
    from comfy.ldm.flux.model import Flux

    flux = Flux(
        **{
            "image_model": "flux",
            "in_channels": CHANNELS,
            "out_channels": CHANNELS,
            "vec_in_dim": 8,
            "context_in_dim": 16,
        },
        **{"hidden_size": 128, "mlp_ratio": 4.0, "num_heads": 1, "axes_dim": [16, 56, 56], "depth": 2},
        **{"depth_single_blocks": 2, "theta": 10000, "patch_size": 2, "qkv_bias": True, "guidance_embed": True},
        **{"txt_ids_dims": [], "device": "cpu", "dtype": torch.float32, "operations": comfy.ops.disable_weight_init},
    )
    found = {}
    for name, weight in flux.state_dict().items():
        drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        matrix = drawn / math.sqrt(weight[0].numel()) if weight.ndim > 1 else drawn * 0.1
        found[name] = matrix + (0.0 if weight.ndim > 1 or name.endswith("bias") else 1.0)
    return found


def quantised_weights(form: str, *, native: bool = True) -> dict[str, torch.Tensor]:
    """The state dict of a file in which the matrices of all blocks are quantised.

    native: the layers may multiply in the format, where the machine can; otherwise the file asks for them in full.
    """
    import comfy.quant_ops as quant

    if form not in quant.QUANT_ALGOS:
        pytest.skip(f"this ComfyUI has no {form}")
    layout = quant.QUANT_ALGOS[form]["comfy_tensor_layout"]
    words = {"format": form, **({} if native else {"full_precision_matrix_mult": True})}
    found = {}
    for name, weight in plain_weights().items():
        if "blocks" in name and name.endswith("weight") and weight.ndim == 2:
            found |= quant.QuantizedTensor.from_float(weight, layout, **FORMATS[form]).state_dict(name)
            described = torch.tensor(list(json.dumps(words).encode()), dtype=torch.uint8)
            found[name.removesuffix("weight") + "comfy_quant"] = described
        else:
            found[name] = weight.clone()
    return found


def load(weights: dict[str, torch.Tensor], **options: Any) -> Any:
    """The patcher that ComfyUI's loader makes of a state dict, as a prompt would ask for it."""
    import comfy.sd

    with torch.inference_mode():
        patcher = comfy.sd.load_diffusion_model_state_dict(dict(weights), model_options=options)
    assert patcher is not None, "ComfyUI does not know the network by these weights"
    return patcher
