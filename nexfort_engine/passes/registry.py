# SPDX-License-Identifier: Apache-2.0
"""Passes: a captured graph written differently, so that Inductor makes better kernels of it. Each gives equal numbers,
but for what is rounded less often.

A pass is a function of a graph that says how often it found what it is for, has a file of its own, and has a row in
`config/pass_catalogue.py`. What it puts in is plain code there, run on the graph's own nodes (`graph/fx_builder.py`),
so that reading that code is reading what runs. Low precision, which does not give equal numbers, is in
low_precision.py and low_precision_attention.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

from torch.fx import GraphModule

from ..config.pass_catalogue import PASSES, PREFIX
from .group_norm import LaidOut

_ENGINE = __name__.partition(".")[0]


def _loaded(package: str, name: str) -> Any:
    """A function by its "file:function" in a package."""
    file, _, function = name.partition(":")
    return getattr(import_module(f"{package}.{file}"), function)


# the rewrites of graphs, by the names of their passes, in the order in which they run
REWRITES: dict[str, Callable[[GraphModule], int]] = {
    one.name: _loaded(__package__, one.rewrite) for one in PASSES if one.rewrite
}


def split(options: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """The engine's own switches, without their prefix, and Inductor's settings."""
    own = {name.removeprefix(PREFIX): value for name, value in options.items() if name.startswith(PREFIX)}
    return own, {name: value for name, value in options.items() if not name.startswith(PREFIX)}


def register(own: Mapping[str, object]) -> None:
    """Have the operators there that code lowered with these switches calls by name."""
    for one in PASSES:
        if one.operator and own.get(one.name):
            _loaded(_ENGINE, one.operator)()


def laid_out(options: Mapping[str, object]) -> AbstractContextManager[object]:
    """Inside the block eager results lie in memory as those of graphs that are lowered with these settings."""
    return LaidOut() if split(options)[0].get("group_norm") else nullcontext()
