# SPDX-License-Identifier: Apache-2.0
"""Nexfort's engine: diffusion backbones compiled region by region, for any size, with the weights as arguments.

Public names: `compile`, `compile_pipe`, `quantize_pipe`, `CompileConfig`, `Report`. Importing this package imports
nothing heavy and changes nothing; everything else is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .cache import inherited  # noqa: F401  it notes one variable before Inductor, once imported, writes it

if TYPE_CHECKING:
    from .compiled import compile
    from .config import CompileConfig
    from .hosts.diffusers import compile_pipe
    from .hosts.diffusers_quant import quantize_pipe
    from .report import Report

__version__ = "0.1.0"
__all__ = ["CompileConfig", "Report", "compile", "compile_pipe", "quantize_pipe"]

_HOMES = {
    "compile": ".compiled",
    "compile_pipe": ".hosts.diffusers",
    "quantize_pipe": ".hosts.diffusers_quant",
    "CompileConfig": ".config",
    "Report": ".report",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    from importlib import import_module

    return getattr(import_module(home, __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
