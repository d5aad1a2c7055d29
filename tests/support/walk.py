# SPDX-License-Identifier: Apache-2.0
"""What a user may have set on a model at one moment, and the ways from one such moment to the next.

A knob has settings, the first of them off. All knobs together are the state, and a picture follows from it alone,
whatever way led there. No test lives here. ComfyUI must be imported first (the fixture `comfyui` does it).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from lora_files import bypassed, file_for, hooked, loaded
from option_edits import flux_attention_patch
from patchers import Change, another, node, with_method, with_option
from patches_of_users import (
    Adapter,
    Edit,
    chained,
    control_of,
    flipped,
    function_wrapper,
    left_half,
    skipped,
    stronger,
    with_values,
    wrapped,
)

State = tuple[int, ...]
_REPLACED = "which compiled code cannot hold"  # the words of the report for code of others inside a block


@dataclass(frozen=True)
class Knob:
    """One thing that users set.

    of: "model", "prompts" or "call": what a setting is a change of. settings: the first is off, except for a call's.
    eager: words of the reasons for which blocks may run eager while it is on. where: a call in which it matters.
    """

    name: str
    of: str
    settings: tuple[Any, ...]
    eager: tuple[str, ...] = ()
    where: Mapping[str, Any] = field(default_factory=dict)


class Knobs:
    """The knobs of one family. A state has the number of a setting for each."""

    def __init__(self, name: str, patcher: Any) -> None:
        self.rows = [*_weights(name, patcher), *_FAMILY[name](), *_around(name), *_prompts(name, patcher), *_CALL]
        self.off: State = (0,) * len(self.rows)

    def on(self, state: State) -> list[tuple[Knob, Any]]:
        """What is not off."""
        return [(knob, knob.settings[at]) for knob, at in zip(self.rows, state, strict=True) if at]

    def _set(self, state: State, of: str) -> list[Any]:
        return [setting for knob, setting in self.on(state) if knob.of == of]

    def model(self, state: State) -> Change:
        """The nodes between a loader and the sampler."""
        return lambda patcher: functools.reduce(lambda made, change: change(made), self._set(state, "model"), patcher)

    def call(self, state: State) -> dict[str, Any]:
        """Keywords of `sample`."""
        edits: list[Edit] = self._set(state, "prompts")
        words = {key: value for setting in self._set(state, "call") for key, value in setting.items()}
        if not edits:
            return words
        return {**words, "edit": lambda *both: functools.reduce(lambda made, edit: edit(*made), edits, both)}

    def reasons(self, state: State) -> set[str]:
        """The words of all reasons for which a block may run eager now."""
        return {word for knob, _ in self.on(state) for word in knob.eager}

    def told(self, state: State) -> str:
        """A state in words."""
        names = [f"{knob.name} {at}" for knob, at in zip(self.rows, state, strict=True) if at]
        return ", ".join(names) or "everything off"


# ---- weights ---------------------------------------------------------------------------------------------------------


def _weights(name: str, patcher: Any) -> list[Knob]:
    file, beside = file_for(patcher), file_for(patcher, seed=3)
    others = [loaded(file_for(patcher, kind, seed=1), 0.7) for kind in ("loha", "lokr", "dora", "oft", "difference")]
    second = another(name)

    def merged(patcher: Any) -> Any:
        from comfy_extras.nodes_model_merging import ModelMergeSimple

        return ModelMergeSimple().merge(patcher, second, 0.6)[0]

    strengths = [loaded(file, strength) for strength in (1.0, 0.5, -0.7)]
    around = [bypassed(beside, strength) for strength in (1.0, 0.4)]
    return [
        Knob("LoRA", "model", (None, *strengths)),
        Knob("stacked", "model", (None, *others)),
        Knob("bypass LoRA", "model", (None, *around)),
        Knob("merge", "model", (None, merged)),
    ]


# ---- what a family has -----------------------------------------------------------------------------------------------


def _in_attention(*factors: float) -> tuple[Any, ...]:
    """A patch of a UNet's attention whose number changes from run to run."""

    def louder(factor: float) -> Change:
        return with_method("set_model_attn1_patch", lambda n, context, value, extra: (n, context, value * factor))

    return (None, *map(louder, factors))


