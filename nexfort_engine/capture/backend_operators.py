# SPDX-License-Identifier: Apache-2.0
"""Kernel libraries that pick a back end in Python: while a block is traced, such a call is the library's operator.

comfy_kitchen has a registry of back ends. Some of its functions call an operator, which asks the registry when it
runs. Others ask the registry at once and call the back end's Python code. A trace would walk through that code: on a
CPU its loops bind the block to one number of tokens, on a GPU it hands tensors without data to native code. The
operator computes the same, keeps sizes free, and picks the back end when the graph runs. So what the registry holds
now is nothing that the graph depends on.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident  # the plain one: a trace tells hosts' code another number
from typing import Any

import torch

_LIBRARY = "comfy_kitchen"
_PICK = "get_implementation"
_DTYPE_CODE = "dtype_code"  # how the operators' arguments end that name a dtype by its number
_NOTHING = (None, False, 0)  # of an argument that the operator lacks: it asks for nothing


@dataclass
class Picks:
    """The registry and its function, and whether that picked a back end itself for this thread."""

    names: tuple[Any, ...] = ()
    picked: bool = False

    @property
    def unread(self) -> tuple[Any, ...]:
        """What code names that ran, and no graph depends on."""
        return () if self.picked else self.names


@contextmanager
def backends_by_operators() -> Iterator[Picks]:
    """In the block, what this thread asks the registry for is the operator of the same name, where there is one."""
    found = sys.modules.get(f"{_LIBRARY}.registry")
    registry = getattr(found, "registry", None)
    original = getattr(registry, _PICK, None)
    if registry is None or not inspect.ismethod(original) or _PICK in vars(registry):
        yield Picks()
        return
    thread, inside, picks = get_ident(), False, Picks((registry, original.__func__))

    def pick(name: str, backend: str | None = None, kwargs: Mapping[str, Any] | None = None) -> Callable[..., Any]:
        operator, is_mine = None, get_ident() == thread and not inside
        if is_mine and backend is None:
            operator = getattr(getattr(torch.ops, _LIBRARY), name, None)
        if operator is None:
            picks.picked |= is_mine
            return original(name, backend, kwargs)  # type: ignore[no-any-return]

        def call(**given: Any) -> Any:
            nonlocal inside
            arguments = _for_operator(operator.default._schema, given)
            if arguments is None:
                picks.picked = True
                return original(name, backend, kwargs)(**given)
            inside = True  # the operator itself asks the registry
            try:
                return operator.default(**arguments)
            finally:
                inside = False

        return call

    setattr(registry, _PICK, pick)
    try:
        yield picks
    finally:
        delattr(registry, _PICK)


def cuda_missing(name: str) -> str | None:
    """Why an operator of the library is not computed by its CUDA kernels here; None where it is, or nothing has it."""
    registry = getattr(sys.modules.get(f"{_LIBRARY}.registry"), "registry", None)
    if registry is None:
        return None
    told = registry.list_backends().get("cuda", {})
    if not told.get("available") or told.get("disabled"):
        return f"{_LIBRARY} has no CUDA kernels here: {told.get('unavailable_reason') or 'they are switched off'}"
    return None if name in told.get("capabilities", ()) else f"{_LIBRARY}'s CUDA kernels have no {name}"


def _for_operator(schema: Any, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """The operator's arguments that say what a call of the Python function says; None where they cannot say it."""
    rest, found = dict(given), {}
    for argument in schema.arguments:
        if argument.name in rest:
            found[argument.name] = rest.pop(argument.name)
        elif argument.name.endswith(_DTYPE_CODE):
            dtypes = [name for name, value in rest.items() if isinstance(value, torch.dtype)]
            code = _codes().get(rest.pop(dtypes[0])) if len(dtypes) == 1 else None
            if code is None:
                return None
            found[argument.name] = code
        elif not argument.has_default_value():
            return None
    return found if all(any(value is one for one in _NOTHING) for value in rest.values()) else None


def _codes() -> Mapping[torch.dtype, int]:
    codes = getattr(sys.modules.get(_LIBRARY), "DTYPE_TO_CODE", None)
    return codes if isinstance(codes, dict) else {}
