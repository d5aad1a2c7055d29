# SPDX-License-Identifier: Apache-2.0
"""Shadow: what a capture traces in a block's place, so that the block itself is never touched.

A copy of the module tree that shares every value with it and has attribute tables of its own. Its weights are exchanged
for the capture's, what its code reads is recorded, and what it stores on itself is thrown away with it, while other
threads go on calling the block.
"""

from __future__ import annotations

import collections
import copy
import functools
import inspect
import sys
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..guards.module_guards import METHOD
from ..guards.option_recorder import MISSING, Refused
from ..guards.scalar_inputs import Place, Strength, put
from ..modules.module_keys import OfTree, holds_module, is_by_identity, is_module, places
from ..modules.tree import ABSENT, CASTS_TO_INPUT, INTERNAL, Hidden, WeightSlots, is_shim, once_a_class
from .source_hashes import is_host_code

# attributes that this engine or torch puts on modules for the length of a capture or a call
_OURS = frozenset({"forward", "_compiled_call_impl", "call_super_init", "T_destination", "dump_patches"})
_OF_MODULES = vars(nn.Module)
_MARK = "_nexfort_shadow"  # (reads, path) in the attribute table of a shadow
_AT_BOUNDARY = "_nexfort_at_boundary"
_TABLES = ("__dict__", "_parameters", "_buffers", "_modules")
# with the copy of a module, the module's class, whether it is called as a module, and the arguments
AtBoundary = Callable[[nn.Module, type[nn.Module], bool, tuple[Any, ...], dict[str, Any]], Any]
Reads = dict[tuple[str, str], Any]


class Shadow:
    """A copy of a module tree.

    module: the copy of the root. reads: (path, attribute) -> value for every plain attribute that its code has read,
    MISSING for one that is not there, METHOD for a function that its class has.
    """

    def __init__(
        self,
        module: nn.Module,
        weights: list[torch.Tensor] | None = None,
        hidden: Hidden | None = None,
        strengths: Mapping[Place, Strength] | None = None,
        boundaries: Collection[str] = (),
        at_boundary: AtBoundary | None = None,
    ) -> None:
        """weights: the tensors to put in, in the order of WeightSlots; None: those of the module.

        hidden: id(submodule) -> attributes that it shows in the place of its own. strengths: what stands for numbers.
        boundaries: dotted names of modules, with those below them, whose weights stay what they are; a call of one of
        these is `at_boundary`'s.
        """
        hidden = hidden or {}
        self.reads: Reads = {}
        copies: dict[int, nn.Module] = {}
        for path, sub in module.named_modules():
            make = _boundary_class if path in boundaries else _recording_class
            kind = make(type(sub))
            copied = copies[id(sub)] = kind.__new__(kind)
            copied.__dict__[_MARK] = (self.reads, path)
        for sub in module.modules():
            own = copies[id(sub)].__dict__
            is_plain = sub is not module and own[_MARK][1] not in boundaries
            _fill(own, sub.__dict__, copies, () if is_plain else ("forward",))
            own[_AT_BOUNDARY] = at_boundary
            own.update(hidden.get(id(sub), {}))
            if own.pop(CASTS_TO_INPUT, False):
                _cast_weights_to_input(copies[id(sub)])
            for name in [name for name, value in own.items() if value is ABSENT]:
                del own[name]
        self._copies = {copy.__dict__[_MARK][1]: copy for copy in copies.values()}
        self._places = places(module).values()
        self.module = copies[id(module)]
        for (path, name, keys), strength in (strengths or {}).items():
            put(self.module.get_submodule(path).__dict__[name], keys, strength)
        if weights is not None:
            for (table, name), value in zip(WeightSlots(self.module, (), boundaries).slots, weights, strict=True):
                table[name] = value

    def named(self, key: Any) -> Any:
        """A key with the names of the modules that it is made of. Raises Refused for one without a name."""
        if type(key) is tuple:
            return tuple(map(self.named, key))
        if not is_module(key):
            return key
        kind, mark = type(key), key.__dict__.get(_MARK)
        if not is_by_identity(kind):
            raise Refused(f"it uses a {kind.__qualname__} as a key, which says itself what it is equal to")
        if mark is None:
            raise Refused(f"it uses a {kind.__qualname__} as a key that is none of its own modules")
        if mark[1] not in self._places:
            raise Refused(f"it uses a {kind.__qualname__} as a key that is one of its modules at two places")
        return OfTree(mark[1])

    def settle(self) -> None:
        """Its code has run. What it made itself is made again: that is no read.

        So is an attribute that was missing and is there now, and one that holds a size of the call.
        """
        for place in [place for place, value in self.reads.items() if _holds_size(value)]:
            del self.reads[place]
        for path, name in [place for place, value in self.reads.items() if value is MISSING]:
            made = self._copies[path]
            if name in made.__dict__ or name in made._buffers or name in made._parameters or name in made._modules:
                del self.reads[path, name]


def _holds_size(value: Any) -> bool:
    """Whether a value is a number of the trace, or a plain container with one.

    Not one that records what is read of it: a look into it would be a read.
    """
    if type(value) in (list, tuple, dict):
        return any(map(_holds_size, value.values() if isinstance(value, dict) else value))
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def path_of(copied: nn.Module) -> str:
    """The dotted name of what a copy stands for."""
    return str(copied.__dict__[_MARK][1])