def _overrides() -> tuple[Any, ...]:
    """Attention of others in the place of the network's own, which blocks call from inside their artefacts."""

    def louder(attention: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return attention(*args, **kwargs) * -2.0

    return (None, *(with_option("optimized_attention_override", other) for other in (flipped, louder)))


def _unet() -> list[Knob]:
    hypertile = node(
        "comfy_extras.nodes_hypertile.HyperTile", tile_size=32, swap_size=2, max_depth=1, scale_depth=False
    )
    adapters = [with_method("set_model_attn2_replace", Adapter(scale), "input", 1) for scale in (2.0, -3.0)]
    free = [node("comfy_extras.nodes_freelunch.FreeU_V2", b1=1.5, b2=b2, s1=0.5, s2=0.2) for b2 in (2.8, 0.3)]
    pag = node("comfy_extras.nodes_pag.PerturbedAttentionGuidance", scale=9.0)
    sag = node("comfy_extras.nodes_sag.SelfAttentionGuidance", scale=3.0, blur_sigma=2.0)
    louder = with_method("set_model_output_block_patch", lambda h, skip, options: (h * 1.5, skip))
    return [
        Knob("attn1_patch", "model", _in_attention(3.0, 0.25), (_REPLACED,)),
        Knob("attn2_replace", "model", (None, *adapters), (_REPLACED,)),
        Knob("override", "model", _overrides()),
        Knob("HyperTile", "model", (None, hypertile), (_REPLACED,)),
        Knob("FreeU", "model", (None, *free)),
        Knob("output_block_patch", "model", (None, louder)),
        Knob("guidance", "model", (None, pag, sag), (_REPLACED,)),
    ]


def _dit(attention: list[Callable[..., Any]], *more: Knob) -> list[Knob]:
    replaced = [
        with_method("set_model_patch_replace", replace, "dit", "double_block", at)
        for replace, at in ((stronger, 0), (skipped, 1))
    ]
    patched = [with_method("set_model_attn1_patch", patch) for patch in attention]
    return [
        Knob("attn1_patch", "model", (None, *patched), (_REPLACED,)),
        Knob("block replaced", "model", (None, *replaced)),
        Knob("override", "model", _overrides()),
        *more,
    ]


def _flux() -> list[Knob]:
    widgets = {"start_percent": 0.0, "end_percent": 1.0, "rescaling_scale": 0.0, "scale": 9.0}
    kind = "comfy_extras.nodes_slg.SkipLayerGuidanceDiT"
    skips = node(kind, double_layers="0", single_layers="1", **widgets)
    draw = torch.Generator().manual_seed(8)
    pictures = [9 * torch.randn(1, 4, *size, generator=draw) for size in ((24, 24), (8, 24))]
    references = [
        with_values(reference_latents=some, reference_latents_method=method)
        for some, method in ((pictures[:1], "offset"), ([20 * picture.abs() for picture in pictures], "index"))
    ]
    patches = [flux_attention_patch, lambda q, k, v, *_, **__: {"q": q, "k": k, "v": v * 3.0}]
    return _dit(
        patches,
        Knob("skipped layers", "model", (None, skips)),
        Knob("reference latents", "prompts", (None, *references), where={"cfg": 12.0}),
    )


def _wan() -> list[Knob]:
    return _dit([lambda args: args["x"] * 3.0, lambda args: args["x"] * -3.0])


_FAMILY: dict[str, Callable[[], list[Knob]]] = {"comfy_unet": _unet, "comfy_flux": _flux, "comfy_wan": _wan}


# ---- around the network, its prompts and the call --------------------------------------------------------------------


def _around(name: str) -> list[Knob]:
    widgets = {"reuse_threshold": 3.0, "start_percent": 0.0, "end_percent": 1.0, "verbose": False}
    caches = [node(f"comfy_extras.nodes_easycache.{kind}Node", **widgets) for kind in ("EasyCache", "LazyCache")]
    function = with_method("set_model_unet_function_wrapper", function_wrapper)
    return [
        Knob("wrapper", "model", (None, wrapped("diffusion_model"), wrapped("apply_model"), function)),
        Knob("step cache", "model", (None, *caches), where={"steps": 6}),
    ]


def _prompts(name: str, patcher: Any) -> list[Knob]:
    file, matters = file_for(patcher, seed=5), {"cfg": 12.0}
    hooks = [hooked(file), hooked(file, strengths=(0.2, 1.0))]
    rows = [
        Knob("hook", "prompts", (None, *hooks), where=matters),
        Knob("area", "prompts", (None, left_half), where=matters),
    ]
    if name == "comfy_wan":  # it takes no ControlNet
        return rows
    control = control_of(name)
    spans = {(1.0, (0.0, 1.0)): 1, (0.4, (0.0, 1.0)): 1, (6.0, (0.2, 1.0)): 2}
    links = [
        lambda *both, at=at, seed=seed: chained(control(seed, *at))(*both)  # a fresh one for every prompt
        for at, seed in spans.items()
    ]
    return [*rows, Knob("ControlNet", "prompts", (None, *links), where={"steps": 4, **matters})]


_CALL = [
    Knob("size", "call", ({}, {"size": (16, 24)}, {"size": (24, 16)}, {"size": (20, 28)})),
    Knob("batch", "call", ({}, {"batch": 2}, {"batch": 3})),
    Knob("prompt length", "call", ({}, {"length": 20}, {"length": 77}), where={"cfg": 12.0}),
    Knob("CFG", "call", ({}, {"cfg": 1.0}, {"cfg": 12.0})),
    Knob("steps", "call", ({}, {"steps": 4})),
]
