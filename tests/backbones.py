# SPDX-License-Identifier: Apache-2.0
"""Tiny backbones with random weights: ComfyUI's and diffusers' own classes, and one that needs neither.

`make(name, depth)` gives a module and a maker of its inputs. Weights are drawn so that every input matters: with
smaller ones a network that ignores its prompt would pass for one that is right. The first of a backbone's sizes is
square, and its first prompt length is the number of image tokens at that size wherever the two could be confused.

A comfy backbone needs ComfyUI imported first (the fixture `comfyui` in conftest.py does it). No test lives here.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

Size = tuple[int, ...]
Call = tuple[tuple[Any, ...], dict[str, Any]]
Edit = Callable[[dict[str, Any]], None]

EVEN = ((16, 16), (16, 24), (24, 16), (20, 28), (12, 12))
ODD = ((16, 16), (16, 24), (24, 16), (20, 28), (17, 23))  # what does not fill whole patches is padded
VIDEO = ((3, 8, 8), (3, 8, 12), (5, 12, 8), (2, 10, 14), (3, 12, 12))


@dataclass(frozen=True)
class Backbone:
    """One family. build(depth) gives the network; call(draw, batch, size, length) the arguments of one call.

    edits: what users and other packs put into transformer_options, by name; empty where the network takes none.
    """

    name: str
    host: str  # "torch", "comfy" or "diffusers": what must be installed
    build: Callable[[int], nn.Module]
    call: Callable[[Draw, int, Size, int], Call]
    sizes: tuple[Size, ...] = EVEN
    lengths: tuple[int, ...] = (64, 20, 77)
    stays_float: tuple[str, ...] = ()  # submodules that the host keeps in fp32 whatever the rest is in
    edits: Mapping[str, Edit] = field(default_factory=dict)


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


class Tiny:
    """A backbone with its weights, and the maker of its inputs."""

    def __init__(self, kind: Backbone, depth: int) -> None:
        self.kind, self.name = kind, kind.name
        self.module = _with_weights(kind.build(depth), kind.name)

    def to(self, dtype: torch.dtype) -> None:
        """Bring the weights to a dtype, as the host does it."""
        self.module.to(dtype)
        for name in self.kind.stays_float:
            self.module.get_submodule(name).float()

    def make_inputs(
        self,
        batch: int = 2,
        size: Size | None = None,
        length: int | None = None,
        seed: int = 0,
        *,
        prompt: int = 0,
        step: int = 0,
        options: Mapping[str, Any] | None = None,
    ) -> Call:
        """(args, kwargs) of one call; `options` are added to a copy of what ComfyUI's sampler writes."""
        size, length = size or self.kind.sizes[0], length or self.kind.lengths[0]
        args, kwargs = self.kind.call(Draw(seed, prompt, step), batch, size, length)
        if "transformer_options" in kwargs:
            kwargs["transformer_options"] = {**sampler_options(batch, step), **(options or {})}
        return args, kwargs


def make(name: str, depth: int = 2) -> Tiny:
    """The named backbone with `depth` repeated blocks; the same weights in every process."""
    return Tiny(BACKBONES[name], depth)


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


