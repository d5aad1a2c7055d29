# SPDX-License-Identifier: Apache-2.0
"""ComfyUI: its models, VAEs and control nets compiled, on weights that it keeps, with its progress and its cancel.

`attach` and its like, which others import from here, lie in `model.py` and are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(import_module(".model", __name__), name)
