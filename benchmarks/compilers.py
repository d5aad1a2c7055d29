# SPDX-License-Identifier: Apache-2.0
"""What --compiler means: a pipeline as it is, through Nexfort, or its networks through torch.compile."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.unusable import Unusable

COMPILERS = ("none", "nexfort", "compile", "compile-max-autotune")
DEFAULT_CONFIG = '{"mode": "O2", "memory_format": "channels_last"}'
DEFAULT_QUANTIZE = '{"quant_type": "fp8_e4m3_e4m3_dynamic"}'
_TORCH_PARTS = ("unet", "transformer", "transformer_2", "controlnet", "prior")


@dataclass
class Compiled:
    """A pipeline to measure. reports: part -> Nexfort's; inactive: what was asked for and has no effect.

    back: gives the pipeline as it was, with the same weights.
    """

    pipe: Any
    back: Callable[[], Any]
    reports: dict[str, Any] = field(default_factory=dict)
    inactive: list[dict[str, str]] = field(default_factory=list)

    def mark(self) -> dict[str, Any]:
        """A moment for `made_since`."""
        return {part: report.mark() for part, report in self.reports.items()}

    def made_since(self, marks: dict[str, Any]) -> dict[str, Any]:
        """Artefacts compiled and loaded after a mark, further variants, and blocks that ran eager, in all parts."""
        new = {part: report.since(marks[part]) for part, report in self.reports.items()}
        return {
            "compiled": sum(one["artefacts_compiled"] for one in new.values()),
            "loaded": sum(one["artefacts_loaded"] for one in new.values()),
            "variants": [f"{p}: {row['region']}: {row['reason']}" for p, n in new.items() for row in n["variants"]],
            "eager": [f"{p}: {row['region']}: {row['reason']}" for p, n in new.items() for row in n["eager"]],
        }


def parse_config(text: str | None) -> Any:
    """Nexfort's config from --compiler-config. Raises Unusable."""
    from nexfort_engine import CompileConfig

    try:
        return CompileConfig.parse(text or DEFAULT_CONFIG)
    except ValueError as error:
        raise Unusable(f"--compiler-config: {error}") from error


def parse_quantize(text: str | None, submodules: str | None) -> dict[str, Any]:
    """Keywords of `quantize_pipe` from --quantize-config and --quant-submodules-config-path. Raises Unusable."""
    from nexfort_engine.hosts.diffusers.quantize import measured_layers
    from nexfort_engine.quant.quant_types import quant_type

    try:
        found = json.loads(text or DEFAULT_QUANTIZE)
    except json.JSONDecodeError as error:
        raise Unusable(f"--quantize-config is not JSON: {error}; expected for example {DEFAULT_QUANTIZE}") from error
    known = {"quant_type", "top_percentage", "everything"}
    if not isinstance(found, dict) or set(found) - known or "quant_type" not in found:
        raise Unusable(
            f"--quantize-config is {text}; expected quant_type and, if wanted, top_percentage and everything: "
            f"{DEFAULT_QUANTIZE}"
        )
    if not isinstance(found.get("everything", True), bool):
        raise Unusable(f"--quantize-config has everything: {found['everything']!r}; expected true or false")
    _checked("--quantize-config", quant_type, found["quant_type"])
    share = found.get("top_percentage", 90)
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 100:
        raise Unusable(f"--quantize-config has the top_percentage {share!r}; expected a number from 0 to 100")
    if submodules:
        file = Path(submodules).expanduser()
        _checked("--quant-submodules-config-path", measured_layers, file)
        found["quant_submodules_config_path"] = str(file)
    return found


def _checked(flag: str, check: Callable[[Any], Any], value: Any) -> None:
    try:
        check(value)
    except ValueError as error:
        raise Unusable(f"{flag}: {error}") from error


def quantized(pipe: Any, options: dict[str, Any], call: dict[str, Any] | None = None) -> Any:
    """A pipeline whose networks are quantised, and `.quantisation`, their plan. Raises Unusable.

    call: keywords that it will be called with: their sizes say which layers pay.
    """
    import nexfort_engine

    try:
        return nexfort_engine.quantize_pipe(pipe, **options, **({"call": call} if call is not None else {}))
    except ValueError as error:
        raise Unusable(f"--quantize: {error}") from error


def apply(pipe: Any, compiler: str, config: Any, fuse: bool) -> Compiled:
    """The pipeline through a compiler. Nothing is compiled before its first run."""
    if compiler == "none":
        return Compiled(pipe, lambda: pipe)
    if compiler == "nexfort":
        return _nexfort(pipe, config, fuse)
    return _torch(pipe, "max-autotune-no-cudagraphs" if compiler == "compile-max-autotune" else None)


def _nexfort(pipe: Any, config: Any, fuse: bool) -> Compiled:
    import nexfort_engine

    compiled = nexfort_engine.compile_pipe(pipe, options=config, fuse_qkv_projections=fuse)

    def back() -> Any:
        for part in ("unet", "transformer", "vae"):
            net = getattr(pipe, part, None)
            if net is not None and any(getattr(layer, "fused_projections", False) for layer in net.modules()):
                net.unfuse_qkv_projections()
        return pipe

    inactive = {row["token"]: row for report in compiled.reports.values() for row in report.as_dict()["inactive"]}
    return Compiled(compiled, back, compiled.reports, list(inactive.values()))


def _torch(pipe: Any, mode: str | None) -> Compiled:
    """The networks of each step; without torch's CUDA graphs, whose results schedulers that look back would lose."""
    import torch

    before = {part: getattr(pipe, part) for part in _TORCH_PARTS if getattr(pipe, part, None) is not None}
    for part, net in before.items():
        setattr(pipe, part, torch.compile(net, mode=mode))

    def back() -> Any:
        for part, net in before.items():
            setattr(pipe, part, net)
        return pipe

    return Compiled(pipe, back)
