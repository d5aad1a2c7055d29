# SPDX-License-Identifier: Apache-2.0
"""Tiny backbones with random weights: ComfyUI's and diffusers' own classes, and one that needs neither.

`make(name, depth)` gives a module and a maker of its inputs. Weights are drawn so that every input matters: with
smaller ones a network that ignores its prompt would pass for one that is right. The first of a backbone's sizes is
square, and its first prompt length is the number of image tokens at that size, so that the two can be confused.

A comfy backbone needs ComfyUI imported first (the fixture `comfyui` in conftest.py does it). No test lives here.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import comfy_networks as comfy
import diffusers_networks as diffusers
import option_edits as edits
import torch
from inputs import Call, Draw, Size, latent_call, sampler_options, tensors_of
from torch import nn
from torch_dit import TorchDiT

__all__ = ["BACKBONES", "FOUR", "Backbone", "Tiny", "make", "tensors_of", "with_weights"]

EVEN = ((16, 16), (16, 24), (24, 16), (20, 28), (12, 12))
ODD = ((16, 16), (16, 24), (24, 16), (20, 28), (17, 23))  # what does not fill whole patches is padded
SMALL = ((8, 8), (8, 12), (12, 8), (10, 14), (9, 11))  # where each position is a token
SMALL_EVEN = ((8, 8), (8, 12), (12, 8), (10, 14), (6, 6))
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
    edits: Mapping[str, edits.Edit] = field(default_factory=dict)
    control: edits.Control | None = None  # what a ControlNet hands over
    bound_to_sizes: str = ""  # a region whose code computes with plain sizes: it runs eager at other ones


class Tiny:
    """A backbone with its weights, and the maker of its inputs."""

    def __init__(self, kind: Backbone, depth: int) -> None:
        self.kind, self.name = kind, kind.name
        self.module = with_weights(kind.build(depth), kind.name)

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
        control: bool = False,
    ) -> Call:
        """(args, kwargs) of one call; `options` are added to what ComfyUI's sampler writes, `control` to the call."""
        size, length = size or self.kind.sizes[0], length or self.kind.lengths[0]
        args, kwargs = self.kind.call(Draw(seed, prompt, step), batch, size, length)
        if control and self.kind.control is not None:
            kwargs["control"] = self.kind.control(Draw(seed + 1, prompt, step), batch, size)
        if "transformer_options" in kwargs:
            kwargs["transformer_options"] = {**sampler_options(batch, step), **(options or {})}
        return args, kwargs


def make(name: str, depth: int = 2) -> Tiny:
    """The named backbone with `depth` repeated blocks; the same weights in every process."""
    return Tiny(BACKBONES[name], depth)


def with_weights(module: nn.Module, name: str) -> nn.Module:
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


def _sampled(greatest: float) -> Callable[[Draw, int, Size, int], Call]:
    """A call with times up to `greatest`."""
    return lambda d, batch, size, length: latent_call(d, batch, size, length, greatest=greatest)


_UNET: dict[str, Any] = {"sizes": SMALL, "edits": edits.UNET, "control": edits.unet_control}
_FLUX: dict[str, Any] = {"sizes": ODD, "edits": edits.FLUX, "control": edits.token_control("input", "output")}
_QWEN: dict[str, Any] = {"sizes": ODD, "edits": edits.QWEN, "control": edits.token_control("input")}
_SD3: dict[str, Any] = {"sizes": ODD, "edits": edits.SD3, "control": edits.token_control("output", width=128)}
_SD3["bound_to_sizes"] = "x_embedder"  # it pads odd sizes, and says so to whoever traces it
_WAN: dict[str, Any] = {"sizes": VIDEO, "lengths": (48, 20, 77), "edits": edits.WAN}
_WAN["stays_float"] = ("patch_embedding",)
# below 34 the positions of ComfyUI's PixArt divide by zero
_LARGE: dict[str, Any] = {"sizes": ((40, 40), (40, 48), (48, 40), (36, 44), (44, 52)), "lengths": (400, 20, 77)}
_TABLE: dict[str, Any] = {"bound_to_sizes": "pos_embed"}  # numpy makes it anew for other sizes
_LATTE: dict[str, Any] = {"sizes": tuple((4, *size[1:]) for size in VIDEO), "lengths": (16, 20, 77), **_TABLE}

_ROWS = [
    Backbone("torch_dit", "torch", TorchDiT, _sampled(1.0), edits=edits.TORCH_DIT),
    Backbone("comfy_unet", "comfy", comfy.unet, _sampled(1000.0), **_UNET),
    Backbone("comfy_flux", "comfy", comfy.flux, comfy.flux_call, **_FLUX),
    Backbone("comfy_wan", "comfy", comfy.wan, _sampled(1000.0), **_WAN),
    Backbone("comfy_qwen", "comfy", comfy.qwen, comfy.qwen_call, **_QWEN),
    Backbone("comfy_lumina", "comfy", comfy.lumina, comfy.lumina_call, edits=edits.LUMINA),
    Backbone("comfy_pixart", "comfy", comfy.pixart, _sampled(1000.0), **_LARGE),
    Backbone("comfy_sd3", "comfy", comfy.sd3, comfy.sd3_call, **_SD3),
    Backbone("diffusers_unet", "diffusers", diffusers.unet, diffusers.unet_call, SMALL_EVEN),
    Backbone("diffusers_pixart", "diffusers", diffusers.pixart, diffusers.pixart_call, **_TABLE),
    Backbone("diffusers_sd3", "diffusers", diffusers.sd3, diffusers.sd3_call),
    Backbone("diffusers_flux", "diffusers", diffusers.flux, diffusers.flux_call),
    Backbone("diffusers_latte", "diffusers", diffusers.latte, diffusers.any_call, **_LATTE),
]
BACKBONES = {row.name: row for row in _ROWS}
FOUR = ("torch_dit", "comfy_unet", "comfy_wan", "diffusers_sd3")  # of different build: `make test` runs these