def _with_weights(module: nn.Module, name: str) -> nn.Module:
    """Weights scaled by their fan-in, norms' near one, the same in every process."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    tables = [(n, p) for n, p in module.named_parameters() if p.is_floating_point()]
    tables += [(n, b) for n, b in module.named_buffers() if b.isnan().any()]  # left empty by the constructor
    with torch.no_grad():
        for path, weight in tables:
            drawn = torch.randn(weight.shape, generator=generator)
            if weight.ndim > 1:
                weight.copy_(drawn / math.sqrt(weight[0].numel()))
            else:
                weight.copy_(drawn * 0.1 + (0.0 if path.endswith("bias") else 1.0))
    return module.eval().requires_grad_(False)


# ---- what others put into transformer_options ---------------------------------------------------------------


def _override(options: dict[str, Any]) -> None:
    """Another attention for every block, as attention nodes install it."""

    def attention(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs).flip(1)  # scaling it would be lost in a norm that follows

    options["optimized_attention_override"] = attention


def _replaced(*key: Any) -> Edit:
    """A block replacement of the kind that skips or repeats blocks: it calls the original and changes its result."""

    def edit(options: dict[str, Any]) -> None:
        def replace(args: dict[str, Any], extra: dict[str, Any]) -> Any:
            out = extra["original_block"](args)
            return {**out, "img": out["img"] * 1.5}

        options["patches_replace"] = {"dit": {key: replace}}

    return edit


def _patched(name: str, patch: Callable[..., Any]) -> Edit:
    return lambda options: options.update(patches={name: [patch]})


def _attention_replaced(name: str) -> Edit:
    """What IPAdapter does: the attention of one block computed by somebody else."""

    def edit(options: dict[str, Any]) -> None:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
            heads = extra["n_heads"]
            q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, scale=0.05).transpose(1, 2).flatten(2)

        options["patches_replace"] = {name: {("input", 1): attend}}

    return edit


_UNET_EDITS: dict[str, Edit] = {
    "override": _override,
    "attn1_patch": _patched("attn1_patch", lambda n, context, value, extra: (n, context, value * 1.5)),
    "attn2_patch": _patched("attn2_patch", lambda n, context, value, extra: (n, context * 0.5, value * 2.0)),
    "attn1_output_patch": _patched("attn1_output_patch", lambda n, extra: n * 1.5),
    "middle_patch": _patched("middle_patch", lambda n, extra: n * 1.2),
    "attn2_replace": _attention_replaced("attn2"),
    "output_block_patch": _patched("output_block_patch", lambda h, skip, options: (h * 1.3, skip)),
}


def _double(out: dict[str, Any]) -> dict[str, Any]:
    return {**out, "img": out["img"] * 1.5}


# ---- one that needs no host ---------------------------------------------------------------------------------


class _DiTBlock(nn.Module):
    """Joint attention over prompt and image tokens with modulation, and the hooks that ComfyUI's blocks have."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.gain = heads, 1.0
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Linear(width, 4 * width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(
        self, image: torch.Tensor, text: torch.Tensor, vec: torch.Tensor, transformer_options: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        options = transformer_options.copy()
        shift, scale, gate1, gate2 = self.modulation(F.silu(vec)).unsqueeze(1).chunk(4, -1)
        x = torch.cat([text, image], 1)
        h = self.norm1(x) * (1 + scale) + shift
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        for patch in options.get("patches", {}).get("attn1_patch", ()):
            q, k, v = patch(q, k, v, options)
        attention = F.scaled_dot_product_attention
        if "optimized_attention_override" in options:
            attended = options["optimized_attention_override"](attention, q, k, v)
        else:
            attended = attention(q, k, v)
        x = x + gate1 * self.out(attended.transpose(1, 2).flatten(2))
        x = x + gate2 * self.mlp(self.norm2(x)) * self.gain
        return x[:, text.shape[1] :], x[:, : text.shape[1]]


class TorchDiT(nn.Module):
    """A small joint-attention transformer with ComfyUI's calling convention."""

    def __init__(self, depth: int, width: int = 32) -> None:
        super().__init__()
        self.patch = nn.Conv2d(4, width, 2, stride=2)
        self.text = nn.Linear(16, width)
        self.time = nn.Sequential(nn.Linear(32, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList([_DiTBlock(width, 2) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.final = nn.Linear(width, 16)

    def forward(
        self,
        x: torch.Tensor,
        timesteps: torch.Tensor,
        context: torch.Tensor,
        control: Any = None,
        transformer_options: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        options = transformer_options if transformer_options is not None else {}
        height, width = x.shape[-2] // 2, x.shape[-1] // 2
        image, text = self.patch(x).flatten(2).transpose(1, 2), self.text(context)
        image = image + self._positions(height, width, image)
        vec = self.time(_waves(timesteps * 100.0, 32).to(x.dtype))
        replaced = options.get("patches_replace", {}).get("dit", {})
        for i, block in enumerate(self.blocks):
            options["block_index"] = i
            if ("double_block", i) in replaced:

                def original(args: dict[str, Any], block: nn.Module = block) -> dict[str, Any]:
                    out = block(args["img"], args["txt"], args["vec"], args["transformer_options"])
                    return dict(zip(("img", "txt"), out, strict=True))

                args = {"img": image, "txt": text, "vec": vec, "transformer_options": options}
                out = replaced[("double_block", i)](args, {"original_block": original})
                image, text = out["img"], out["txt"]
            else:
                image, text = block(image, text, vec, options)
        x = self.final(self.norm(image)).unflatten(1, (height, width)).unflatten(-1, (4, 2, 2))
        return x.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)

    @staticmethod
    def _positions(height: int, width: int, like: torch.Tensor) -> torch.Tensor:
        rows = _waves(torch.arange(height, device=like.device), like.shape[-1] // 2)
        columns = _waves(torch.arange(width, device=like.device), like.shape[-1] // 2)
        grid = torch.cat([rows.unsqueeze(1).expand(-1, width, -1), columns.expand(height, -1, -1)], -1)
        return grid.flatten(0, 1).to(like.dtype)


def _waves(position: torch.Tensor, width: int) -> torch.Tensor:
    frequencies = torch.exp(-math.log(100.0) * torch.arange(width // 2, device=position.device) / (width // 2))
    angles = position.float().unsqueeze(-1) * frequencies
    return torch.cat([angles.cos(), angles.sin()], -1)


def _torch_dit(depth: int) -> nn.Module:
    return TorchDiT(depth)


def _latent_call(d: Draw, batch: int, size: Size, length: int, *, greatest: float, channels: int = 4) -> Call:
    args = (d.noise(batch, channels, *size), d.time(batch, greatest))
    return args, {"context": d.prompt(batch, length, 16), "control": None, "transformer_options": {}}


# ---- ComfyUI's ----------------------------------------------------------------------------------------------


def _comfy_settings() -> dict[str, Any]:
    import comfy.ops

    return {"device": "cpu", "dtype": torch.float32, "operations": comfy.ops.disable_weight_init}


def _comfy_unet(depth: int) -> nn.Module:
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    return UNetModel(
        **{**_comfy_settings(), "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 32},
        **{"num_res_blocks": [depth, depth], "channel_mult": [1, 2], "num_heads": 2, "context_dim": 16},
        **{"transformer_depth": [1] * 2 * depth, "transformer_depth_output": [1] * 2 * (depth + 1)},
        **{"transformer_depth_middle": 1, "use_spatial_transformer": True, "use_linear_in_transformer": False},
        legacy=False,
    )


def _comfy_flux(depth: int) -> nn.Module:
    from comfy.ldm.flux.model import Flux

    return Flux(
        **{**_comfy_settings(), "image_model": "flux", "in_channels": 4, "out_channels": 4, "vec_in_dim": 8},
        **{"context_in_dim": 16, "hidden_size": 32, "mlp_ratio": 4.0, "num_heads": 2, "axes_dim": [4, 6, 6]},
        **{"depth": depth, "depth_single_blocks": depth, "theta": 10000, "patch_size": 2, "qkv_bias": True},
        **{"guidance_embed": True, "txt_ids_dims": []},
    )


def _comfy_flux_call(d: Draw, batch: int, size: Size, length: int) -> Call:
    args, kwargs = _latent_call(d, batch, size, length, greatest=1.0)
    return args, {**kwargs, "y": d.prompt(batch, 8), "guidance": torch.full((batch,), 3.5)}


def _comfy_wan(depth: int) -> nn.Module:
    from comfy.ldm.wan.model import WanModel

    return WanModel(
        **{**_comfy_settings(), "model_type": "t2v", "patch_size": (1, 2, 2), "in_dim": 4, "dim": 32},
        **{"ffn_dim": 64, "freq_dim": 16, "text_dim": 16, "out_dim": 4, "num_heads": 2, "num_layers": depth},
    )


def _comfy_qwen(depth: int) -> nn.Module:
    from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(
        **{**_comfy_settings(), "patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": depth},
        **{"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 16},
        **{"pooled_projection_dim": 8, "axes_dims_rope": (4, 6, 6)},
    )


def _comfy_qwen_call(d: Draw, batch: int, size: Size, length: int) -> Call:
    return _latent_call(d, batch, (1, *size), length, greatest=1.0)


def _comfy_lumina(depth: int) -> nn.Module:
    from comfy.ldm.lumina.model import NextDiT

    return NextDiT(
        **{**_comfy_settings(), "patch_size": 2, "in_channels": 4, "dim": 32, "n_layers": depth},
        **{"n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "axes_dims": [4, 6, 6], "cap_feat_dim": 16},
        **{"axes_lens": [300, 64, 64], "norm_eps": 1e-5, "qk_norm": True},
    )


def _comfy_lumina_call(d: Draw, batch: int, size: Size, length: int) -> Call:
    args, kwargs = _latent_call(d, batch, size, length, greatest=1.0)
    return args, {**kwargs, "num_tokens": length}


def _comfy_pixart(depth: int) -> nn.Module:
    from comfy.ldm.pixart.pixartms import PixArtMS

    return PixArtMS(
        **{**_comfy_settings(), "input_size": 16, "patch_size": 2, "in_channels": 4, "hidden_size": 48},
        **{"depth": depth, "num_heads": 2, "pred_sigma": True, "caption_channels": 16},
        **{"micro_condition": False, "model_max_length": 12},
    )


def _comfy_sd3(depth: int) -> nn.Module:
    from comfy.ldm.modules.diffusionmodules.mmdit import OpenAISignatureMMDITWrapper

    return OpenAISignatureMMDITWrapper(
        **{**_comfy_settings(), "input_size": None, "patch_size": 2, "in_channels": 4, "adm_in_channels": 8},
        # here "depth" is the width; the number of blocks has another name
        **{"depth": 2, "num_blocks": depth, "pos_embed_scaling_factor": None, "pos_embed_max_size": 16},
        context_embedder_config={
            "target": "torch.nn.Linear",
            "params": {"in_features": 16, "out_features": 128},
        },
    )


def _comfy_sd3_call(d: Draw, batch: int, size: Size, length: int) -> Call:
    args, kwargs = _latent_call(d, batch, size, length, greatest=1000.0)
    return args, {**kwargs, "y": d.prompt(batch, 8)}


# ---- diffusers' ---------------------------------------------------------------------------------------------


def _diffusers_unet(depth: int) -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        **{"sample_size": 16, "in_channels": 4, "out_channels": 4, "block_out_channels": (32, 64)},
        **{"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "norm_num_groups": 8},
        **{"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "layers_per_block": depth + 1},
        **{"cross_attention_dim": 16, "attention_head_dim": 8},
    )


def _diffusers_call(d: Draw, batch: int, size: Size, length: int, *, channels: int = 4) -> Call:
    return (), {
        **{"timestep": d.time(batch, 1000.0), "return_dict": False},
        **{"hidden_states": d.noise(batch, channels, *size), "encoder_hidden_states": d.prompt(batch, length, 16)},
    }


def _diffusers_unet_call(d: Draw, batch: int, size: Size, length: int) -> Call:
    context = d.prompt(batch, length, 16)
    return (d.noise(batch, 4, *size), d.time(batch, 1000.0)[0], context), {"return_dict": False}


def _diffusers_pixart(depth: int) -> nn.Module:
    from diffusers import PixArtTransformer2DModel

    return PixArtTransformer2DModel(
        **{"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 8},
        **{"num_layers": depth, "cross_attention_dim": 32, "sample_size": 16, "patch_size": 2},
        **{"caption_channels": 16, "use_additional_conditions": False},
    )


def _diffusers_pixart_call(d: Draw, batch: int, size: Size, length: int) -> Call:
    _, kwargs = _diffusers_call(d, batch, size, length)
    added = {"resolution": None, "aspect_ratio": None}
    mask = torch.ones(batch, length)
    mask[:, -3:] = 0  # as a tokenizer leaves it: the end of the prompt is padding
    return (), {**kwargs, "added_cond_kwargs": added, "encoder_attention_mask": mask}


def _diffusers_sd3(depth: int) -> nn.Module:
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        **{"sample_size": 16, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": depth},
        **{"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 16},
        **{"caption_projection_dim": 32, "pooled_projection_dim": 8, "pos_embed_max_size": 16},
    )


def _diffusers_sd3_call(d: Draw, batch: int, size: Size, length: int) -> Call:
    _, kwargs = _diffusers_call(d, batch, size, length)
    return (), {**kwargs, "pooled_projections": d.prompt(batch, 8)}


def _diffusers_flux(depth: int) -> nn.Module:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        **{"patch_size": 1, "in_channels": 16, "num_layers": depth, "num_single_layers": depth},
        **{"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 16},
        **{"pooled_projection_dim": 8, "guidance_embeds": True, "axes_dims_rope": (4, 6, 6)},
    )


def _diffusers_flux_call(d: Draw, batch: int, size: Size, length: int) -> Call:
    height, width = size[0] // 2, size[1] // 2
    ids = torch.zeros(height, width, 3)
    ids[..., 1] += torch.arange(height)[:, None]
    ids[..., 2] += torch.arange(width)[None]
    return (), {
        **{"hidden_states": d.noise(batch, height * width, 16), "timestep": d.time(batch, 1.0)},
        **{"encoder_hidden_states": d.prompt(batch, length, 16), "pooled_projections": d.prompt(batch, 8)},
        **{"img_ids": ids.flatten(0, 1), "txt_ids": torch.zeros(length, 3), "return_dict": False},
        "guidance": torch.full((batch,), 3.5),
    }


def _diffusers_latte(depth: int) -> nn.Module:
    from diffusers import LatteTransformer3DModel

    return LatteTransformer3DModel(
        **{"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 8},
        **{"num_layers": depth, "cross_attention_dim": 32, "attention_bias": True, "sample_size": 8},
        **{"patch_size": 2, "activation_fn": "gelu-approximate", "num_embeds_ada_norm": 1000},
        **{"norm_type": "ada_norm_single", "norm_elementwise_affine": False, "norm_eps": 1e-6},
        **{"caption_channels": 16, "video_length": 4},
    )


# ---- the table ----------------------------------------------------------------------------------------------


def _table() -> dict[str, Backbone]:
    def sampled(greatest: float) -> Callable[[Draw, int, Size, int], Call]:
        return lambda d, batch, size, length: _latent_call(d, batch, size, length, greatest=greatest)

    override: dict[str, Edit] = {"override": _override}
    joint = {**override, "block_replace": _replaced("double_block", 0)}
    wan = {
        "attn1_patch": _patched("attn1_patch", lambda args: args["x"] * 1.5),
        "attn2_patch": _patched("attn2_patch", lambda args: args["x"] * 1.2),
        "double_block": _patched("double_block", _double),
    }
    flux = {
        "single_replace": _replaced("single_block", 0),
        "attn1_patch": _patched("attn1_patch", _flux_attention_patch),
        "post_input": _patched("post_input", _double),
    }
    dit = {"attn1_patch": _patched("attn1_patch", lambda q, k, v, extra: (q, k, v * 1.5))}
    qwen = {"double_block": wan["double_block"]}
    short = {"lengths": (16, 20, 77)}
    video: dict[str, Any] = {**{"sizes": VIDEO, "lengths": (48, 20, 77), "stays_float": ("patch_embedding",)}}
    # below 34 its positions divide by zero
    large: dict[str, Any] = {**{"sizes": ((40, 40), (40, 48), (48, 40), (36, 44), (44, 52)), "lengths": (400, 20, 77)}}
    latte: dict[str, Any] = {"sizes": ((4, 8, 8), (4, 8, 12), (4, 12, 8), (4, 10, 14), (4, 12, 12)), **short}
    rows = [
        Backbone("torch_dit", "torch", _torch_dit, sampled(1.0), edits={**joint, **dit}),
        Backbone("comfy_unet", "comfy", _comfy_unet, sampled(1000.0), sizes=ODD, edits=_UNET_EDITS),
        Backbone("comfy_flux", "comfy", _comfy_flux, _comfy_flux_call, sizes=ODD, edits={**joint, **flux}),
        Backbone("comfy_wan", "comfy", _comfy_wan, sampled(1000.0), **video, edits={**joint, **wan}),
        Backbone("comfy_qwen", "comfy", _comfy_qwen, _comfy_qwen_call, sizes=ODD, edits={**joint, **qwen}),
        Backbone("comfy_lumina", "comfy", _comfy_lumina, _comfy_lumina_call, edits={**override, **qwen}),
        Backbone("comfy_pixart", "comfy", _comfy_pixart, sampled(1000.0), **large),
        Backbone("comfy_sd3", "comfy", _comfy_sd3, _comfy_sd3_call, sizes=ODD, edits=joint),
        Backbone("diffusers_unet", "diffusers", _diffusers_unet, _diffusers_unet_call),
        Backbone("diffusers_pixart", "diffusers", _diffusers_pixart, _diffusers_pixart_call),
        Backbone("diffusers_sd3", "diffusers", _diffusers_sd3, _diffusers_sd3_call),
        Backbone("diffusers_flux", "diffusers", _diffusers_flux, _diffusers_flux_call),
        Backbone("diffusers_latte", "diffusers", _diffusers_latte, _diffusers_call, **latte),
    ]
    return {row.name: row for row in rows}


def _flux_attention_patch(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"q": q, "k": k, "v": v * 1.5}


BACKBONES = _table()
