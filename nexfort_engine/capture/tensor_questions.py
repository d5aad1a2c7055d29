# SPDX-License-Identifier: Apache-2.0
"""Code of the host that asks a tensor for more than sizes, or about modes, is answered as its call would answer it.

The trace itself runs without gradients and outside of inference mode: under that its tensors could not be written to.
Its tensors lie as artefacts take them, have no attributes, and each is an object of its own. So what is asked about a
tensor of the call is a guard (guards/tensor_answers.py). How one lies that the block computes follows from how those
of the call lie; code that asks for it is compiled for calls whose tensors lie as artefacts take them.
"""

from __future__ import annotations

import builtins
import dis
import enum
import functools
import os
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from threading import get_ident  # the plain one: hosts' code is told another number meanwhile (thread_number.py)
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from ..guards.option_guards import json_path
from ..guards.option_recorder import MISSING, Path, Refused
from ..guards.tensor_answers import (
    GIVEN,
    IS_PARAMETER,
    LIES,
    MODE,
    MODES,
    NAMES,
    OPTION,
    ORDER,
    SAME,
    WEIGHT,
    Answers,
    Row,
    answer,
    attribute,
)
from ..modules.tree import PLAIN, fields_of
from ..system.process_settings import replaced
from .side_effects import ask_types
from .source_hashes import is_host_code, module_of_code

_MISSING = "__getattr__"  # a method that Python asks for what an object lacks
_INFERENCE = "is_inference_mode_enabled"
_Tensor: Any = torch.Tensor
_OF_TENSORS: dict[Any, str] = {
    _Tensor.requires_grad.__get__: "requires_grad",
    _Tensor.is_inference: "is_inference",
    _Tensor.is_leaf.__get__: "is_leaf",
    **{getattr(_Tensor, name): name for name in ("is_conj", "is_neg", "is_pinned", "is_shared")},
}
_OF_MEMORY = (_Tensor.is_contiguous, _Tensor.stride, _Tensor.storage_offset, _Tensor.dim_order)
# what a copy, or the tensor of a trace, has another one of
_OF_ITSELF: dict[Any, str] = {
    **{getattr(_Tensor, name).__get__: name for name in ("_version", "_base", "grad_fn", "grad")},
    **{getattr(_Tensor, name): name for name in ("_is_view", "data_ptr", "untyped_storage", "is_set_to")},
}
_LOADS = ("LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD")
_ASK_FOR_IDENTITY = ("id", "is_", "is_not", "hash", "__hash__")
_COPIED = (list, dict, set)
_FIXED = (*PLAIN, object, torch.dtype, torch.device, torch.layout, torch.memory_format)
_METHODS = tuple(os.path.join("torch", name) for name in ("_tensor.py", "overrides.py"))
_CONSTANTS = ("LOAD_CONST", "LOAD_SMALL_INT", "LOAD_COMMON_CONSTANT")
LOOKS_AT_MEMORY = "its code asks how a tensor lies in memory, and those that it is given lie in a way of their own"
OF_ITSELF = "its code asks a tensor for {}, which compiled code cannot hold"
HAS_ATTRIBUTES = "its code asks for the attribute {} of a tensor, which compiled code cannot hold"
SETS_ATTRIBUTES = "it sets the attribute {} of a tensor, which compiled code cannot do"
COMPARES = "it compares which of its tensors are one and the same, and some are"
COMPARES_OTHERS = "it compares which of the objects that it is given are one and the same"


