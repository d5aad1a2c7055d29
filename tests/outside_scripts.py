# SPDX-License-Identifier: Apache-2.0
"""Modules of support/ under their own names, for scripts outside that have only this folder on their path."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

SUPPORT = str(Path(__file__).resolve().parent / "support")


def take(name: str) -> None:
    """Put the module of that name in support/ in the place of the one that calls this."""
    sys.path[:] = [SUPPORT, *(one for one in sys.path if one != SUPPORT)]
    del sys.modules[name]
    sys.modules[name] = importlib.import_module(name)
