# SPDX-License-Identifier: Apache-2.0
"""A tree of modules: where its weights lie, its structure, and what others hung on it that no artefact can stand for.

Weights are parameters, buffers and plain tensor attributes, all of them arguments of an artefact. What a block is
besides them is compared in `guards/module_guards.py`.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import repeat
from operator import contains
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

# nn.Module's own machinery; `training` is an ordinary attribute that dropout reads
INTERNAL = frozenset(nn.Module().__dict__) - {"training"}
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
Slot = tuple[dict[str, Any], str]
ABSENT = object()  # a hidden attribute that is not there at all
CASTS_TO_INPUT = "casts to input"  # among hidden attributes: the layer casts its weights to its input's dtype
Hidden = Mapping[int, Mapping[str, Any]]  # id(submodule) -> attributes that count in the place of its own
_NO_CODE = object()
PLAIN = (type(None), bool, int, float, str)  # values that code cannot change in their place


class WeightSlots:
    """Where a module tree's tensors live: dictionaries and names, so that a list of them costs 30 ns a weight.

    names: dotted names; parameters first, then buffers, then plain tensor attributes, in the tree's order. parameters:
    for each, whether it is one.
    """

    def __init__(self, module: nn.Module, besides: Collection[str] = (), without: Collection[str] = ()) -> None:
        """besides: names of tensors that are no weights. without: dotted names of modules whose weights do not count,
        with all below them.
        """
        self.names: list[str] = []
        self.slots: list[Slot] = []
        self.parameters: list[bool] = []
        for path, sub in modules_of(module, without):
            for table, name, _ in tensors_of(sub, besides):
                self.names.append(f"{path}.{name}" if path else name)
                self.slots.append((table, name))
                self.parameters.append(table is sub._parameters)
        # `map` over two lists takes half the time of a comprehension
        self._tables = [table for table, _ in self.slots]
        self._keys = [name for _, name in self.slots]

    def read(self) -> list[torch.Tensor]:
        """The tensors as they are now. A slot that lost its tensor gives None."""
        return list(map(dict.get, self._tables, self._keys))  # type: ignore[arg-type]


class Seen:
    """Which tensors a list held, by identity. One that is gone is never taken for a later one at its address.

    It keeps none of them alive.
    """

    def __init__(self, tensors: Iterable[torch.Tensor | None] = ()) -> None:
        tensors = list(tensors)
        ids = self._ids = list(map(id, tensors))
        self._watch = [weakref.ref(t, lambda _: ids.clear()) for t in tensors if t is not None]

    def again(self, tensors: list[Any]) -> bool:
        """Whether another list holds the same tensors, each in its place."""
        return list(map(id, tensors)) == self._ids


def tensors_of(module: nn.Module, besides: Collection[str] = ()) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """The tensors of one module: the dictionary that each lies in, its name there, itself."""
    tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, module.__dict__)
    for table in tables:
        for name, value in list(table.items()):  # a block's `forward` comes and goes with other threads' steps
            # by name first: what is asked of a class takes four times as long, and most are torch's own
            if name not in INTERNAL and issubclass(type(value), torch.Tensor) and name not in besides:
                yield table, name, value


def modules_of(module: nn.Module, without: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a tree by their dotted names, without these and what is below them."""
    below = tuple(f"{path}." for path in without)
    for path, sub in module.named_modules():
        if not below or not f"{path}.".startswith(below):
            yield path, sub


def structure(
    module: nn.Module,
    dtypes: Mapping[int, torch.dtype] | None = None,
    besides: Collection[str] = (),
    without: Collection[str] = (),
) -> list[list[Any]]:
    """Classes and weights of a module tree: [path, class, [[name, shape, dtype], ...]] a submodule, JSON-able.

    dtypes: place in the order of WeightSlots -> the dtype in which that weight is used, if it is another one. besides,
    without: as for WeightSlots; of the weights of the latter shapes and dtypes count all the same.
    """
    rows: list[list[Any]] = []
    dtypes, place = dtypes or {}, itertools.count()
    counted = {id(sub) for _, sub in modules_of(module, without)}
    for path, sub in module.named_modules():
        counts = id(sub) in counted
        weights = [
            [name, list(value.shape), str(dtypes.get(next(place), value.dtype) if counts else value.dtype)]
            for _, name, value in tensors_of(sub, besides)
        ]
        rows.append([path, class_name(type(sub)), weights])
    return rows


