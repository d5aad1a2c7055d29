# SPDX-License-Identifier: Apache-2.0
"""Whole workloads of `benchmarks.prompt_clock`: network, text encoder and VAE at their published sizes, random weights.

A row names what a prompt of the workload has. Its three models are made by ComfyUI's own loaders from state dicts of
random numbers, so that they are what a file of that family would become. `sd21-small` is for a processor.

LTX-2.3 and MiniMax-H3 sample sound beside the video, and the video alone is decoded. H3 takes 17k+5 frames, so 39 here.
The matrices of their text encoders have 8 bits, where those of ComfyUI's templates have 4.
"""

from __future__ import annotations

import importlib
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from .backbones import Backbone, drawn
from .clock_networks import LTX_VAE, NETWORKS

_HALF = torch.bfloat16


@dataclass(frozen=True)
class Encoder:
    """A text encoder. classes: of its files, as "module:class"; called: it makes the class. kind: name of a CLIPType.

    quant: form of the matrices of layers. visual: how names of its vision tower begin in files. pieces: its first file
    has a tokenizer.
    """

    classes: tuple[str, ...]
    kind: str
    called: bool = False
    quant: str = ""
    visual: str = "model.visual."
    pieces: bool = False


@dataclass(frozen=True)
class Workload:
    """One row. quant: form of the matrices of blocks. networks: how many of the network sample in turn.

    within: how names of those blocks begin. ratio: pixels of a side per latent. latents: latent frames of so many
    frames. sound: shape of the sound that is sampled beside so many frames. tokens: of the prompt. references: pictures
    of the same size that the prompt refers to. header: what the headers of its files say of their sizes.
    """

    name: str
    network: str
    encoder: Encoder
    vae: Callable[[], torch.nn.Module]
    steps: int
    ratio: int = 8
    latents: Callable[[int], int] = lambda frames: (frames - 1) // 4 + 1
    sound: Callable[[int], tuple[int, ...]] | None = None
    quant: str = ""
    within: str = ""
    lora: bool = False
    networks: int = 1
    tokens: int = 64
    references: int = 0
    least: int = 1024  # of both sides of a matrix that is quantised or has a LoRA
    header: dict[str, Any] = field(default_factory=dict)

    @property
    def backbone(self) -> Backbone:
        """Its network's row."""
        return NETWORKS[self.network]

    @property
    def metadata(self) -> dict[str, str] | None:
        """Of its files, as ComfyUI's loaders take it."""
        return {"config": json.dumps(self.header)} if self.header else None

    def latent(self, height: int, width: int) -> Any:
        """Zeros of the latent's shape for so many pixels, on the CPU; with sound ComfyUI's pair of both."""
        frames = self.backbone.frames
        time = (self.latents(frames),) if frames else (1,) if self.backbone.cls == NETWORKS["qwen"].cls else ()
        video = torch.zeros(1, self.backbone.channels, *time, height // self.ratio, width // self.ratio)
        if self.sound is None:
            return video
        from comfy.nested_tensor import NestedTensor

        return NestedTensor([video, torch.zeros(1, *self.sound(frames))])

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


def _ltx_vae() -> torch.nn.Module:
    from comfy.ldm.lightricks.vae.causal_video_autoencoder import VideoVAE

    return VideoVAE(config=LTX_VAE)


def _h3_vae() -> torch.nn.Module:
    from comfy.ldm.minimax.vae import MiniMaxH3VideoVAE

    return MiniMaxH3VideoVAE()


def projections(device: str, dtype: torch.dtype, video: int = 4096, sound: int = 2048) -> torch.nn.Module:
    """What the file of LTX-2.3 has of its text encoder: projections of all layers of Gemma 3 12B."""
    from comfy.ops import disable_weight_init
    from comfy.text_encoders.llama import Gemma3_12B_Config as Gemma
    from comfy.text_encoders.lt import DualLinearProjection

    made, wide = torch.nn.Module(), (Gemma.num_hidden_layers + 1) * Gemma.hidden_size
    projection = DualLinearProjection(wide, video, sound, dtype=dtype, device=device, operations=disable_weight_init)
    made.transformer = torch.nn.ModuleDict({"text_embedding_projection": projection})
    return made


_QWEN3_4B = Encoder(("comfy.text_encoders.z_image:te",), "LUMINA2", called=True)
_QWEN3_8B = Encoder(("comfy.text_encoders.flux:Qwen3_8BModel",), "FLUX2")
_QWEN_VL = Encoder(("comfy.text_encoders.qwen_image:te",), "QWEN_IMAGE", called=True)
_KREA_VL = Encoder(("comfy.text_encoders.krea2:Krea2Qwen3VLClipModel",), "KREA2")
_UMT5 = Encoder(("comfy.text_encoders.wan:UMT5XXlModel",), "WAN", pieces=True)
_SDXL = Encoder(("comfy.sd1_clip:SDClipModel", "comfy.sdxl_clip:SDXLClipG"), "STABLE_DIFFUSION")
_CLIP_H = Encoder(("comfy.text_encoders.sd2_clip:SD2ClipHModel",), "STABLE_DIFFUSION")
_GEMMA = Encoder(
    ("comfy.text_encoders.lt:Gemma3_12BModel", "benchmarks.clock_workloads:projections"), "LTXV", quant="fp8",
    pieces=True,
)  # fmt: skip
_QWEN3_VL = Encoder(("comfy.text_encoders.minimax:MiniMaxH3ClipModel",), "MINIMAX", quant="fp8", visual="visual.")
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
        Workload(
            "ltx23-fp8", "ltx23", _GEMMA, _ltx_vae, 8, ratio=32, latents=lambda frames: (frames - 1) // 8 + 1,
            sound=lambda frames: (8, frames, 16), quant="fp8", within="transformer_blocks.", tokens=128,
            header={"transformer": NETWORKS["ltx23"].settings, "vae": LTX_VAE},
        ),
        Workload(
            "h3-int8", "h3", _QWEN3_VL, _h3_vae, 8, ratio=16, latents=lambda frames: (frames - 5) // 17 * 5 + 2,
            sound=lambda frames: (32, 2, round(frames / 24 * 40)), quant="int8_convrot", within="blocks.", tokens=128,
        ),
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
}  # fmt: skip
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
            large = name.startswith(workload.within) and _is_matrix(name, one, workload.least)
            made = _quantised(name, plain, workload.quant) if workload.quant and large else None
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

    options = {"dtype": workload.backbone.dtype}
    return comfy.sd.load_diffusion_model_state_dict(dict(weights), model_options=options, metadata=workload.metadata)


