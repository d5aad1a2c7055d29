# SPDX-License-Identifier: Apache-2.0
"""Constants: tensors in main memory that a step makes of Python's numbers alone, and copies to the GPU each time.

`torch.arange(n).to(x)` in a network's own code cannot be captured in a CUDA graph, because a copy out of main memory
waits for the GPU; yet what is copied is as much a part of the code as the numbers that a graph bakes in anyway. So
while a step is observed the copies of such tensors are remembered, and while it is captured each is answered with what
the observed one left on the GPU, if the tensor has the same bits.

That is sound: such a tensor depends on nothing but the code and the state of Python, as `x * 0.5` does, and what of
that may change a step's checks compare (options, attributes, sizes). A tensor that was there before the step, a random
number, and what is computed of either is no constant.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._python_dispatch import _pop_mode_temporarily as _pop_dispatch_mode
from torch.utils._pytree import tree_leaves

from ..system.process_settings import uncompiled_under_modes

MASKS = (torch.bool, torch.uint8)
_INDEXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
_MAKERS = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)
_OPEN = (
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
)  # what writes to their results is not seen
_SUBSCRIPTS = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by bytes
_NUMBERS = (bool, int, float, complex)
_HOST = "cpu"


class Watch:
    """A mode of the engine's own, which has seen what an artefact does whose operators need not be watched again."""


@dataclass
class Sent:
    """One copy of a constant: what was asked for, the constant, and what came of it, which nobody else has."""

    request: dict[str, Any]
    constant: torch.Tensor
    stride: tuple[int, ...]  # as it was, which may be that of an expanded one
    there: torch.Tensor

    def answers(self, request: dict[str, Any], constant: torch.Tensor) -> bool:
        """Whether the same copy of the same bits is asked for."""
        own = self.constant
        if request != self.request or constant.dtype != own.dtype or constant.shape != own.shape:
            return False
        return constant.stride() == self.stride and torch.equal(bits(constant), bits(own))


