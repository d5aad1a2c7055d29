# SPDX-License-Identifier: Apache-2.0
"""Checkpoint files with random weights, as small as ComfyUI's own detection accepts, for its own loaders.

Each file has exactly the keys of the real one: it is the state dict of ComfyUI's own class at a small size,
so that its checkpoint, diffusion model, text encoder, VAE and LoRA loaders take it like any other. The weights
have a scale at which every input matters to the result. Same name and seed, same bytes. Nothing here runs a
model.

    python tests/tiny_checkpoints.py --comfyui ~/comfy/ComfyUI --models base/models flux_unet taesd_flux

ComfyUI is imported only when a file is made. As it has modules with common names, call `make`, which does it
in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Tiny:
    """One file: where it belongs in ComfyUI's models folder, and what builds its state dict from a seed.

    metadata: what its header says besides.
    """

    folder: str
    build: Callable[[int], dict[str, Any]]
    doc: str
    metadata: dict[str, str] | None = None

    def path(self, models: Path, name: str) -> Path:
        """Where the file lies below a models folder. The loaders list it by `path.name`."""
        return models / self.folder / f"tiny_{name}.safetensors"


# ---- the parts ------------------------------------------------------------------------------------------


def _weights(module: Any, seed: int, dtype: Any = None) -> dict[str, Any]:
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


def _prefixed(prefix: str, weights: dict[str, Any]) -> dict[str, Any]:
    return {prefix + name: tensor for name, tensor in weights.items()}


def _network(cls: Any, **config: Any) -> Any:
    """An instance of a ComfyUI network with its weights left unset."""
    import comfy.ops
    import torch

    return cls(dtype=torch.float32, device="cpu", operations=comfy.ops.disable_weight_init, **config)


def sd15_unet(seed: int) -> dict[str, Any]:
    """Two levels of one block, attention on the inner one. Detection wants 320 channels, context 768."""
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    unet = _network(
        UNetModel, image_size=32, in_channels=4, out_channels=4, model_channels=320, num_res_blocks=[1, 1],
        channel_mult=[1, 1], transformer_depth=[0, 1], transformer_depth_output=[0, 0, 1, 1],
        transformer_depth_middle=1, num_heads=8, num_head_channels=-1, use_spatial_transformer=True,
        context_dim=768, use_linear_in_transformer=False, legacy=False,
    )  # fmt: skip
    return _weights(unet, seed)


def sd15_controlnet(seed: int) -> dict[str, Any]:
    """The first half of `sd15_unet` with its zero convolutions, which are not zero here."""
    from comfy.cldm.cldm import ControlNet

    control = _network(
        ControlNet, image_size=32, in_channels=4, model_channels=320, hint_channels=3, num_res_blocks=[1, 1],
        channel_mult=[1, 1], transformer_depth=[0, 1], transformer_depth_middle=1, num_heads=8, num_head_channels=-1,
        use_spatial_transformer=True, context_dim=768, use_linear_in_transformer=False, legacy=False,
    )  # fmt: skip
    return _weights(control, seed)


def flux_unet(seed: int, guidance: bool = True) -> dict[str, Any]:
    """Two double and two single blocks of one head. Detection wants heads of 128, and takes one without guidance for
    Flux schnell."""
    from comfy.ldm.flux.model import Flux

    flux = _network(
        Flux, image_model="flux", in_channels=16, out_channels=16, vec_in_dim=32, context_in_dim=64,
        hidden_size=128, mlp_ratio=4.0, num_heads=1, depth=2, depth_single_blocks=2, axes_dim=[16, 56, 56],
        theta=10000, patch_size=2, qkv_bias=True, guidance_embed=guidance, txt_ids_dims=[],
    )  # fmt: skip
    weights = _weights(flux, seed)
    # Files in the wild call it "scale"; the loader renames it, and detection takes either.
    return {name.replace("_norm.weight", "_norm.scale"): tensor for name, tensor in weights.items()}


def sd3_unet(seed: int) -> dict[str, Any]:
    """Two joint blocks, which detection reads off the width of 64 a block."""
    from comfy.ldm.modules.diffusionmodules.mmdit import OpenAISignatureMMDITWrapper

    context = {"target": "torch.nn.Linear", "params": {"in_features": 64, "out_features": 128}}
    sd3 = _network(
        OpenAISignatureMMDITWrapper, input_size=None, patch_size=2, in_channels=16, depth=2,
        adm_in_channels=32, context_embedder_config=context, pos_embed_scaling_factor=None,
        pos_embed_max_size=64, num_patches=4096,
    )  # fmt: skip
    return _weights(sd3, seed)


def wan_unet(seed: int) -> dict[str, Any]:
    """Two blocks of one head. Detection wants heads of 128 and a 4096 wide context."""
    from comfy.ldm.wan.model import WanModel

    wan = _network(
        WanModel, model_type="t2v", patch_size=(1, 2, 2), in_dim=16, dim=128, ffn_dim=256, freq_dim=256,
        text_dim=4096, out_dim=16, num_heads=1, num_layers=2,
    )  # fmt: skip
    return _weights(wan, seed)


def pixart_unet(seed: int) -> dict[str, Any]:
    """Two Sigma blocks at the full width of 1152, which detection presumes. It runs from 256 pixels up."""
    from comfy.ldm.pixart.pixartms import PixArtMS

    pixart = _network(
        PixArtMS, input_size=128, patch_size=2, in_channels=4, hidden_size=1152, depth=2, num_heads=16,
        pe_interpolation=2, model_max_length=300, micro_condition=False,
    )  # fmt: skip
    return _weights(pixart, seed)


def hunyuan_video_unet(seed: int) -> dict[str, Any]:
    """Two double and two single blocks of one head. Detection wants heads of 128 and a pooled vector of 768."""
    from comfy.ldm.hunyuan_video.model import HunyuanVideo

    hunyuan = _network(
        HunyuanVideo, image_model="hunyuan_video", in_channels=16, out_channels=16, patch_size=[1, 2, 2],
        vec_in_dim=768, context_in_dim=64, hidden_size=128, mlp_ratio=4.0, num_heads=1, depth=2,
        depth_single_blocks=2, axes_dim=[16, 56, 56], theta=256, qkv_bias=True, guidance_embed=True, byt5=False,
        meanflow=False, use_cond_type_embedding=False, vision_in_dim=None, meanflow_sum=False,
    )  # fmt: skip
    return _weights(hunyuan, seed)


def ltxv_unet(seed: int) -> dict[str, Any]:
    """Two blocks. Detection wants 32 heads and captions 4096 wide."""
    from comfy.ldm.lightricks.model import LTXVModel

    ltxv = _network(LTXVModel, cross_attention_dim=128, attention_head_dim=4, num_layers=2)
    return _weights(ltxv, seed)


# ---- as few layers as detection allows, at the widths that it fixes: gigabytes ----------------------------


def sdxl_unet(seed: int) -> dict[str, Any]:
    """Detection fixes the widths and the layers on the way in; in the middle and on the way out one each is enough."""
    import torch
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    unet = _network(
        UNetModel, image_size=32, in_channels=4, out_channels=4, model_channels=320, num_res_blocks=[2, 2, 2],
        channel_mult=[1, 2, 4], transformer_depth=[0, 0, 2, 2, 10, 10],
        transformer_depth_output=[0, 0, 0, 1, 1, 1, 1, 1, 1], transformer_depth_middle=1, num_head_channels=64,
        use_spatial_transformer=True, context_dim=2048, use_linear_in_transformer=True, adm_in_channels=2816,
        num_classes="sequential", legacy=False,
    )  # fmt: skip
    return _weights(unet, seed, torch.float16)


def qwen_image_unet(seed: int) -> dict[str, Any]:
    """Two blocks: only their number is read off the file."""
    import torch
    from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel

    return _weights(_network(QwenImageTransformer2DModel, num_layers=2), seed, torch.bfloat16)


def z_image_unet(seed: int) -> dict[str, Any]:
    """Two layers beside the two times two that refine, and a narrow prompt. The width of 3840 is what tells Z-Image."""
    import torch
    from comfy.ldm.lumina.model import NextDiT

    z_image = _network(
        NextDiT, in_channels=16, dim=3840, n_layers=2, n_heads=30, n_kv_heads=30, ffn_dim_multiplier=8.0 / 3.0,
        qk_norm=True, cap_feat_dim=64, axes_dims=[32, 48, 48], axes_lens=[1536, 512, 512], rope_theta=256.0,
        z_image_modulation=True, time_scale=1000.0, pad_tokens_multiple=32,
    )  # fmt: skip
    return _weights(z_image, seed, torch.bfloat16)


def taesd(channels: int) -> Callable[[int], dict[str, Any]]:
    """The small autoencoder: convolutions only, image side 8 times the latent's."""

    def build(seed: int) -> dict[str, Any]:
        from comfy.taesd.taesd import TAESD

        weights = _weights(TAESD(latent_channels=channels), seed)
        weights["vae_scale"].fill_(1.0)
        weights["vae_shift"].fill_(0.0)
        # An image around middle grey: with a random last layer three pixels of four would be black.
        weights["taesd_decoder.19.weight"].mul_(0.1)
        weights["taesd_decoder.19.bias"].fill_(0.5)
        return weights

    return build