def class_name(kind: type) -> str:
    """Where a class is found. One that torch made for a module with parametrisations is called after its base."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    return f"{name}({class_name(kind.__bases__[0])})" if is_made(kind) else name


def is_made(kind: type) -> bool:
    """Whether torch made a class for one module, whose weights it computes by other modules. The class holds both."""
    return kind.__module__ == parametrize.__name__ and kind.__name__ not in vars(parametrize)


def foreign(module: nn.Module) -> str | None:
    """Why a module tree cannot be captured as it is now, or None: hooks, parametrisations, replaced forwards."""
    return next((found for path, sub in module.named_modules() if (found := own_foreign(sub, path))), None)


def own_foreign(module: nn.Module, path: str = "") -> str | None:
    """As `foreign`, for what a module itself carries. path: where it is, for the reason."""
    at = f" on {path}" if path else ""
    if compiled_elsewhere(module):
        return f"code of torch.compile{at}, which compiled it already"
    replaced = replaced_forward(module)
    if replaced is not None:
        return f"a replaced forward{at} ({getattr(replaced, '__qualname__', type(replaced).__qualname__)})"
    for table in HOOKS:
        if module.__dict__.get(table):
            return f"a forward hook{at}"
    return None


def compiled_elsewhere(module: nn.Module) -> bool:
    """Whether torch.compile compiled a module: as a wrapper around it, or in its place (`module.compile()`)."""
    if module.__dict__.get("_compiled_call_impl") is not None:
        return True
    # Another thread may be importing it (preload.py); then no module was wrapped by it yet.
    wrapper = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    return wrapper is not None and isinstance(module, wrapper)


def once_a_class(make: Callable[..., Any]) -> Callable[..., Any]:
    """Have what is made of a class be made once, but where torch made the class for one module.

    Such a class holds its module, so what is kept by it would hold the weights of models that are gone.
    """
    cached = functools.cache(make)

    @functools.wraps(make)
    def made(kind: type, *more: Any) -> Any:
        return (make if is_made(kind) else cached)(kind, *more)

    return made


def mark_shim(function: Any, module: nn.Module) -> None:
    """Mark a function as the engine's own stand-in for a module's forward."""
    function.nexfort_shim, function.nexfort_of = function.__code__, module
    function.__wrapped__ = types.MethodType(type(module).forward, module)  # hooks ask for its signature


def is_shim(function: Any) -> bool:
    """Whether a forward is one of the engine's own: `functools.wraps` copies attributes of a function, not its code."""
    return getattr(function, "nexfort_shim", None) is getattr(function, "__code__", _NO_CODE)


def replaced_forward(module: nn.Module) -> Any:
    """Another forward that somebody put on the module itself, or None.

    The engine's shims are none: inside a region they do nothing. Neither is the class's own forward bound to this
    very module, which is what code that puts a forward back leaves behind.
    """
    forward = module.__dict__.get("forward")
    if forward is None or is_shim(forward):
        return None
    if getattr(forward, "__self__", None) is module and getattr(forward, "__func__", None) is type(module).forward:
        return None
    return forward


def is_carrier(module: nn.Module) -> bool:
    """Whether a module itself carries a hook or another forward than its class's."""
    own = module.__dict__
    return any(own[table] for table in HOOKS) or replaced_forward(module) is not None


class Tree:
    """How some modules hang together: their submodules, hooks, and forwards put on them. Asked on every call: flat."""

    def __init__(
        self, modules: list[nn.Module], own_forwards: list[nn.Module], carriers: Collection[nn.Module] = ()
    ) -> None:
        """modules: whose submodules count. own_forwards: which must run their class's forward, without hooks.

        carriers: which must have a hook, or another forward than their class's.
        """
        children = [(module._modules, name) for module in modules for name in module._modules]
        self._parents, self._names = [table for table, _ in children], [name for _, name in children]
        self._children = [table.get(name) for table, name in children]
        self._hooks = [module.__dict__[table] for module in own_forwards for table in HOOKS]
        self._watched, self._carriers = own_forwards, list(carriers)
        self._tables = [module.__dict__ for module in own_forwards]
        self._modules = list({id(module): module for module in (*modules, *own_forwards)}.values())
        self._classes = list(map(type, self._modules))

    @property
    def patched(self) -> bool:
        """Whether one of them has a hook now, or another forward than its class's, and is none of the carriers."""
        if any(self._hooks) or not all(map(is_carrier, self._carriers)):
            return True
        if not any(map(contains, self._tables, repeat("forward"))):
            return False
        return any(replaced_forward(module) is not None for module in self._watched)

    def unchanged(self) -> bool:
        """Whether no submodule was exchanged since or got another class, and nothing is patched."""
        if self.patched or [*map(type, self._modules)] != self._classes:  # 25 nanoseconds a module
            return False
        return list(map(dict.get, self._parents, self._names)) == self._children


Known = dict[tuple[int, int], tuple[Any, list[nn.Module]]]  # by id and depth: the value, and what was found in it


def modules_in(value: Any, depth: int = 3, known: Known | None = None) -> list[nn.Module]:
    """The modules that a value is, or that plain containers and objects hold: no submodules of the block.

    What raises when it is looked at holds none. known: what was looked into before, for many values that share parts.
    """
    known = {} if known is None else known
    found = known.get((id(value), depth))
    if found is None:
        try:
            modules = list(_modules_in(value, depth, known))
        except Exception:
            modules = []
        found = known[id(value), depth] = value, modules
    return found[1]


def _modules_in(value: Any, depth: int, known: Known) -> Iterator[nn.Module]:
    parts: Iterable[Any] = ()
    if isinstance(value, nn.Module):
        yield value
    elif depth > 0 and isinstance(value, (list, tuple, dict)):
        parts = value.values() if isinstance(value, dict) else value
    elif depth > 0 and type(value) not in PLAIN and not isinstance(value, type) and not inspect.isroutine(value):
        parts = list((fields_of(value) or {}).values())
    for part in parts:
        if type(part) not in PLAIN:
            yield from modules_in(part, depth - 1, known)


def fields_of(value: Any) -> dict[str, Any] | None:
    """The attribute table of an object; None where it has none."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None
