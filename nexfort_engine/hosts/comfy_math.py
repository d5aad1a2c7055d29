# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's own operators (comfy-kitchen) as the plain code that it has for devices without its kernels."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

_PACKAGE = "comfy_kitchen"
# what changes none of its arguments and is bound by memory, so that fusing it pays
_NAMES = (
    *("apply_rope", "apply_rope1", "apply_rope_split_half", "apply_rope_split_half1"),
    *("rms_rope", "rms_rope1", "rms_rope_split_half", "rms_rope_split_half1"),
    *("adaln", "rms_adaln"),
)


@functools.cache
def math() -> Mapping[str, Callable[..., Any]]:
    """Operator -> function. Empty where the package is missing, or keeps its plain code elsewhere."""
    try:
        plain = importlib.import_module(f"{_PACKAGE}.backends.eager")
    except ImportError:
        return {}
    return {f"{_PACKAGE}::{name}": getattr(plain, name) for name in _NAMES if hasattr(plain, name)}