def kl_vae(channels: int) -> Callable[[int], dict[str, Any]]:
    """The usual autoencoder (residual blocks, attention in the middle) with a narrow decoder.

    Detection fixes the encoder's width at 128 and reads the decoder's off the file.
    """

    def build(seed: int) -> dict[str, Any]:
        from comfy.ldm.models.autoencoder import AutoencoderKL

        config = {
            "double_z": True, "z_channels": channels, "resolution": 256, "in_channels": 3, "out_ch": 3,
            "ch": 128, "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0,
        }  # fmt: skip
        model = AutoencoderKL(ddconfig=config, embed_dim=channels, decoder_ddconfig={**config, "ch": 32})
        return _weights(model, seed)

    return build


def wan_vae(seed: int) -> dict[str, Any]:
    """The Wan 2.1 video autoencoder at a width of 16, which detection reads off the file."""
    from comfy.ldm.wan.vae import WanVAE

    model = WanVAE(
        dim=16, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=2, attn_scales=[],
        temperal_downsample=[False, True, True], image_channels=3, conv_out_channels=3, dropout=0.0,
    )  # fmt: skip
    return _weights(model, seed)


# What the header of an LTX-Video checkpoint says of its VAE: as short and narrow as its factor of 8 and 32 allows.
LTXV_VAE = {
    "_class_name": "CausalVideoAutoencoder", "dims": 3, "in_channels": 3, "out_channels": 3, "latent_channels": 128,
    "blocks": [[kind, 1] for kind in ("res_x", *("compress_all", "res_x") * 3)], "norm_layer": "pixel_norm",
    "patch_size": 4, "latent_log_var": "uniform", "causal_decoder": False, "encoder_base_channels": 16,
    "decoder_base_channels": 16,
}  # fmt: skip

