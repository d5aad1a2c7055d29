# SPDX-License-Identifier: Apache-2.0
"""ComfyUI: its models, VAEs and control nets compiled, on weights that it keeps, with its progress and its cancel.

`attach` and its like, which others import from here, lie in `model.py` and are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__") or find_spec(f"{__name__}.{name}") is not None:
        raise AttributeError(name)  # of a module of this package: the import that asks goes on and loads it
    return getattr(import_module(".model", __name__), name)