class Constants(Watch, TorchDispatchMode):
    """Inside the block every operator runs as it does anyway, and it is known which tensors are constants.

    A storage is one or none, because what is written to one tensor changes all that share its memory. What becomes of a
    copy to the GPU is for those who build on this: `_copied`.

    reason: why no graph can be made of what ran, None while there is none.
    """

    supports_higher_order_operators = True
    _learns = False  # whether what it sees an artefact do is what it does

    def __init__(self) -> None:
        super().__init__()
        self.reason: str | None = None
        self._stirred = 0  # operators that took or gave something in main memory, or of which nothing is known
        self._held: dict[int, Any] = {}  # the storages, held on to, or another would have the place of one that is gone
        self._scopes = ExitStack()

    def __enter__(self) -> Any:
        self._scopes.enter_context(uncompiled_under_modes())
        self._scopes.enter_context(_Literals(self))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            self._scopes.close()

    def note(self, reason: str) -> None:
        """Keep a reason, if it is the first."""
        self.reason = self.reason or reason

    @contextmanager
    def around(self, artefact: Any, answered: Callable[[], int] = int) -> Iterator[None]:
        """A region's artefact runs inside, unwatched where that is right: watching takes as long as running it.

        It is right where none of its operators took or gave anything in main memory or was a reason against a graph:
        whatever they call at other sizes stays on the GPU too. That is learnt where all of it runs and is seen.
        answered: how many calls that an artefact would make were answered so far without being run.
        """
        if artefact.unwatched:
            with _out_of_sight():
                yield
            return
        before = self._stirred, answered()
        yield
        seen = self._learns and _get_current_dispatch_mode() is self
        artefact.note_watched(is_enough=seen and self.reason is None and before == (self._stirred, answered()))

    def hold(self, tensor: torch.Tensor) -> None:
        """The tensor was made of numbers alone."""
        if _is_plain(tensor):
            storage = tensor.untyped_storage()
            self._held[storage._cdata] = storage

    def let_go(self, tensor: torch.Tensor) -> None:
        """The tensor holds, or may come to hold, what is no constant."""
        if _is_here(tensor) and tensor.layout is torch.strided:
            self._held.pop(tensor.untyped_storage()._cdata, None)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a constant."""
        return _is_plain(tensor) and tensor.untyped_storage()._cdata in self._held

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            self._stirred += 1
            for tensor in tensors_in((args, kwargs)):
                self.let_go(tensor)
            result = func(*args, **kwargs)
            self.ran(func, [], result)
            return result
        if _is_composite(func):  # they come here whole in inference mode, with the copies that they make inside
            with self._inside():
                return func.decompose(*args, **kwargs)
        taken, asked = tensors_in((args, kwargs)), args
        self._stirred += any(map(_is_here, taken))
        args, kwargs, result = self._sending(func, args, kwargs)
        if result is not None:
            return result
        if args is not asked:  # with copies of some
            taken = tensors_in((args, kwargs))
        known = is_function(func, kwargs) and all(map(self.holds, taken))
        result = func(*args, **kwargs)
        given = tensors_in(result)
        self._stirred += any(map(_is_here, given))
        if known:
            for tensor in given:
                self.hold(tensor)
        else:
            for tensor in written(func, args, kwargs):
                self.let_go(tensor)
        if not (known and taken):  # the CPU looks into its own constants without waiting for anything
            self.ran(func, taken, result)
        return result

    def ran(self, func: Any, taken: list[torch.Tensor], result: Any) -> None:
        """An operator ran on something that is no constant."""

    def _copied(self, tensor: torch.Tensor, request: dict[str, Any]) -> torch.Tensor | None:
        """What a tensor's copy on the GPU is; None where it is made as it would be without this."""
        raise NotImplementedError

    def _sending(self, func: Any, args: Any, kwargs: Any) -> Any:
        """(args, kwargs, result) of an operator that brings tensors to the GPU: what of it is still to be done.

        Where it also does something else, such as to write into a tensor that is there, it is given copies instead.
        """
        name = func._schema.name
        if name == "aten::_to_copy" and args and _is_here(args[0]) and _is_away(kwargs.get("device")):
            names = ("dtype", "device", "memory_format")
            request = {key: kwargs[key] for key in names if kwargs.get(key) is not None}
            return args, kwargs, self._copied(args[0], request)
        if name == "aten::copy_" and len(args) > 1 and _is_here(args[1]) and _is_away(args[0].device):
            # torch too converts first and copies then
            copy = self._copied(args[1], {"dtype": args[0].dtype, "device": args[0].device})
            return (args if copy is None else (args[0], copy, *args[2:])), kwargs, None
        if name in _INDEXED and len(args) > 1 and _is_away(args[0].device) and not any(map(_is_mask, args[1])):
            # a mask waits, unless a number from main memory goes where it says
            indices, values = ([self._there(value, args[0]) for value in part] for part in (args[1], args[2:]))
            return (args[0], indices, *values), kwargs, None
        return args, kwargs, None

    def _there(self, value: Any, tensor: torch.Tensor) -> Any:
        """What an operator on a tensor is given besides, if that is a tensor elsewhere: its copy."""
        if not isinstance(value, torch.Tensor) or not _is_here(value):
            return value
        copy = self._copied(value, {"device": tensor.device})
        return value if copy is None else copy

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """What an operator calls comes here too."""
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)


class Remembering(Constants):
    """Inside the block copies of constants are remembered: `sent`."""

    _learns = True

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Sent] = []

    def _copied(self, tensor: torch.Tensor, request: dict[str, Any]) -> torch.Tensor | None:
        if not self.holds(tensor):
            return None
        copy = torch.ops.aten._to_copy.default(tensor, **request)
        if not any(one.answers(request, tensor) for one in self.sent):
            self.sent.append(Sent(request, tensor.clone(), tensor.stride(), copy.clone()))
        return copy


class Answering(Constants):
    """Inside the block nothing is copied from main memory to the GPU: what was `sent` before stands for it.

    Anything else is answered with a tensor of the right kind with nothing in it, and is the reason why what ran must
    not be used: a copy that fails would end the process with some allocators (capture_check.py).
    """

    def __init__(self, sent: list[Sent]) -> None:
        super().__init__()
        self._sent = sent

    def _copied(self, tensor: torch.Tensor, request: dict[str, Any]) -> torch.Tensor:
        if not self.holds(tensor):
            self.note("its code copies between the GPU and main memory")
        else:
            for one in self._sent:
                if one.answers(request, tensor):
                    return one.there.clone()  # the code may write to it
            self.note("a constant that its code copies to the GPU is another one in each step")
        return torch.empty_like(tensor, **request)