LTXV_HEADER = {"config": json.dumps({"vae": LTXV_VAE})}


def ltxv_vae(seed: int) -> dict[str, Any]:
    """The LTX-Video autoencoder as LTXV_VAE has it."""
    from comfy.ldm.lightricks.vae.causal_video_autoencoder import VideoVAE

    return _weights(VideoVAE(config=LTXV_VAE), seed)


def vae(build: Callable[[int], dict[str, Any]]) -> Any:
    """ComfyUI's VAE object around one of these autoencoders."""
    import comfy.sd

    return comfy.sd.VAE(sd=build(0))


def clip_l(seed: int) -> dict[str, Any]:
    """CLIP-L at full size in half precision (about 250 MB): its sizes are fixed in ComfyUI."""
    import torch
    from comfy.sd1_clip import SDClipModel

    weights = _weights(SDClipModel(device="cpu", dtype=torch.float32).transformer, seed, torch.float16)
    for name in (
        "text_model.embeddings.token_embedding.weight",
        "text_model.embeddings.position_embedding.weight",
    ):
        weights[name] = (weights[name].float() * weights[name].shape[1] ** 0.5 * 0.02).half()
    return weights


def sd15_checkpoint(seed: int, text_encoder: bool = False) -> dict[str, Any]:
    """UNet and VAE in one file in the layout of Stable Diffusion 1.5, with CLIP-L or without."""
    found = _prefixed("model.diffusion_model.", sd15_unet(seed)) | _prefixed("first_stage_model.", taesd(4)(seed))
    if text_encoder:
        found |= _prefixed("cond_stage_model.transformer.", clip_l(seed))
        # The SD1 layout has no text projection.
        found.pop("cond_stage_model.transformer.text_projection.weight", None)
    return found


