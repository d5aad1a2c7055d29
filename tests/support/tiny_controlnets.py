# SPDX-License-Identifier: Apache-2.0
"""ControlNets with random weights for the networks of tiny_networks.py, under the keys that the published files have.

Nothing is zero where a trained one begins with zeros, so that each moves the picture. ComfyUI is imported only inside.
"""

from __future__ import annotations

from typing import Any

from tiny_networks import flux_weights, network, random_weights


def sd15_controlnet(seed: int) -> dict[str, Any]:
    """The first half of `sd15_unet` with its zero convolutions, which are not zero here."""
    from comfy.cldm.cldm import ControlNet

    control = network(
        ControlNet, image_size=32, in_channels=4, model_channels=320, hint_channels=3, num_res_blocks=[1, 1],
        channel_mult=[1, 1], transformer_depth=[0, 1], transformer_depth_middle=1, num_heads=8, num_head_channels=-1,
        use_spatial_transformer=True, context_dim=768, use_linear_in_transformer=False, legacy=False,
    )  # fmt: skip
    return random_weights(control, seed)


def sdxl_controlnet(seed: int) -> dict[str, Any]:
    """The smallest with attention that detection knows: on the innermost level one layer each. In diffusers' layout,
    as those of SDXL are published."""
    import comfy.utils
    import torch
    from comfy.cldm.cldm import ControlNet

    sizes: dict[str, Any] = {
        "num_res_blocks": [2, 2, 2], "channel_mult": [1, 2, 4], "transformer_depth": [0, 0, 0, 0, 1, 1],
        "transformer_depth_middle": 1,
    }  # fmt: skip
    control = network(
        ControlNet, image_size=32, in_channels=4, model_channels=320, hint_channels=3, num_head_channels=64,
        use_spatial_transformer=True, context_dim=2048, use_linear_in_transformer=True, adm_in_channels=2816,
        num_classes="sequential", legacy=False, **sizes,
    )  # fmt: skip
    to_diffusers = comfy.utils.unet_to_diffusers({**sizes, "transformer_depth_output": [0] * 9})
    names = {ours: theirs for theirs, ours in to_diffusers.items()} | _sdxl_own_names()
    return {names[name]: found for name, found in random_weights(control, seed, torch.float16).items()}


def _sdxl_own_names() -> dict[str, str]:
    """Of what a ControlNet has beside a UNet's first half: the convolutions that read the hint, and those that give."""
    hint = ["conv_in", *(f"blocks.{i}" for i in range(6)), "conv_out"]
    layers = {f"input_hint_block.{2 * i}": f"controlnet_cond_embedding.{name}" for i, name in enumerate(hint)}
    layers |= {f"zero_convs.{i}.0": f"controlnet_down_blocks.{i}" for i in range(9)}
    layers["middle_block_out.0"] = "controlnet_mid_block"
    # The loader takes the projection of a UNet with classes too; those of SDXL call it so.
    layers |= {f"label_emb.0.{i}": f"add_embedding.linear_{i // 2 + 1}" for i in (0, 2)}
    return {f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in layers.items() for kind in ("weight", "bias")}


def flux_controlnet(seed: int) -> dict[str, Any]:
    """Two double blocks and no single one, fed with the picture itself: the layout of XLabs."""
    from comfy.ldm.flux.controlnet import ControlNetFlux

    return flux_weights(ControlNetFlux, seed, depth_single_blocks=0, guidance_embed=True)


def sd3_controlnet(seed: int) -> dict[str, Any]:
    """Two blocks without text, for a network of two: the layout of those for SD3.5 large, whose pooled vector has gone
    through the big network's layers before."""
    import torch
    from comfy.cldm.dit_embedder import ControlNetEmbedder

    control = network(
        ControlNetEmbedder, img_size=None, patch_size=2, in_chans=16, attention_head_dim=64, num_attention_heads=2,
        adm_in_channels=2048, num_layers=2, main_model_double=2, double_y_emb=True,
    )  # fmt: skip
    layers = {"x_embedder.proj": "pos_embed.proj"}
    for ours, theirs in (("t", "timestep"), ("y", "text")):
        layers |= {f"{ours}_embedder.mlp.{i}": f"time_text_embed.{theirs}_embedder.linear_{i // 2 + 1}" for i in (0, 2)}
    names = {f"{ours}.{kind}": f"{layers[ours]}.{kind}" for ours in layers for kind in ("weight", "bias")}
    found = {names.get(name, name): tensor for name, tensor in random_weights(control, seed).items()}
    found = {name: tensor for name, tensor in found.items() if not name.startswith("orig_y_embedder.")}
    return {**found, "control_type": torch.tensor(1.0)}  # edges


def qwen_image_controlnet(seed: int) -> dict[str, Any]:
    """One block at the full width, fed with a latent: the layout of InstantX."""
    import torch
    from comfy.ldm.qwen_image.controlnet import QwenImageControlNetModel

    return random_weights(network(QwenImageControlNetModel, num_layers=1), seed, torch.bfloat16)
