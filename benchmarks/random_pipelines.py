# SPDX-License-Identifier: Apache-2.0
"""diffusers pipelines with random weights, made from their configurations alone: nothing is downloaded.

`random:sdxl` has every part of the published pipeline at full size, text encoders included, so that speed and memory
are those of the real one; `tiny:sdxl` has the same classes at the size of a CPU test. Weights are scaled by fan-in:
every input then matters, and an error in any layer shows in the picture, which is noise all the same.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from benchmarks.unusable import Unusable, nearest

SHRINK = 8  # a tiny pipeline's pictures have an eighth of the height and the width


@dataclass(frozen=True)
class Part:
    """One network of a pipeline: its class, its published configuration, and what a tiny one has instead."""

    cls: str
    full: dict[str, Any]
    tiny: dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """One family. size: height and width of its pictures in pixels; call, tiny_call: keywords of its call."""

    pipeline: str
    parts: dict[str, Part]
    scheduler: tuple[str, dict[str, Any]]
    size: int
    dtype: torch.dtype = torch.float16
    more: dict[str, Any] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)
    tiny_call: dict[str, Any] = field(default_factory=dict)


def _vae(size: int, scaling: float, channels: int = 4, **more: Any) -> Part:
    full = {
        **{"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "norm_num_groups": 32},
        **{"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4},
        **{"latent_channels": channels, "sample_size": size, "scaling_factor": scaling, **more},
    }
    tiny = {"block_out_channels": (8, 8, 16, 16), "layers_per_block": 1, "norm_num_groups": 4}
    return Part("AutoencoderKL", full, {**tiny, "sample_size": size // SHRINK})


def _clip(width: int, layers: int, heads: int, act: str, projection: int, cls: str = "CLIPTextModel") -> Part:
    full = {
        **{"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers, "hidden_act": act},
        **{"num_attention_heads": heads, "projection_dim": projection, "vocab_size": 49408},
    }
    tiny = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return Part(cls, full, {**tiny, "projection_dim": 16, "vocab_size": 300})


_CLIP_L = _clip(768, 12, 12, "quick_gelu", 768)
_CLIP_G = _clip(1280, 32, 20, "gelu", 1280, "CLIPTextModelWithProjection")
_T5 = Part(
    "T5EncoderModel",
    {
        **{"d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_layers": 24, "num_heads": 64, "vocab_size": 32128},
        **{"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    },
    {"d_model": 32, "d_ff": 32, "d_kv": 8, "num_layers": 2, "num_heads": 2, "vocab_size": 300},
)
_UNET = {
    **{"in_channels": 4, "out_channels": 4, "layers_per_block": 2, "norm_num_groups": 32},
    **{"use_linear_projection": True, "act_fn": "silu"},
}
_TINY_UNET = {
    **{"block_out_channels": (16, 32), "norm_num_groups": 8, "attention_head_dim": (2, 4), "layers_per_block": 1},
    **{"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D")},
    **{"up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")},
}
_SD21 = Part(
    "UNet2DConditionModel",
    {
        **_UNET,
        **{"block_out_channels": (320, 640, 1280, 1280), "attention_head_dim": (5, 10, 20, 20), "sample_size": 96},
        **{"down_block_types": (*("CrossAttnDownBlock2D",) * 3, "DownBlock2D"), "upcast_attention": True},
        **{"up_block_types": ("UpBlock2D", *("CrossAttnUpBlock2D",) * 3), "cross_attention_dim": 1024},
    },
    {**_TINY_UNET, "cross_attention_dim": 16, "sample_size": 12},
)
_SDXL = Part(
    "UNet2DConditionModel",
    {
        **_UNET,
        **{"block_out_channels": (320, 640, 1280), "attention_head_dim": (5, 10, 20), "sample_size": 128},
        **{"down_block_types": ("DownBlock2D", *("CrossAttnDownBlock2D",) * 2), "cross_attention_dim": 2048},
        **{"up_block_types": (*("CrossAttnUpBlock2D",) * 2, "UpBlock2D"), "transformer_layers_per_block": (1, 2, 10)},
        **{"addition_embed_type": "text_time", "addition_time_embed_dim": 256},
        **{"projection_class_embeddings_input_dim": 2816},
    },
    {
        **_TINY_UNET,
        **{"cross_attention_dim": 32, "transformer_layers_per_block": (1, 2), "addition_time_embed_dim": 8},
        **{"projection_class_embeddings_input_dim": 6 * 8 + 16, "sample_size": 16},
    },
)
_ADA = {
    **{"num_attention_heads": 16, "attention_head_dim": 72, "in_channels": 4, "out_channels": 8, "num_layers": 28},
    **{"cross_attention_dim": 1152, "attention_bias": True, "patch_size": 2, "activation_fn": "gelu-approximate"},
    **{"num_embeds_ada_norm": 1000, "norm_type": "ada_norm_single", "norm_elementwise_affine": False},
    **{"norm_eps": 1e-6, "caption_channels": 4096},
}
_TINY_ADA = {
    **{"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "cross_attention_dim": 32},
    "caption_channels": 32,
}
_PIXART = Part(
    "PixArtTransformer2DModel",
    {**_ADA, "sample_size": 128, "use_additional_conditions": True},
    {**_TINY_ADA, "sample_size": 16, "use_additional_conditions": False},  # its pipeline gives them at size 128 only
)
_LATTE = Part(
    "LatteTransformer3DModel",
    {**_ADA, "sample_size": 64, "video_length": 16},
    {**_TINY_ADA, "sample_size": 8, "video_length": 4},
)
_FLUX = Part(
    "FluxTransformer2DModel",
    {"guidance_embeds": True},
    {
        **{"in_channels": 64, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16},
        **{"num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 16},
        "axes_dims_rope": (4, 6, 6),
    },
)
_SD3 = Part(
    "SD3Transformer2DModel",
    {
        **{"sample_size": 128, "patch_size": 2, "in_channels": 16, "out_channels": 16, "num_layers": 24},
        **{"attention_head_dim": 64, "num_attention_heads": 24, "joint_attention_dim": 4096},
        **{"caption_projection_dim": 1536, "pooled_projection_dim": 2048, "pos_embed_max_size": 192},
    },
    {
        **{"sample_size": 16, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2},
        **{"joint_attention_dim": 32, "caption_projection_dim": 32, "pooled_projection_dim": 32},
        "pos_embed_max_size": 24,
    },
)
_SCALED = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
_DDIM = {**_SCALED, "clip_sample": False, "set_alpha_to_one": False}
_LINEAR = {"beta_start": 0.0001, "beta_end": 0.02, "beta_schedule": "linear"}
_AS_IT_IS = {"clean_caption": False}  # cleaning wants packages for web pages, and the prompt is no web page

RECIPES: dict[str, Recipe] = {
    "sd21": Recipe(
        "StableDiffusionPipeline",
        {"unet": _SD21, "vae": _vae(768, 0.18215), "text_encoder": _clip(1024, 23, 16, "gelu", 512)},
        ("DDIMScheduler", {**_DDIM, "prediction_type": "v_prediction"}),
        size=768,
        more={"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False},
    ),
    "sdxl": Recipe(
        "StableDiffusionXLPipeline",
        {
            **{"unet": _SDXL, "vae": _vae(1024, 0.13025, force_upcast=True)},
            **{"text_encoder": _CLIP_L, "text_encoder_2": _CLIP_G},
        },
        ("EulerDiscreteScheduler", {**_SCALED, "timestep_spacing": "leading"}),
        size=1024,
    ),
    "pixart": Recipe(
        "PixArtAlphaPipeline",
        {"transformer": _PIXART, "vae": _vae(512, 0.18215), "text_encoder": _T5},
        ("DPMSolverMultistepScheduler", _LINEAR),
        size=1024,
        call=_AS_IT_IS,
        tiny_call={"use_resolution_binning": False},  # its tables of sizes begin at 256
    ),
    "latte": Recipe(
        "LattePipeline",
        {"transformer": _LATTE, "vae": _vae(512, 0.18215), "text_encoder": _T5},
        ("DDIMScheduler", {**_LINEAR, "clip_sample": False, "set_alpha_to_one": False}),
        size=512,
        call=_AS_IT_IS,
        tiny_call={"video_length": 4},
    ),
    "flux": Recipe(
        "FluxPipeline",
        {
            **{"transformer": _FLUX, "text_encoder": _CLIP_L, "text_encoder_2": _T5},
            "vae": _vae(1024, 0.3611, 16, shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False),
        },
        ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0, "use_dynamic_shifting": True}),
        size=1024,
        dtype=torch.bfloat16,
    ),
    "sd3": Recipe(
        "StableDiffusion3Pipeline",
        {
            **{"transformer": _SD3, "text_encoder_3": _T5, "text_encoder_2": _CLIP_G},
            "text_encoder": _clip(768, 12, 12, "quick_gelu", 768, "CLIPTextModelWithProjection"),
            "vae": _vae(1024, 1.5305, 16, shift_factor=0.0609, use_quant_conv=False, use_post_quant_conv=False),
        },
        ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
        size=1024,
    ),
}


def is_random(model: str) -> bool:
    """Whether a --model means a pipeline of this file."""
    return model.startswith(("random:", "tiny:"))


def recipe_of(model: str) -> tuple[Recipe, bool]:
    """(recipe, whether it is the tiny one). Raises Unusable with the nearest name."""
    kind, _, name = model.partition(":")
    if name not in RECIPES:
        raise Unusable(
            f"--model is {model!r}, expected {kind}: and one of {', '.join(RECIPES)}; "
            f"did you mean {kind}:{nearest(name, RECIPES)}?"
        )
    return RECIPES[name], kind == "tiny"


def build(model: str, device: torch.device, dtype: torch.dtype) -> Any:
    """A pipeline on `device`. Weights are drawn in the recipe's own dtype: float32 computes with the same ones."""
    import diffusers

    recipe, tiny = recipe_of(model)
    parts: dict[str, Any] = {}
    for name, part in recipe.parts.items():
        with made_in(dtype, device):
            parts[name] = _bare(part, tiny).eval().requires_grad_(False)
        fill(parts[name], name, recipe.dtype)
        if name.startswith("text_encoder"):
            parts[name.replace("text_encoder", "tokenizer")] = _tokenizer(t5=part is _T5)
    cls, settings = recipe.scheduler
    parts["scheduler"] = getattr(diffusers, cls)(**settings)
    return getattr(diffusers, recipe.pipeline)(**parts, **recipe.more)