def sd3_checkpoint(seed: int) -> dict[str, Any]:
    """UNet and VAE in one file in the layout of Stable Diffusion 3, without text encoders."""
    return _prefixed("model.diffusion_model.", sd3_unet(seed)) | _prefixed("first_stage_model.", taesd(16)(seed))


def ltxv_checkpoint(seed: int) -> dict[str, Any]:
    """Transformer and VAE in one file in the layout of LTX-Video."""
    return _prefixed("model.diffusion_model.", ltxv_unet(seed)) | _prefixed("vae.", ltxv_vae(seed))


def lora(base: Callable[[int], dict[str, Any]], rank: int = 4) -> Callable[[int], dict[str, Any]]:
    """A LoRA on every matrix inside the blocks of `base`, in the naming that fits any family."""

    def build(seed: int) -> dict[str, Any]:
        import torch

        found = {}
        for name, tensor in base(0).items():
            if not name.endswith(".weight") or tensor.ndim != 2 or "block" not in name:
                continue
            key = f"diffusion_model.{name.removesuffix('.weight')}"
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{key}".encode()))
            down = torch.randn((rank, tensor.shape[1]), generator=generator) / tensor.shape[1] ** 0.5
            found[f"{key}.lora_A.weight"] = down
            found[f"{key}.lora_B.weight"] = torch.randn((tensor.shape[0], rank), generator=generator) / rank**0.5
        return found

    return build


def sdxl_checkpoint(seed: int) -> dict[str, Any]:
    """UNet and VAE in one file in the layout of Stable Diffusion XL, without text encoders."""
    return _prefixed("model.diffusion_model.", sdxl_unet(seed)) | _prefixed("first_stage_model.", taesd(4)(seed))


# ---- the files ------------------------------------------------------------------------------------------