def _is_matrix(name: str, weight: torch.Tensor, least: int) -> bool:
    """Whether it is one of the large matrices of blocks, which files have quantised."""
    in_block = name.endswith("weight") and ("blocks." in name or "layers." in name)
    return in_block and weight.ndim == 2 and min(weight.shape) >= least and weight.shape[1] % 256 == 0


def _quantised(name: str, weight: torch.Tensor, quant: str) -> dict[str, torch.Tensor]:
    """A matrix as ComfyUI's own files have it."""
    from comfy import quant_ops

    form, how, words = FORMS[quant]
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
    encoder, weights = workload.encoder, inner.transformer.state_dict()
    like = {re.sub("^visual\\.", encoder.visual, name): one for name, one in weights.items()}
    own = {"spiece_model": _pieces()} if encoder.pieces and not number else {}
    return _drawn(like, device, encoder.quant, workload.least) | own


def _pieces() -> torch.Tensor:
    """A tokenizer of a few words, as files have one that bring their own."""
    import sentencepiece

    written, words = io.BytesIO(), ["a horse in the rain", "another horse in the sun"]
    places = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}
    size = {"vocab_size": 64, "hard_vocab_limit": False, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(words), model_writer=written, **size, **places)
    return torch.tensor(list(written.getvalue()), dtype=torch.uint8)


def clip_of(workload: Workload, files: list[dict[str, torch.Tensor]]) -> Any:
    """The text encoder as ComfyUI loads it from files of these weights."""
    import comfy.sd

    kind_of = getattr(comfy.sd.CLIPType, workload.encoder.kind)
    return comfy.sd.load_text_encoder_state_dicts(files, clip_type=kind_of)


def vae_weights(workload: Workload, device: torch.device) -> dict[str, torch.Tensor]:
    """The state dict of the VAE's file, in main memory. device: where its numbers are drawn."""
    with torch.device("meta"), _layers_with_weights():
        like = workload.vae().state_dict()
    return _drawn(like, device)


def vae_of(workload: Workload, weights: dict[str, torch.Tensor]) -> Any:
    """The VAE as ComfyUI loads it from a file of these weights."""
    import comfy.sd

    return comfy.sd.VAE(sd=weights, metadata=workload.metadata)


def _drawn(
    like: Mapping[str, torch.Tensor], device: torch.device, quant: str = "", least: int = 0
) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    weights: dict[str, torch.Tensor] = {}
    for name, one in like.items():
        made = _one(name, one, _HALF, device)
        large = quant and _is_matrix(name, one, least)
        parts = _quantised(name, made, quant) if large else {name: made}
        weights |= {key: value.cpu() for key, value in parts.items()}
    return weights


def _one(name: str, like: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if not like.is_floating_point():
        return torch.zeros(like.shape, dtype=like.dtype)
    ones = "weight", "gamma", "running_var", "std-of-means", "latents_std"
    if (like.ndim == 1 and name.endswith(ones)) or name.endswith("gamma"):
        return torch.ones(like.shape, device=device, dtype=dtype)
    scale = 0.02 if like.ndim <= 1 else 1 / math.sqrt(max(1, like[0].numel()))
    return torch.randn(like.shape, device=device, dtype=dtype) * scale