class _Literals(Watch, TorchFunctionMode):
    """Sees what operators do not show: which numbers a literal is made of, and that one on the GPU is copied there."""

    def __init__(self, constants: Constants) -> None:
        super().__init__()
        self._constants = constants

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OPEN:
            self._constants.let_go(args[0])
        if _get_current_dispatch_mode() is self._constants:  # otherwise a trace is made, which does so itself
            if func in _MAKERS:
                return self._literal(func, args, kwargs)
            if func in _SUBSCRIPTS and _is_away(args[0].device):
                args = self._subscripts(*args)
        return func(*args, **kwargs)

    def _literal(self, func: Any, args: Any, kwargs: Any) -> Any:
        own = func is torch.Tensor.new_tensor
        data = args[own] if len(args) > own else kwargs.get("data", kwargs.get("obj"))
        if not isinstance(data, (list, tuple, *_NUMBERS)) or kwargs.get("requires_grad"):
            return func(*args, **kwargs)
        device = kwargs.get("device")
        if device is None:
            device = args[0].device if own else torch.get_default_device()
        made = func(*args, **{**kwargs, "device": _HOST})
        if _is_numbers(data) and not kwargs.get("pin_memory"):
            self._constants.hold(made)
        return made.to(device)

    def _subscripts(self, tensor: torch.Tensor, index: Any, *value: Any) -> Any:
        """The arguments with constants in the place of numbers that would be copied: lists, and what is assigned."""
        index = tuple(map(self._listed, index)) if type(index) is tuple else self._listed(index)
        if value and isinstance(value[0], (bool, int, float)):
            value = (self._constant(value[0], tensor.dtype),)
        return tensor, index, *value

    def _listed(self, index: Any) -> Any:
        listed = type(index) is list and index and all(type(place) is int for place in index)
        return self._constant(index, torch.int64) if listed else index

    def _constant(self, numbers: Any, dtype: torch.dtype) -> torch.Tensor:
        made = torch.tensor(numbers, dtype=dtype, device=_HOST)
        self._constants.hold(made)
        return made


@contextmanager
def unwatched() -> Iterator[None]:
    """Inside the block this thread's operators are nobody's: what is made there is no part of the step.

    Torch's own context for it takes away the modes of a trace in another thread as well.
    """
    with ExitStack() as stack:
        for _ in range(torch._C._len_torch_dispatch_stack()):
            stack.enter_context(_pop_dispatch_mode())
        if isinstance(_get_current_function_mode(), _Literals):
            stack.enter_context(_pop_mode_temporarily())
        yield


@contextmanager
def _out_of_sight() -> Iterator[None]:
    """Inside the block the engine's own modes see nothing; those of others do, and what lies below them."""
    with ExitStack() as stack:
        while isinstance(_get_current_dispatch_mode(), Watch):
            stack.enter_context(_pop_dispatch_mode())
        while isinstance(_get_current_function_mode(), Watch):
            stack.enter_context(_pop_mode_temporarily())
        yield


def tensors_in(values: Any) -> list[torch.Tensor]:
    """All tensors in nested containers."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is nothing but numbers in main memory."""
    return type(tensor) is torch.Tensor and _is_here(tensor) and tensor.layout is torch.strided


def _is_here(tensor: torch.Tensor) -> bool:
    return tensor.device.type == _HOST


def _is_away(device: Any) -> bool:
    return device is not None and torch.device(device).type != _HOST


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype in MASKS


def _is_numbers(data: Any) -> bool:
    """Whether it is numbers, or nested lists of them: not tensors, nor arrays that share memory with others."""
    return all(map(_is_numbers, data)) if isinstance(data, (list, tuple)) else isinstance(data, _NUMBERS)


def is_function(func: Any, kwargs: Any) -> bool:
    """Whether an operator's result depends on its arguments alone. Pinning memory is for copies that are not made."""
    seeded = torch.Tag.nondeterministic_seeded in func.tags
    pinned = func._schema.name == "aten::_pin_memory" or kwargs.get("pin_memory")
    return func.namespace == "aten" and not seeded and not pinned


@functools.cache
def _is_composite(func: Any) -> bool:
    """Whether an operator is nothing but calls of others, on every device."""
    name, has = func.name(), torch._C._dispatch_has_kernel_for_dispatch_key
    if func.namespace != "aten":  # others need not be known to the dispatcher
        return False
    return has(name, "CompositeImplicitAutograd") and not has(name, "CPU") and not has(name, "CUDA")


def written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors that an operator writes to."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(args[place] if place < len(args) else kwargs.get(argument.name))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """All bits of a tensor: a comparison of numbers would miss a sign of zero, and find no NaN the same."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(_WHOLE_NUMBERS.get(flat.itemsize, torch.int64))  # as wide as there are: eight bytes at once
