# SPDX-License-Identifier: Apache-2.0
"""Networks of image and video models with random weights, as small as ComfyUI's own detection accepts.

Each gives the state dict of ComfyUI's own class under the keys of the real file. ComfyUI is imported only inside. What
files are made of them is in tiny_checkpoints.py.
"""

from __future__ import annotations

import zlib
from typing import Any


def random_weights(module: Any, seed: int, dtype: Any = None) -> dict[str, Any]:
    """The module's state dict filled by name: matrices by their fan-in, norms around 1, biases around 0."""
    import torch

    found = {}
    for name, tensor in module.state_dict().items():
        if not tensor.is_floating_point():
            found[name] = tensor
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
        values = torch.randn(tensor.shape, generator=generator)
        if tensor.ndim > 1:
            values = values / tensor[0].numel() ** 0.5
        else:
            values = values * 0.1 + (0.0 if name.endswith("bias") else 1.0)
        found[name] = values.to(dtype or torch.float32).contiguous()
    return found


def network(cls: Any, **config: Any) -> Any:
    """An instance of a ComfyUI network with its weights left unset."""
    import comfy.ops
    import torch

    return cls(dtype=torch.float32, device="cpu", operations=comfy.ops.disable_weight_init, **config)


def sd15_unet(seed: int) -> dict[str, Any]:
    """Two levels of one block, attention on the inner one. Detection wants 320 channels, context 768."""
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    unet = network(
        UNetModel, image_size=32, in_channels=4, out_channels=4, model_channels=320, num_res_blocks=[1, 1],
        channel_mult=[1, 1], transformer_depth=[0, 1], transformer_depth_output=[0, 0, 1, 1],
        transformer_depth_middle=1, num_heads=8, num_head_channels=-1, use_spatial_transformer=True,
        context_dim=768, use_linear_in_transformer=False, legacy=False,
    )  # fmt: skip
    return random_weights(unet, seed)


def flux_unet(seed: int, guidance: bool = True) -> dict[str, Any]:
    """Two double and two single blocks of one head. Detection wants heads of 128, and takes one without guidance for
    Flux schnell."""
    from comfy.ldm.flux.model import Flux

    return flux_weights(Flux, seed, depth_single_blocks=2, guidance_embed=guidance)


def flux_weights(cls: Any, seed: int, **config: Any) -> dict[str, Any]:
    """Weights of a network of Flux's, or of a ControlNet for it, with two double blocks of one head."""
    flux = network(
        cls, image_model="flux", in_channels=16, out_channels=16, vec_in_dim=32, context_in_dim=64,
        hidden_size=128, mlp_ratio=4.0, num_heads=1, depth=2, axes_dim=[16, 56, 56],
        theta=10000, patch_size=2, qkv_bias=True, txt_ids_dims=[], **config,
    )  # fmt: skip
    # Files in the wild call it "scale"; the loader renames it, and detection takes either.
    return {name.replace("_norm.weight", "_norm.scale"): found for name, found in random_weights(flux, seed).items()}


def sd3_unet(seed: int) -> dict[str, Any]:
    """Two joint blocks, which detection reads off the width of 64 a block. A pooled vector of 2048 is what its
    ControlNets take, with the layers of this network that read it; 3.5 norms queries and keys."""
    from comfy.ldm.modules.diffusionmodules.mmdit import OpenAISignatureMMDITWrapper

    context = {"target": "torch.nn.Linear", "params": {"in_features": 64, "out_features": 128}}
    sd3 = network(
        OpenAISignatureMMDITWrapper, input_size=None, patch_size=2, in_channels=16, depth=2,
        adm_in_channels=2048, context_embedder_config=context, pos_embed_scaling_factor=None,
        pos_embed_max_size=64, num_patches=4096, qk_norm="rms",
    )  # fmt: skip
    return random_weights(sd3, seed)


def wan_unet(seed: int) -> dict[str, Any]:
    """Two blocks of one head. Detection wants heads of 128 and a 4096 wide context."""
    from comfy.ldm.wan.model import WanModel

    wan = network(
        WanModel, model_type="t2v", patch_size=(1, 2, 2), in_dim=16, dim=128, ffn_dim=256, freq_dim=256,
        text_dim=4096, out_dim=16, num_heads=1, num_layers=2,
    )  # fmt: skip
    return random_weights(wan, seed)


def wan_i2v_unet(seed: int) -> dict[str, Any]:
    """Wan 2.2 from a picture: the same with 20 channels more, for the picture and its mask."""
    from comfy.ldm.wan.model import WanModel

    wan = network(
        WanModel, model_type="t2v", patch_size=(1, 2, 2), in_dim=36, dim=128, ffn_dim=256, freq_dim=256,
        text_dim=4096, out_dim=16, num_heads=1, num_layers=2,
    )  # fmt: skip
    return random_weights(wan, seed)


