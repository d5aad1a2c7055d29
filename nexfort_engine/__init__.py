# SPDX-License-Identifier: Apache-2.0
"""Nexfort's engine: diffusion backbones compiled region by region, for any size, with the weights as arguments.

Public names: `compile`, `compile_pipe`, `quantize_pipe`, `CompileConfig`, `Report`. Importing this package imports
nothing heavy and changes nothing; everything else is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .cache import startup_env  # noqa: F401  it notes one variable before Inductor, once imported, writes it

if TYPE_CHECKING:
    from .api import compile
    from .config.compile_config import CompileConfig
    from .hosts.diffusers.pipeline import compile_pipe
    from .hosts.diffusers.quantize import quantize_pipe
    from .reporting.report import Report

__version__ = "0.2.0"
__all__ = ["CompileConfig", "Report", "compile", "compile_pipe", "quantize_pipe"]

_HOMES = {
    "compile": ".api",
    "compile_pipe": ".hosts.diffusers.pipeline",
    "quantize_pipe": ".hosts.diffusers.quantize",
    "CompileConfig": ".config",
    "Report": ".reporting.report",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    from importlib import import_module

    return getattr(import_module(home, __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