def weights_gib(model: str, dtype: torch.dtype) -> float:
    """GiB that the weights of a full-size or tiny pipeline take, without making them."""
    recipe, tiny = recipe_of(model)
    with torch.device("meta"):
        nets = [_bare(part, tiny) for part in recipe.parts.values()]
    return sum(p.numel() for net in nets for p in net.parameters()) * dtype.itemsize / 2**30


def fill(module: nn.Module, name: str, drawn: torch.dtype) -> None:
    """Draw every parameter in its place, as a number of dtype `drawn`, from a generator for each `name`."""
    device = next(module.parameters()).device
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    for path, weight in module.named_parameters():
        with torch.no_grad():
            if weight.ndim == 1 and path.endswith("weight"):
                weight.fill_(1.0)  # a norm's
            elif weight.ndim:
                scale = 0.02 if weight.ndim == 1 else 1.0 / math.sqrt(weight[0].numel())
                numbers = torch.randn(weight.shape, device=device, generator=generator, dtype=torch.float32)
                weight.copy_((numbers * scale).to(drawn))


@contextmanager
def made_in(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Networks made inside the block have this dtype at once: in float32 the largest would not fit many a card."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def _bare(part: Part, tiny: bool) -> nn.Module:
    """The network with whatever weights its class begins with."""
    import diffusers

    settings = {**part.full, **(part.tiny if tiny else {})}
    if hasattr(diffusers, part.cls):
        return getattr(diffusers, part.cls)(**settings)
    import transformers

    marks = {"bos_token_id": _BEGIN, "eos_token_id": _END, "pad_token_id": _PAD}
    config = transformers.T5Config if part.cls.startswith("T5") else transformers.CLIPTextConfig
    return getattr(transformers, part.cls)(config(**settings, **marks))


_PAD, _END, _BEGIN = 0, 1, 2


def _tokenizer(t5: bool) -> Any:
    """A tokenizer without a vocabulary of words: a byte is a token. Lengths are those of CLIP or T5."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    marks = {"<pad>": _PAD, "</s>": _END, "<s>": _BEGIN}
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(BPE(vocab={**marks, **{c: 3 + i for i, c in enumerate(letters)}}, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    single = "$A </s>" if t5 else "<s> $A </s>"
    tokens.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 2), ("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", eos_token="</s>", bos_token="<s>",
        model_max_length=512 if t5 else 77,
    )  # fmt: skip