def _cast_weights_to_input(layer: nn.Module) -> None:
    """Have a layer cast its weights to the dtype of what it is given, as its host's code does where they are leased."""
    plain = layer.__dict__.get("forward") or types.MethodType(type(layer).forward, layer)

    def forward(*args: Any, **kwargs: Any) -> Any:
        inputs = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        given = next((value.dtype for value in inputs if value.is_floating_point()), None)
        kept: dict[str, Any] = {}
        for name, weight in layer._parameters.items():
            if given is None or weight is None or is_traceable_wrapper_subclass(weight):
                continue
            if weight.is_floating_point() and weight.dtype != given:
                kept[name] = weight
        for name, weight in kept.items():
            layer._parameters[name] = weight.to(given)
        try:
            return plain(*args, **kwargs)
        finally:
            layer._parameters.update(kept)

    layer.__dict__["forward"] = forward  # no hook: a capture calls the forward of its block, which may be the layer


_CONTAINERS = (collections.OrderedDict, collections.defaultdict, collections.deque, types.SimpleNamespace)


def _fill(
    own: dict[str, Any], original: dict[str, Any], copies: dict[int, nn.Module], without: Collection[str]
) -> None:
    for name, value in list(original.items()):
        if name in without or (name == "forward" and is_shim(value)):
            continue  # it would run the block itself, or is not the block's own
        own[name] = dict(value) if name in ("_parameters", "_buffers") else _mapped(value, copies)


def _mapped(value: Any, copies: dict[int, nn.Module], depth: int = 4) -> Any:
    """A value with the copies in the place of the modules that it holds.

    What lies deeper, or in other objects, keeps the module itself; a graph that got a weight from there is refused.
    """
    if isinstance(value, nn.Module):
        return copies.get(id(value), value)
    if depth == 0:
        return value
    if type(value) in (list, tuple, set):  # containers of its own: code may keep what it computed in them
        return type(value)(_mapped(item, copies, depth - 1) for item in list(value))
    if type(value) is dict:
        return {_mapped_key(key, copies): _mapped(item, copies, depth - 1) for key, item in list(value.items())}
    if type(value) in _CONTAINERS:  # what a trace puts in must not be found there afterwards
        return copy.copy(value)
    if isinstance(value, types.MethodType) and id(value.__self__) in copies:
        return types.MethodType(value.__func__, copies[id(value.__self__)])
    if type(value) is functools.partial:
        function, args, words = (_mapped(part, copies, depth - 1) for part in (value.func, value.args, value.keywords))
        return functools.partial(function, *args, **words)
    return value


def _mapped_key(key: Any, copies: dict[int, nn.Module]) -> Any:
    """A key with the copies in the place of the modules that it is made of."""
    if type(key) is tuple and holds_module(key):
        return tuple(_mapped_key(part, copies) for part in key)
    return copies.get(id(key), key) if is_module(key) else key


@once_a_class
def _boundary_class(kind: type[nn.Module]) -> type[nn.Module]:
    """As `_recording_class`, for a module that carries code of others."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__[_AT_BOUNDARY](self, kind, False, args, kwargs)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__[_AT_BOUNDARY](self, kind, True, args, kwargs)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    recording: Any = _recording_class(kind)
    return type(kind.__name__, (recording,), {"forward": forward, "__call__": call, **names})


def _note_table(own: dict[str, Any], code: types.CodeType, *, whole: bool) -> None:
    """Code looks at the attributes of a module as at a dictionary: those that its strings name are read, found or not.

    whole: of the table of all attributes, what is there is read as well.
    """
    if _MARK not in own:
        return
    reads, path = own[_MARK]
    tables = (own, own["_parameters"], own["_buffers"], own["_modules"])
    asked = [text for text in code.co_consts if isinstance(text, str) and text.isidentifier()]
    for name in (*asked, *(own if whole else ())):
        if name in INTERNAL or name in _OURS or name in (_MARK, _AT_BOUNDARY):
            continue
        if name not in own and not any(name in table for table in tables):
            reads.setdefault((path, name), MISSING)
        elif whole and name in own and not isinstance(own[name], (torch.Tensor, nn.Module)):
            reads.setdefault((path, name), own[name])


@once_a_class
def _recording_class(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a module class that reports attribute reads, those that find nothing among them."""

    def __getattribute__(self: nn.Module, name: str) -> Any:
        value = kind.__getattribute__(self, name)
        if name in _TABLES and is_host_code(code := sys._getframe(1).f_code):
            _note_table(object.__getattribute__(self, "__dict__"), code, whole=name == "__dict__")
        if name not in INTERNAL and name not in _OURS and not name.startswith("__"):
            own = object.__getattribute__(self, "__dict__")
            is_weight = isinstance(value, torch.Tensor) or (isinstance(value, nn.Module) and name not in own)
            if not is_weight and _MARK in own:
                reads, path = own[_MARK]
                if name in own or not inspect.isroutine(value):
                    reads.setdefault((path, name), value)
                elif getattr(value, "__func__", value) is not _OF_MODULES.get(name):
                    reads.setdefault((path, name), METHOD)
        return value

    def __getattr__(self: nn.Module, name: str) -> Any:
        try:
            return kind.__getattr__(self, name)
        except AttributeError:
            own = object.__getattribute__(self, "__dict__")
            if _MARK in own and name not in INTERNAL and name not in _OURS and not name.startswith("__"):
                reads, path = own[_MARK]
                reads.setdefault((path, name), MISSING)
            raise

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {"__getattribute__": __getattribute__, "__getattr__": __getattr__, **names})