def krea2_unet(seed: int) -> dict[str, Any]:
    """Two blocks of two heads and two layers of text. Detection wants heads of 128, and 20 heads on the text."""
    from comfy.ldm.krea2.model import SingleStreamDiT

    krea = network(SingleStreamDiT, features=256, heads=2, kvheads=1, layers=2, txtlayers=2, txtdim=320)
    return random_weights(krea, seed)


def flux2_unet(seed: int) -> dict[str, Any]:
    """Two double and two single blocks of one head, as FLUX.2 Klein has them: without guidance."""
    from comfy.ldm.flux.model import Flux

    flux = network(
        Flux, image_model="flux2", in_channels=128, out_channels=128, vec_in_dim=None, context_in_dim=64,
        hidden_size=128, mlp_ratio=3.0, num_heads=1, depth=2, depth_single_blocks=2, axes_dim=[32, 32, 32, 32],
        theta=2000, patch_size=1, qkv_bias=False, guidance_embed=False, global_modulation=True, mlp_silu_act=True,
        ops_bias=False, default_ref_method="index", ref_index_scale=10.0, txt_ids_dims=[3],
    )  # fmt: skip
    return {name.replace("_norm.weight", "_norm.scale"): found for name, found in random_weights(flux, seed).items()}


def pixart_unet(seed: int) -> dict[str, Any]:
    """Two Sigma blocks at the full width of 1152, which detection presumes. It runs from 256 pixels up."""
    from comfy.ldm.pixart.pixartms import PixArtMS

    pixart = network(
        PixArtMS, input_size=128, patch_size=2, in_channels=4, hidden_size=1152, depth=2, num_heads=16,
        pe_interpolation=2, model_max_length=300, micro_condition=False,
    )  # fmt: skip
    return random_weights(pixart, seed)


def hunyuan_video_unet(seed: int) -> dict[str, Any]:
    """Two double and two single blocks of one head. Detection wants heads of 128 and a pooled vector of 768."""
    from comfy.ldm.hunyuan_video.model import HunyuanVideo

    hunyuan = network(
        HunyuanVideo, image_model="hunyuan_video", in_channels=16, out_channels=16, patch_size=[1, 2, 2],
        vec_in_dim=768, context_in_dim=64, hidden_size=128, mlp_ratio=4.0, num_heads=1, depth=2,
        depth_single_blocks=2, axes_dim=[16, 56, 56], theta=256, qkv_bias=True, guidance_embed=True, byt5=False,
        meanflow=False, use_cond_type_embedding=False, vision_in_dim=None, meanflow_sum=False,
    )  # fmt: skip
    return random_weights(hunyuan, seed)


def ltxv_unet(seed: int) -> dict[str, Any]:
    """Two blocks. Detection wants 32 heads and captions 4096 wide."""
    from comfy.ldm.lightricks.model import LTXVModel

    ltxv = network(LTXVModel, cross_attention_dim=128, attention_head_dim=4, num_layers=2)
    return random_weights(ltxv, seed)


# ---- as few layers as detection allows, at the widths that it fixes: gigabytes ----------------------------


def sdxl_unet(seed: int) -> dict[str, Any]:
    """Detection fixes the widths and the layers on the way in; in the middle and on the way out one each is enough."""
    import torch
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    unet = network(
        UNetModel, image_size=32, in_channels=4, out_channels=4, model_channels=320, num_res_blocks=[2, 2, 2],
        channel_mult=[1, 2, 4], transformer_depth=[0, 0, 2, 2, 10, 10],
        transformer_depth_output=[0, 0, 0, 1, 1, 1, 1, 1, 1], transformer_depth_middle=1, num_head_channels=64,
        use_spatial_transformer=True, context_dim=2048, use_linear_in_transformer=True, adm_in_channels=2816,
        num_classes="sequential", legacy=False,
    )  # fmt: skip
    return random_weights(unet, seed, torch.float16)


def qwen_image_unet(seed: int) -> dict[str, Any]:
    """Two blocks: only their number is read off the file."""
    import torch
    from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel

    return random_weights(network(QwenImageTransformer2DModel, num_layers=2), seed, torch.bfloat16)


def z_image_unet(seed: int) -> dict[str, Any]:
    """Two layers beside the two times two that refine, and a narrow prompt. The width of 3840 is what tells Z-Image."""
    import torch
    from comfy.ldm.lumina.model import NextDiT

    z_image = network(
        NextDiT, in_channels=16, dim=3840, n_layers=2, n_heads=30, n_kv_heads=30, ffn_dim_multiplier=8.0 / 3.0,
        qk_norm=True, cap_feat_dim=64, axes_dims=[32, 48, 48], axes_lens=[1536, 512, 512], rope_theta=256.0,
        z_image_modulation=True, time_scale=1000.0, pad_tokens_multiple=32,
    )  # fmt: skip
    return random_weights(z_image, seed, torch.bfloat16)
