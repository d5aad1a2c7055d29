# SPDX-License-Identifier: Apache-2.0
"""Mode and options, as `options.py` reads them -> one frozen `CompileConfig`.

A config says what the user asked for and what of it changes an artefact, and translates to Inductor's settings by name.
It does not import torch or Inductor, changes no setting of the process, and decides nothing about a model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .option_catalogue import ON, OPTION_ROWS, STANDARD, no_effect
from .options import (
    DEFAULT_MODE,
    MEMORY_FORMATS,
    OPTIONS,
    TOKENS,
    as_mapping,
    check_bool,
    check_key,
    check_name,
    pairs_of,
    tokens_of,
)
from .pass_catalogue import PASSES

# What the composite tokens stand for. cache-all is always on: the engine has no mode without its disk cache.
_EXPANSION: dict[str, tuple[str, ...]] = {
    "O2": ("max-optimize", "cache-all"),
    "O3": ("O2", "max-optimize", "cache-all", "low-precision"),
}
_SEARCHING = ("max-autotune", "max-optimize")
_FAST = ("jit", "disable-runtime-fusion")
_PROFILES = ("O2", "O3", *_SEARCHING, *_FAST)

_LOWERING_TOKENS = ("low-precision",)

_UNTOLD = (
    "nobody says when weights of this network change, so nothing that is made of them can be kept; it is for ComfyUI's "
    "MODEL"
)


@dataclass(frozen=True)
class CompileConfig:
    """What to compile for: frozen, hashable, normalised on construction.

    Make one with `CompileConfig.parse`. `tokens` are sorted and unique, `options` sorted pairs.
    """

    tokens: tuple[str, ...] = (DEFAULT_MODE,)
    dynamic: bool = True
    memory_format: str | None = None
    fullgraph: bool = False
    disable: bool = False
    options: tuple[tuple[str, object], ...] = ()
    has_weight_versions: bool = True  # whether the host says when weights change; set by `without_weight_versions`

    def __post_init__(self) -> None:
        if isinstance(self.tokens, str):
            raise ValueError(f"tokens is the text {self.tokens!r}; expected a tuple, or CompileConfig.parse(text)")
        for token in self.tokens:
            check_name(token, TOKENS, "mode token")
        for key in ("dynamic", "fullgraph", "disable"):
            check_bool(getattr(self, key), key)
        if self.memory_format is not None:
            check_name(self.memory_format, MEMORY_FORMATS, "memory_format")
        values = dict(self.options)
        for name, value in values.items():
            check_name(name, OPTIONS, "option")
            check_bool(value, f"option {name!r}")
        object.__setattr__(self, "tokens", tuple(sorted(set(self.tokens))) or (DEFAULT_MODE,))
        object.__setattr__(self, "options", tuple(sorted(values.items())))

    @classmethod
    def parse(
        cls,
        options: str | Mapping[str, Any] | CompileConfig | None = None,
        *,
        dynamic: bool | None = None,
    ) -> CompileConfig:
        """Read a mapping, JSON text, a bare mode such as "max-autotune:cudagraphs", or nothing (O2).

        The keyword `dynamic` holds unless `options` says `dynamic` itself. The caller's mapping is only read.
        Raises ValueError naming what was found, the nearest valid word and all valid words.

        >>> CompileConfig.parse("max-autotune:O2").mode
        'O2:max-autotune'
        >>> CompileConfig.parse({"mode": "O3", "options": {"quant.attention": False}}).option("quant.attention")
        False
        """
        if isinstance(options, CompileConfig):
            return options
        given = as_mapping(options)
        fields: dict[str, Any] = {}
        for key, value in given.items():
            check_key(key)
            if value is not None:  # null means "not given": torch.compile users write dynamic=None
                fields[key] = value
        if dynamic is not None:
            fields.setdefault("dynamic", dynamic)
        if "mode" in fields:
            fields["tokens"] = tokens_of(fields.pop("mode"))
        if "memory_format" in fields:
            # str() turns torch.channels_last into "torch.channels_last" without importing torch here
            name = str(fields["memory_format"])
            plain = name.removeprefix("torch.")
            fields["memory_format"] = plain if plain in MEMORY_FORMATS else name
        if "options" in fields:
            fields["options"] = pairs_of(fields["options"])
        return cls(**fields)

    @property
    def mode(self) -> str:
        """The canonical mode text: sorted, without duplicates."""
        return ":".join(self.tokens)

    def without_weight_versions(self) -> CompileConfig:
        """This config where nobody says whether weights changed, so that no result may be kept from call to call."""
        return replace(self, has_weight_versions=False)

    def without_waiting(self) -> CompileConfig:
        """This config where nobody waits for artefacts, unless its user says whether to, or they cannot be made so."""
        name = "compile.background"
        if self.option(name) is not None or no_effect(self, name, True):
            return self
        return replace(self, options=(*self.options, (name, True)))

    @property
    def profile(self) -> str:
        """How much compile time to spend: "search" (max-autotune), "fast" (jit) or "standard".

        A max-* token beside jit wins: who asks for a search does not also mean the fastest compile.
        """
        if "max-autotune" in self.tokens:
            return "search"
        if "max-optimize" not in self.tokens and any(token in self.tokens for token in _FAST):
            return "fast"
        return "standard"

    def has(self, token: str) -> bool:
        """Whether `token` is asked for, directly or through O2 and O3. Modifiers alone count as O2."""
        check_name(token, TOKENS, "mode token")
        return token in self._effective()

    def _effective(self) -> frozenset[str]:
        asked = set(self.tokens)
        if not asked.intersection(_PROFILES):
            asked.add(DEFAULT_MODE)
        for token in tuple(asked):
            asked.update(_EXPANSION.get(token, ()))
        if self.profile == "fast":
            asked.discard("max-optimize")  # "O2:jit" asks for the cheapest compile, not for every fusion
        return frozenset(asked)

    def option(self, name: str, default: bool | None = None) -> bool | None:
        """The value of a dotted option, or `default` where the user gave none."""
        check_name(name, OPTIONS, "option")
        return dict(self.options).get(name, default)  # type: ignore[return-value]

    def is_on(self, name: str) -> bool:
        """Whether an option is on: as the user says, or by its default. One that is left to torch is off."""
        default = OPTION_ROWS[name].default
        return self.option(name, default == ON or (default == STANDARD and self.profile != "fast")) is True

    @property
    def step_graphs(self) -> bool:
        """Whether whole steps are replayed as CUDA graphs: on, but in the fast profile, unless the user says."""
        named = "cudagraphs" in self.tokens and self.option("triton.cudagraphs") is None
        return named or self.is_on("triton.cudagraphs")

    @property
    def prompt_once(self) -> bool:
        """Whether what is made of a prompt is a part by itself, computed once where the host says what a prompt is."""
        return self.is_on("compile.prompt_once")

    @property
    def background(self) -> bool:
        """Whether steps run eager while their artefacts are made.

        Not with dynamic off, when they come one by one, and not where kernels are timed, which wants the device alone.
        """
        return self.dynamic and self.profile != "search" and self.is_on("compile.background")

    def as_dict(self) -> dict[str, object]:
        """Plain data that JSON can hold; `parse` of it gives this config back."""
        return {
            "mode": self.mode,
            "dynamic": self.dynamic,
            "memory_format": self.memory_format,
            "fullgraph": self.fullgraph,
            "disable": self.disable,
            "options": dict(self.options),
        }

    def inactive(self) -> list[dict[str, str]]:
        """What was asked for and has no effect, with the reason: tokens first, then options."""
        found = []
        if "freezing" in self.tokens and not self.has_weight_versions:
            found.append(("freezing", _UNTOLD))
        elif "freezing" in self.tokens and not self.keeps:
            found.append(("freezing", "quant.keep_weights is off, so nothing that is made of weights is kept"))
        if self.profile != "fast":
            winner = next((token for token in _SEARCHING if token in self.tokens), "")
            reason = f"{winner} asks for the opposite of the fast-compile profile and wins"
            found += [(token, reason) for token in self.tokens if token in _FAST]
        reasons = [(name, no_effect(self, name, value is True)) for name, value in self.options]
        found += [(name, reason) for name, reason in reasons if reason]
        return [{"token": token, "reason": reason} for token, reason in found]

    def lowering_key(self, *, images: bool = True) -> str:
        """Canonical text of only what changes an artefact; equal keys may share artefacts.

        images: for a block that takes images, the only kind whose weights are laid out.
        Token order, `disable`, `fullgraph`, run-time flags (cuDNN benchmark) and whatever is inactive are
        left out.
        """
        asked = self._effective()
        options = {
            name: value
            for name, value in self.options
            if name in OPTION_ROWS and OPTION_ROWS[name].shapes and not no_effect(self, name, value is True)
        }
        if not options.get("quant.int8"):
            options.pop("quant.int8", None)
        parts = {
            "profile": self.profile,
            "optimize": "max-optimize" in asked,
            "precision": [t for t in _LOWERING_TOKENS if t in asked],
            "weights": [self.keeps, images and self.takes_copies],
            "dynamic": self.dynamic,
            "layout": "free" if self.lays_out else "contiguous",
            "prompt": "once" if self.prompt_once else "in each step",
            "options": options,
        }
        return json.dumps(parts, sort_keys=True, separators=(",", ":"))

    @property
    def lays_out(self) -> bool:
        """Whether lowering chooses how images lie inside the regions, and between them channels are innermost."""
        return self.memory_format != "contiguous_format"

    @property
    def keeps(self) -> bool:
        """Whether what is computed of weights alone is kept beside them, where there is room; lowering takes it out."""
        asked = self.has("low-precision") or (self.has_weight_versions and self.has("freezing"))
        return asked and self.is_on("quant.keep_weights")

    @property
    def takes_copies(self) -> bool:
        """Whether lowering takes out convolutions' weights as they are laid out: kept, or in the place of the others.

        Not where nobody says when weights change: made in each call, all of a block's would lie beside them.
        """
        return self.has_weight_versions and self.lays_out and self.is_on("quant.keep_weights")

    def lowering_options(self, device_type: str) -> dict[str, object]:
        """All that lowering with this config on "cuda" or "cpu" depends on: Inductor's settings, and the engine's own.

        The latter begin with "nexfort.", one for each pass of the catalogue.
        """
        found = self.inductor_options(device_type)
        for one in PASSES:
            found[one.switch] = one.is_on(self, device_type)
        return found

    def inductor_options(self, device_type: str) -> dict[str, object]:
        """Names and values for `torch._inductor.config`, to lower with this config on "cuda" or "cpu".

        Everything the profile depends on is written out, so that an environment variable of the user
        (TORCHINDUCTOR_MAX_AUTOTUNE=1) cannot make an artefact that its key does not describe.
        """
        on_gpu = device_type != "cpu"
        search = self.profile == "search"
        found: dict[str, object] = {
            "freezing": False,  # Inductor's inlines weights, and every LoRA would be a new artefact
            "triton.cudagraphs": False,  # a graph around one region would copy its weights in on each call
            "max_autotune": search,
            "max_autotune_pointwise": search and on_gpu,
            "max_autotune_gemm": search,
            "coordinate_descent_tuning": search and on_gpu and self.has("max-optimize"),
        }
        if search:
            # DEFAULT, not EXHAUSTIVE: the unbounded search took 20 to 40 minutes on a large UNet
            found["max_autotune_gemm_search_space"] = "DEFAULT"
            found["max_autotune_gemm_backends"] = "ATEN,TRITON" if on_gpu else "ATEN,CPP"
            found["max_autotune_conv_backends"] = "ATEN,TRITON" if on_gpu else "ATEN"
            epilogue = self.option("inductor.optimize_linear_epilogue")
            if epilogue is not None:
                found["epilogue_fusion"] = epilogue
        if on_gpu:
            # Otherwise one launch configuration a kernel, and nothing is timed: what timing picks differs from run to
            # run and with it the last bits of sums; it holds for the sizes at hand only; and it needs the device.
            found["triton.autotune_pointwise"] = search
            found["dynamic_scale_rblock"] = search
            found["shape_padding"] = search
            # the setting above leaves small reductions several; this takes one of them by rule
            found["test_configs.force_filter_reduction_configs"] = not search
        # Inductor's own heuristic gives up on dynamic sizes, which is every artefact of ours. Channels innermost inside
        # the regions: SDXL at 1024x1024 took 37.2 ms a step so, 39.8 otherwise (H200, torch 2.11, 2026-11).
        found["layout_optimization"] = self.lays_out
        found["force_layout_optimization"] = self.lays_out and on_gpu
        return found

    def backend_flags(self) -> dict[str, bool]:
        """Settings to hold while the model runs, as keywords for `process_settings.backend_scope`."""
        found = {row.held: self.option(name) for name, row in OPTION_ROWS.items() if row.held}
        if found["conv_benchmark"] is None and "benchmark" in self.tokens:
            found["conv_benchmark"] = True
        return {name: value is True for name, value in found.items() if value is not None}