class TensorQuestions(TorchFunctionMode):
    """Answers for a call, and notes what was asked.

    images: whether what it is given was laid out with channels innermost for it. refused: why no artefact can hold an
    answer, also where code catches what is raised then.
    """

    refused: str | None = None

    def __init__(self, answers: Answers, *, images: bool = False) -> None:
        super().__init__()
        self._answers, self._images = answers, images
        self._places: dict[int, tuple[str, Any, Any]] = {}  # what stands for a tensor: whose it is, and who answers
        self._rows: dict[tuple[str, str, str], Row] = {}
        self._paths: list[list[Any]] = []
        self._names: frozenset[str] = frozenset()
        self._memory_of: frozenset[int] = frozenset()  # what the block is shown

    def of(
        self,
        tensors: Sequence[torch.Tensor],
        options: Sequence[tuple[Path, torch.Tensor]],
        weights: Sequence[tuple[str, torch.Tensor, torch.Tensor]],
    ) -> None:
        """What the block is shown in this trace. options: with their paths; weights: names, and the real ones."""
        shown = [*tensors, *(one for _, one in options), *(one for _, one, _ in weights)]
        self._names = frozenset(name for one in shown for name in vars(one))
        self._memory_of = frozenset(one.untyped_storage()._cdata for one in shown)
        self._paths = [json_path(path) for path, _ in options]
        self._places = {id(one): (WEIGHT, name, real) for name, one, real in weights}
        for path, (_, one) in zip(self._paths, options, strict=True):
            self._places[id(one)] = OPTION, path, self._answers.at(path)
        for number, (one, real) in enumerate(zip(tensors, self._answers.given, strict=False)):
            self._places[id(one)] = GIVEN, number, real

    @property
    def rows(self) -> list[Row]:
        """What was asked, with the answers."""
        return list(self._rows.values())

    @contextmanager
    def told(self) -> Iterator[None]:
        """Inside the block code of the host on this thread is answered so; no other code and thread is."""
        here = get_ident()

        def answered(name: str, plain: Callable[[], bool]) -> Callable[[], bool]:
            def ask() -> bool:
                if get_ident() != here or not is_host_code(sys._getframe(1).f_code):
                    return plain()
                return self._note(MODE, None, name, self._answers.modes.get(name, False)) or plain()

            return ask

        def missing(tensor: torch.Tensor, name: str) -> Any:
            asks = sys._getframe(1)
            if name.startswith("_is_") and asks.f_back is not None:  # by `isinstance`, of parameters and buffers
                asks = asks.f_back
            if get_ident() == here and not name.startswith("__") and is_host_code(asks.f_code):
                for value in self._attribute(tensor, name):
                    return value
            raise AttributeError(f"'Tensor' object has no attribute {name!r}")

        with ExitStack() as stack:
            stack.enter_context(self)
            for name, plain in MODES.items():
                stack.enter_context(replaced(torch, name, answered(name, plain)))
            setattr(FakeTensor, _MISSING, missing)
            stack.callback(delattr, FakeTensor, _MISSING)
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = _OF_TENSORS.get(func), kwargs or {}
        known = name is not None or func in _OF_MEMORY or func in _OF_ITSELF
        if not known or not is_host_code(_asker().f_code):
            return func(*args, **kwargs)
        kind, at, real = self._places.get(id(args[0]), (None, None, None))
        if func in _OF_ITSELF:
            if kind is not None:
                raise self._refuse(OF_ITSELF.format(_OF_ITSELF[func]))
            return func(*args, **kwargs)
        if name is None:
            return self._memory(kind, at, real, func, args, kwargs)
        if kind is not None:
            return self._note(kind, at, name, answer(real, name))
        if name == "is_inference":  # what is computed in inference mode is of it
            return self._note(MODE, None, _INFERENCE, self._answers.modes.get(_INFERENCE, False))
        return func(*args, **kwargs)

    def _memory(self, kind: str | None, at: Any, real: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """How a tensor lies: as in the call, where all that it may be a view of lie as the trace has them."""
        if kind == WEIGHT:  # it is given as it lies
            return func(*args, **kwargs)
        if self._images:
            raise RuntimeError("its code asks how an image lies in memory: its strides are shown")
        if kind is not None and func is torch.Tensor.is_contiguous and len(args) == 1 and not kwargs:
            return self._note(kind, at, "is_contiguous", answer(real, "is_contiguous"))
        asked = self._of_call() if kind is None else [(kind, at, real)]
        # what is computed of slices is as contiguous as what is computed of their copies, where it is no view of them
        plain = func is torch.Tensor.is_contiguous and len(args) == 1 and not kwargs
        computed = kind is None and plain and args[0].untyped_storage()._cdata not in self._memory_of
        for kind, at, real in asked:
            lies = answer(real, LIES)
            if not lies and computed and answer(real, ORDER):
                self._note(kind, at, ORDER, True)
            elif not self._note(kind, at, LIES, lies):
                raise self._refuse(LOOKS_AT_MEMORY)
        return func(*args, **kwargs)

    def _attribute(self, tensor: torch.Tensor, name: str) -> list[Any]:
        """The value that a tensor has under a name, if any. One that is computed may be one of the call's itself."""
        place = self._places.get(id(tensor))
        found = []
        for kind, at, real in self._of_call() if place is None else [place]:
            found = answer(real, attribute(name))
            if found and (place is None or type(found[0]) not in PLAIN):
                raise self._refuse(HAS_ATTRIBUTES.format(name))
            self._note(kind, at, attribute(name), found)
        return found

    def _of_call(self) -> list[tuple[str, Any, Any]]:
        return [place for place in self._places.values() if place[0] != WEIGHT]

    def _note(self, kind: str, place: Any, name: str, found: Any) -> Any:
        self._rows[kind, repr(place), name] = [kind, place, name, found]
        return found

    def _refuse(self, reason: str) -> Refused:
        self.refused = reason
        return Refused(reason)

    def finish(
        self,
        codes: Collection[types.CodeType],
        results: Sequence[torch.Tensor],
        spec: Any,
        own: Mapping[Any, Any],
        tensors: Sequence[Any],
    ) -> None:
        """Note what bytecode alone shows. Raises Refused for what no artefact can hold.

        codes: that ran. results: what came of it. spec: of the call. own: the attributes that were read of the block.
        tensors: all of the block.
        """
        if self.refused is not None:
            raise Refused(self.refused)
        if any(map(compares_objects, codes)):
            copies = [value for value in own.values() if fields_of(value) is not None or type(value) in _COPIED]
            if any(map(_is_made_anew, spec[2:])) or len(copies) > 1 or any(map(_compares_globals, codes)):
                raise Refused(COMPARES_OTHERS)
            same = self._answers.same(self._paths, tensors)
            if same != [*range(len(same) - 1), 0]:
                raise Refused(COMPARES)
            self._note(SAME, self._paths, "", same)
        if any(map(_lists_attributes, codes)):
            for kind, at, real in self._of_call():
                if self._note(kind, at, NAMES, answer(real, NAMES)):
                    raise Refused(HAS_ATTRIBUTES.format(min(answer(real, NAMES))))
        if ask_types(codes):
            for kind, at, real in self._of_call():
                self._note(kind, at, IS_PARAMETER, answer(real, IS_PARAMETER))
        for one in results:
            if self._names and isinstance(one, FakeTensor) and (new := vars(one).keys() - self._names):
                raise Refused(SETS_ATTRIBUTES.format(min(new)))


def _is_made_anew(spec: Any) -> bool:
    """Whether a spec stands for a list or an object that the block is given a copy of."""
    if not isinstance(spec, tuple) or spec[0] in ("=", "member", "M="):
        return False
    return spec[0] not in (tuple, torch.Size) or any(map(_is_made_anew, spec[1:]))


def _asker() -> types.FrameType:
    """The frame of the code that asked, past torch's own Python code of a method."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename.endswith(_METHODS) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _compares_globals(code: types.CodeType) -> bool:
    """Whether code compares objects with data that a global leads to."""
    return any(chain is not None and not _is_fixed(code, chain) for chain in _comparisons(code))


def compares_objects(code: types.CodeType) -> bool:
    """Whether code asks by `is` or `id` which objects are the same, but for constants, classes and functions."""
    return None in _comparisons(code) or _compares_globals(code)


def compares_any(code: types.CodeType) -> bool:
    """Whether code asks so for anything but constants."""
    return bool(_comparisons(code))


def compares_functions(code: types.CodeType) -> bool:
    """Whether code asks so for a function, or for what may be one."""
    found = [None if chain is None else _led_to(code, chain) for chain in _comparisons(code)]
    return any(one is None or (callable(one) and not isinstance(one, type)) for one in found)


def _is_fixed(code: types.CodeType, chain: tuple[str, ...]) -> bool:
    """Whether a global of code, and attributes from there on, lead to what is no data: a class, a function, a mark."""
    value = _led_to(code, chain)
    return callable(value) or type(value) in _FIXED or isinstance(value, (enum.Enum, types.ModuleType))


def _led_to(code: types.CodeType, chain: tuple[str, ...]) -> Any:
    """What a global of code, and attributes from there on, lead to; a list where that is not known."""
    module = module_of_code(code)
    value: Any = vars(module).get(chain[0], MISSING) if module is not None else MISSING
    for name in chain[1:]:
        table = vars(value) if isinstance(value, (types.ModuleType, type)) else {}
        value = table.get(name, MISSING)
    return getattr(builtins, chain[0], []) if value is MISSING else value


@functools.lru_cache(maxsize=8192)
def _comparisons(code: types.CodeType) -> list[tuple[str, ...] | None]:
    """For each comparison of objects with no constant, the chain of names that it is with, None for anything else."""
    of_dataclass = code.co_filename == "<string>" and code.co_name in ("__eq__", "__hash__")
    if not is_host_code(code) or of_dataclass:
        return []
    found, last, chain = list[tuple[str, ...] | None](), "", tuple[str, ...]()
    for one in dis.get_instructions(code):
        if one.opname in _LOADS and one.argval in _ASK_FOR_IDENTITY:
            found.append(None)
        if one.opname == "IS_OP" and last not in _CONSTANTS:
            found.append(chain or None)
        if one.opname == "LOAD_GLOBAL":
            chain = (one.argval,)
        elif one.opname == "LOAD_ATTR" and chain:
            chain = (*chain, one.argval)
        elif one.opname != "EXTENDED_ARG":
            chain = ()
        if one.opname != "EXTENDED_ARG":
            last = one.opname
    return found


@functools.lru_cache(maxsize=8192)
def _lists_attributes(code: types.CodeType) -> bool:
    """Whether code asks an object for all its attributes."""
    return is_host_code(code) and not {"vars", "__dict__"}.isdisjoint(code.co_names)
