# SPDX-License-Identifier: Apache-2.0
"""Whole workloads of `benchmarks.prompt_clock`: network, text encoder and VAE at their published sizes, random weights.

A row names what a prompt of the workload has. Its three models are made by ComfyUI's own loaders from state dicts of
random numbers, so that they are what a file of that family would become. `sd21-small` is for a processor.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .backbones import BACKBONES, Backbone, drawn

_HALF = torch.bfloat16
_ZIMAGE = {
    "patch_size": 2, "in_channels": 16, "dim": 3840, "n_layers": 30, "n_refiner_layers": 2, "n_heads": 30,
    "n_kv_heads": 30, "axes_dims": [32, 48, 48], "axes_lens": [1536, 512, 512], "rope_theta": 256.0,
    "ffn_dim_multiplier": 8 / 3, "z_image_modulation": True, "time_scale": 1000.0, "qk_norm": True,
    "cap_feat_dim": 2560, "pad_tokens_multiple": 32,
}  # fmt: skip
_KLEIN = {
    "image_model": "flux2", "in_channels": 128, "out_channels": 128, "context_in_dim": 12288, "hidden_size": 4096,
    "num_heads": 32, "mlp_ratio": 3.0, "depth": 8, "depth_single_blocks": 24, "axes_dim": [32] * 4, "theta": 2000,
    "patch_size": 1, "qkv_bias": False, "guidance_embed": False, "global_modulation": True, "mlp_silu_act": True,
    "ops_bias": False, "default_ref_method": "index", "ref_index_scale": 10.0, "txt_ids_dims": [3],
    "vec_in_dim": None,
}  # fmt: skip
_KREA = {
    "image_model": "krea2", "features": 6144, "heads": 48, "kvheads": 12, "layers": 28, "channels": 16, "patch": 2,
    "txtlayers": 12, "txtdim": 2560,
}  # fmt: skip
_QWEN = {"image_model": "qwen_image", "in_channels": 64, "num_layers": 60}
_WAN = {**BACKBONES["wan"].settings, "dim": 5120, "ffn_dim": 13824, "num_heads": 40, "num_layers": 40}
_SIMPLE: Mapping[str, Any] = {"channels": 16, "cfg": 1.0, "scheduler": "simple"}
NETWORKS = {
    one.name: one
    for one in (
        Backbone("zimage", "comfy.ldm.lumina.model", "NextDiT", _ZIMAGE, _HALF, (128, 2560), (1024, 1024), **_SIMPLE),
        Backbone(
            "qwen", "comfy.ldm.qwen_image.model", "QwenImageTransformer2DModel", _QWEN, _HALF, (256, 3584),
            (1024, 1024), **{**_SIMPLE, "cfg": 4.0},
        ),
        Backbone(
            "qwen-edit", "comfy.ldm.qwen_image.model", "QwenImageTransformer2DModel", _QWEN, _HALF, (256, 3584),
            (1024, 1024), **_SIMPLE,
        ),
        Backbone(
            "krea2", "comfy.ldm.krea2.model", "SingleStreamDiT", _KREA, _HALF, (128, 30720), (1024, 1024), **_SIMPLE
        ),
        Backbone(
            "klein9b", "comfy.ldm.flux.model", "Flux", _KLEIN, _HALF, (512, 12288), (1024, 1024),
            **{**_SIMPLE, "channels": 128},
        ),
        Backbone(
            "wan14b", "comfy.ldm.wan.model", "WanModel", _WAN, _HALF, (512, 4096), (480, 832), frames=33, **_SIMPLE
        ),
        BACKBONES["sdxl"],
        replace(BACKBONES["sd21"].at_small_size(), name="sd21-small", cfg=1.0),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Encoder:
    """A text encoder. classes: of ComfyUI, as "module:class"; called: it makes the class. kind: name of a CLIPType."""

    classes: tuple[str, ...]
    kind: str
    called: bool = False


@dataclass(frozen=True)
class Workload:
    """One row. quant: form of the matrices of blocks. networks: how many of the network sample in turn.

    ratio: pixels of a side per latent. frames_ratio: frames per latent frame. tokens: of the prompt. references:
    pictures of the same size that the prompt refers to.
    """

    name: str
    network: str
    encoder: Encoder
    vae: Callable[[], torch.nn.Module]
    steps: int
    ratio: int = 8
    frames_ratio: int = 4
    quant: str = ""
    lora: bool = False
    networks: int = 1
    tokens: int = 64
    references: int = 0
    least: int = 1024  # of both sides of a matrix that is quantised or has a LoRA
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def backbone(self) -> Backbone:
        """Its network's row."""
        return NETWORKS[self.network]

    def latent(self, height: int, width: int) -> torch.Tensor:
        """Zeros of the latent's shape for so many pixels, on the CPU."""
        frames = self.backbone.frames
        time = (
            ((frames - 1) // self.frames_ratio + 1,)
            if frames
            else (1,)
            if self.backbone.cls == NETWORKS["qwen"].cls
            else ()
        )
        return torch.zeros(1, self.backbone.channels, *time, height // self.ratio, width // self.ratio)

    def reference(self, height: int, width: int, seed: int) -> torch.Tensor:
        """Random numbers that stand for the latent of a picture, on the CPU."""
        latent = self.latent(height, width)
        return torch.randn(latent.shape, generator=torch.Generator().manual_seed(seed))

    def conditioning(self, generator: torch.Generator) -> list[Any]:
        """A ComfyUI CONDITIONING of random values for the network's own size."""
        found = self.backbone.conditioning(generator)
        if self.references:
            found[0][1]["reference_latents"] = [self.reference(*self.backbone.size, n) for n in range(self.references)]
        return found


_DD = {
    "double_z": True, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128, "ch_mult": [1, 2, 4, 4],
    "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0,
}  # fmt: skip


def _image_vae(channels: int, quantised: bool = False) -> torch.nn.Module:
    from comfy.ldm.models import autoencoder as found

    config = {**_DD, "z_channels": channels}
    if quantised:
        return found.AutoencoderKL(ddconfig=config, embed_dim=channels)
    parts = "comfy.ldm.modules.diffusionmodules.model"
    return found.AutoencodingEngine(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
        encoder_config={"target": f"{parts}.Encoder", "params": config},
        decoder_config={"target": f"{parts}.Decoder", "params": config},
    )


def _flux2_vae() -> torch.nn.Module:
    vae = _image_vae(32, quantised=True)
    vae.bn = torch.nn.BatchNorm2d(128, affine=False)
    return vae


def _wan_vae() -> torch.nn.Module:
    from comfy.ldm.wan.vae import WanVAE

    return WanVAE(
        dim=96, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=2, attn_scales=[],
        temperal_downsample=[False, True, True], image_channels=3, conv_out_channels=3, dropout=0.0,
    )  # fmt: skip


_QWEN3_4B = Encoder(("comfy.text_encoders.z_image:te",), "LUMINA2", called=True)
_QWEN3_8B = Encoder(("comfy.text_encoders.flux:Qwen3_8BModel",), "FLUX2")
_QWEN_VL = Encoder(("comfy.text_encoders.qwen_image:te",), "QWEN_IMAGE", called=True)
_KREA_VL = Encoder(("comfy.text_encoders.krea2:Krea2Qwen3VLClipModel",), "KREA2")
_UMT5 = Encoder(("comfy.text_encoders.wan:UMT5XXlModel",), "WAN")
_SDXL = Encoder(("comfy.sd1_clip:SDClipModel", "comfy.sdxl_clip:SDXLClipG"), "STABLE_DIFFUSION")
_CLIP_H = Encoder(("comfy.text_encoders.sd2_clip:SD2ClipHModel",), "STABLE_DIFFUSION")
WORKLOADS = {
    one.name: one
    for one in (
        Workload("zimage", "zimage", _QWEN3_4B, lambda: _image_vae(16), 8),
        Workload("zimage-int8", "zimage", _QWEN3_4B, lambda: _image_vae(16), 8, quant="int8_convrot"),
        Workload("zimage-int8-lora", "zimage", _QWEN3_4B, lambda: _image_vae(16), 8, quant="int8_convrot", lora=True),
        Workload("qwen-int8", "qwen", _QWEN_VL, _wan_vae, 8, quant="int8_convrot", tokens=128),
        Workload("qwen-edit-int8", "qwen-edit", _QWEN_VL, _wan_vae, 4, quant="int8_convrot", tokens=128, references=1),
        Workload("krea2-fp8", "krea2", _KREA_VL, _wan_vae, 8, quant="fp8", tokens=128),
        Workload("klein9b-fp8", "klein9b", _QWEN3_8B, _flux2_vae, 4, ratio=16, quant="fp8", tokens=256),
        Workload("wan22-fp8-lora", "wan14b", _UMT5, _wan_vae, 4, quant="fp8", lora=True, networks=2, tokens=128),
        Workload("sdxl", "sdxl", _SDXL, lambda: _image_vae(4, quantised=True), 20, lora=True, tokens=75, least=512),
        Workload(
            "sd21-small",
            "sd21-small",
            _CLIP_H,
            lambda: _image_vae(4, quantised=True),
            2,
            lora=True,
            tokens=75,
            least=64,
        ),
    )
}
FORMS: Mapping[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "int8_convrot": (
        "int8_tensorwise",
        {"per_channel": True, "convrot": True, "convrot_groupsize": 256},
        {"convrot": True, "convrot_groupsize": 256},
    ),
    "fp8": ("float8_e4m3fn", {"scale": "recalculate"}, {}),
}


def weights_of(workload: Workload, device: torch.device, seed: int = 0) -> dict[str, torch.Tensor]:
    """The state dict of the network's file, in main memory. device: where its numbers are drawn and quantised."""
    weights: dict[str, torch.Tensor] = {}
    with _layers_with_weights():
        for name, one in drawn(workload.backbone, device):
            plain = one.roll(seed, -1) if seed and one.ndim == 2 else one
            made = _quantised(name, plain, workload) if workload.quant and _is_matrix(name, one, workload) else None
            weights |= {key: value.cpu() for key, value in (made or {name: plain}).items()}
    return weights


@contextmanager
def _layers_with_weights() -> Iterator[None]:
    """Layers that are made have weights, whose names and shapes a file takes. Under dynamic VRAM they have none."""
    import comfy.memory_management

    dynamic = getattr(comfy.memory_management, "aimdo_enabled", False)
    comfy.memory_management.aimdo_enabled = False
    try:
        yield
    finally:
        comfy.memory_management.aimdo_enabled = dynamic


def model_of(workload: Workload, weights: Mapping[str, torch.Tensor]) -> Any:
    """The network as ComfyUI loads it from a file of these weights."""
    import comfy.sd

    return comfy.sd.load_diffusion_model_state_dict(dict(weights), model_options={"dtype": workload.backbone.dtype})


def _is_matrix(name: str, weight: torch.Tensor, workload: Workload) -> bool:
    """Whether it is one of the large matrices of blocks, which files have quantised."""
    in_block = name.endswith("weight") and ("blocks." in name or "layers." in name)
    return in_block and weight.ndim == 2 and min(weight.shape) >= workload.least and weight.shape[1] % 256 == 0


def _quantised(name: str, weight: torch.Tensor, workload: Workload) -> dict[str, torch.Tensor]:
    """A matrix as ComfyUI's own files have it."""
    from comfy import quant_ops

    form, how, words = FORMS[workload.quant]
    layout = quant_ops.QUANT_ALGOS[form]["comfy_tensor_layout"]
    told = torch.tensor(list(json.dumps({"format": form, **words}).encode()), dtype=torch.uint8)
    made = quant_ops.QuantizedTensor.from_float(weight, layout, **how).state_dict(name)
    return {**made, name.removesuffix("weight") + "comfy_quant": told}


def lora_of(model: Any, workload: Workload, seed: int, rank: int = 32) -> dict[str, torch.Tensor]:
    """A LoRA file of random numbers for all large matrices of a model."""
    import comfy.lora

    shapes = {name: tuple(one.shape) for name, one in model.model.state_dict().items()}
    draw, file = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for alias, name in comfy.lora.model_lora_keys_unet(model.model, {}).items():
        shape = shapes.get(name, ()) if isinstance(name, str) else ()
        if len(shape) == 2 and min(shape) >= workload.least and alias.startswith("diffusion_model."):
            file[f"{alias}.lora_up.weight"] = torch.randn((shape[0], rank), generator=draw) * 0.02
            file[f"{alias}.lora_down.weight"] = torch.randn((rank, shape[1]), generator=draw) / shape[1] ** 0.5
            file[f"{alias}.alpha"] = torch.tensor(float(rank))
    return file


def clip_weights(workload: Workload, number: int, device: torch.device) -> dict[str, torch.Tensor]:
    """The state dict of a file of the text encoder, in main memory. device: where its numbers are drawn."""
    module, _, made = workload.encoder.classes[number].partition(":")
    kind = getattr(importlib.import_module(module), made)
    with _layers_with_weights():
        whole = (kind() if workload.encoder.called else kind)(device="meta", dtype=_HALF)
    inner = getattr(whole, whole.clip) if hasattr(whole, "clip") else whole
    like = {_in_file(name): one for name, one in inner.transformer.state_dict().items()}
    return _drawn(like, _HALF, device)


def clip_of(workload: Workload, files: list[dict[str, torch.Tensor]]) -> Any:
    """The text encoder as ComfyUI loads it from files of these weights."""
    import comfy.sd

    kind_of = getattr(comfy.sd.CLIPType, workload.encoder.kind)
    return comfy.sd.load_text_encoder_state_dicts(files, clip_type=kind_of)


def _in_file(name: str) -> str:
    return f"model.{name}" if name.startswith("visual.") else name


def vae_weights(workload: Workload, device: torch.device) -> dict[str, torch.Tensor]:
    """The state dict of the VAE's file, in main memory. device: where its numbers are drawn."""
    with torch.device("meta"), _layers_with_weights():
        like = workload.vae().state_dict()
    return _drawn(like, _HALF, device)


def _drawn(like: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: _one(name, one, dtype, device).cpu() for name, one in like.items()}


def _one(name: str, like: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if not like.is_floating_point():
        return torch.zeros(like.shape, dtype=like.dtype)
    if (like.ndim == 1 and name.endswith(("weight", "gamma", "running_var"))) or name.endswith("gamma"):
        return torch.ones(like.shape, device=device, dtype=dtype)
    scale = 0.02 if like.ndim <= 1 else 1 / math.sqrt(max(1, like[0].numel()))
    return torch.randn(like.shape, device=device, dtype=dtype) * scale
