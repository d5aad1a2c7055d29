# SPDX-License-Identifier: Apache-2.0
"""Modules loaded from a path, under a name of their own or one that others have as well. No test lives here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load(name: str, path: Path) -> ModuleType:
    """A file, or the package in a folder, as a new module. Known by `name` unless another module is."""
    spec = importlib.util.spec_from_file_location(name, path / "__init__.py" if path.is_dir() else path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = made  # dataclasses and relative imports look it up
    try:
        spec.loader.exec_module(made)
    finally:
        if before is not None:
            sys.modules[name] = before
    return made