FILES: dict[str, Tiny] = {
    "sd15_checkpoint": Tiny("checkpoints", sd15_checkpoint, "SD1.5 UNet + VAE"),
    "sd15_full_checkpoint": Tiny("checkpoints", lambda s: sd15_checkpoint(s, True), "SD1.5 UNet + VAE + CLIP-L"),
    "sd3_checkpoint": Tiny("checkpoints", sd3_checkpoint, "SD3 + VAE"),
    "ltxv_checkpoint": Tiny(
        "checkpoints", ltxv_checkpoint, "LTX-Video + VAE", {"config": json.dumps({"vae": LTXV_VAE})}
    ),
    "sd15_unet": Tiny("diffusion_models", sd15_unet, "SD1.5 UNet"),
    "flux_unet": Tiny("diffusion_models", flux_unet, "Flux transformer"),
    "schnell_unet": Tiny("diffusion_models", lambda s: flux_unet(s, False), "Flux transformer without guidance"),
    "sd3_unet": Tiny("diffusion_models", sd3_unet, "SD3 transformer"),
    "wan_unet": Tiny("diffusion_models", wan_unet, "Wan 2.1 text-to-video transformer"),
    "pixart_unet": Tiny("diffusion_models", pixart_unet, "PixArt Sigma transformer"),
    "hunyuan_video_unet": Tiny("diffusion_models", hunyuan_video_unet, "HunyuanVideo transformer"),
    "sdxl_checkpoint": Tiny("checkpoints", sdxl_checkpoint, "SDXL UNet at full width + VAE, 2.6 GB"),
    "qwen_image_unet": Tiny("diffusion_models", qwen_image_unet, "Qwen-Image transformer at full width, 1.4 GB"),
    "z_image_unet": Tiny("diffusion_models", z_image_unet, "Z-Image transformer at full width, 2.2 GB"),
    "sd15_controlnet": Tiny("controlnet", sd15_controlnet, "ControlNet for sd15_unet"),
    "clip_l": Tiny("text_encoders", clip_l, "CLIP-L text encoder, full size"),
    "taesd": Tiny("vae", taesd(4), "small autoencoder, 4 channels"),
    "taesd_flux": Tiny("vae", taesd(16), "small autoencoder, 16 channels"),
    "kl_vae": Tiny("vae", kl_vae(4), "AutoencoderKL, 4 channels"),
    "kl_vae_flux": Tiny("vae", kl_vae(16), "AutoencoderKL, 16 channels"),
    "wan_vae": Tiny("vae", wan_vae, "Wan 2.1 video autoencoder"),
    "sd15_lora": Tiny("loras", lora(sd15_unet), "LoRA for sd15_unet"),
    "flux_lora": Tiny("loras", lora(flux_unet), "LoRA for flux_unet"),
    "wan_lora": Tiny("loras", lora(wan_unet), "LoRA for wan_unet"),
    "pixart_lora": Tiny("loras", lora(pixart_unet), "LoRA for pixart_unet"),
}


def make(comfyui: Path, models: Path, *names: str, seed: int = 0) -> dict[str, Path]:
    """Write the named files below `models` in a process of its own; those already there stay."""
    command = [
        sys.executable,
        __file__,
        "--comfyui",
        str(comfyui),
        "--models",
        str(models),
        "--seed",
        str(seed),
        *names,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"making {', '.join(names)} failed with status {done.returncode}:\n{done.stderr[-4000:]}")
    return {name: FILES[name].path(models, name) for name in names}


def write(models: Path, name: str, seed: int = 0) -> Path:
    """Write one file, unless it is there. ComfyUI must be importable."""
    import torch
    from safetensors.torch import save_file

    path = FILES[name].path(models, name)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with torch.no_grad():
            weights = FILES[name].build(seed)
        partial = path.with_suffix(".partial")
        save_file(weights, partial, FILES[name].metadata)
        partial.replace(path)
    return path


def _import_comfyui(comfyui: Path) -> None:
    """Make ComfyUI importable here, set up for a machine without a GPU."""
    sys.path.insert(0, str(comfyui))
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    comfy.cli_args.args.use_pytorch_cross_attention = True


def main() -> None:
    """The command line: write the named files."""
    parser = argparse.ArgumentParser(description="Write tiny checkpoint files with random weights.")
    parser.add_argument("--comfyui", type=Path, required=True, help="where ComfyUI lies")
    parser.add_argument("--models", type=Path, required=True, help="the models folder to write below")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("names", nargs="+", choices=sorted(FILES), metavar="name", help=", ".join(sorted(FILES)))
    args = parser.parse_args()
    _import_comfyui(args.comfyui.expanduser().resolve())
    for name in args.names:
        print(write(args.models, name, args.seed))


if __name__ == "__main__":
    main()
