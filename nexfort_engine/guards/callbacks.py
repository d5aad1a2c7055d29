# SPDX-License-Identifier: Apache-2.0
"""Substitutes: functions in a call's options that a block calls in the place of one of its own.

ComfyUI gives `optimized_attention_override` the attention that it would have called, and the arguments for that: what
comes back is shaped as that attention's result is. This is all that an artefact needs to know. It calls the function
that is in the options at that moment, with what the block's own code would hand it (callback_sites.py), and goes on
with the result. Nothing of the function is traced or kept, so that exchanging one for another costs no compile.

A function that is called in another way, without one of the block's own as its first argument, may give back anything:
such a block runs eager. So does one whose function keeps tensors that it is handed, which compiled code writes over,
changes those that the block still uses, or gives back something of another shape.

Submodules that carry code of others (modules/boundaries.py) are called in the same way: their own forward says what
comes back. What is called is a *target*: the JSON path of an option, or a submodule's row (`module_row`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..modules.boundaries import put_on
from ..modules.memory_format import Unsupported
from .call_spec import TENSOR, Flat, flatten_result, spec_text
from .option_guards import from_json_path
from .option_recorder import BOOKKEEPING, MISSING, look, where

Row = list[Any]  # as JSON, what a value is and what it is made of
_RAISED_BY = "_nexfort_raised_by"


MODULE = "module"


def module_row(path: str, *, called: bool) -> Row:
    """The target that a submodule is. called: as a module, with its hooks; otherwise its forward alone is."""
    return [MODULE, path, called]


def describe_target(target: Row) -> str:
    """What is called, in words."""
    if target[:1] == [MODULE]:
        return f"{target[1]}, which carries code of others,"
    return where(from_json_path(target))


class Strayed(Exception):
    """Code of others did what no artefact can follow. The text is the reason; `target` is what was called."""

    def __init__(self, target: Row, what: str) -> None:
        super().__init__(f"{describe_target(target)} {what}")
        self.target = target


def still_there(mappings: list[dict[Any, Any]], module: nn.Module, target: Row) -> Callable[[list[Any]], bool]:
    """Whether what is called is the very code of others that it is now. It is not kept alive."""
    if target[:1] == [MODULE]:
        child = module.get_submodule(target[1])
        carried = put_on(child)
        return lambda _: put_on(child) == carried
    path = from_json_path(target)
    function = look(mappings, path)
    try:
        found: Callable[[], Any] = weakref.ref(function)
    except TypeError:  # of a class with slots
        found = lambda: function  # noqa: E731
    return lambda others: (kept := found()) is not None and look(others, path) is kept


def raised_by(error: BaseException) -> str | None:
    """Which code of others raised an error, asked once; None where it was the engine's or torch's."""
    return error.__dict__.pop(_RAISED_BY, None)


@dataclass
class _Call:
    """One call of an artefact: its mappings, the places that it calls functions from, and what mappings must answer.

    module: whose artefact it is. unchanged: whether what the artefact read of the module before is still there.
    """

    module: nn.Module
    mappings: list[dict[Any, Any]]
    sites: list[list[Row]]
    check: Callable[[list[Any]], bool]
    unchanged: Callable[[], bool]
    count: Counter[int] = field(default_factory=Counter)  # of calls by the number of their site
    made: dict[int, Any] = field(default_factory=dict)  # containers of the block's that were handed over, by number

    def next(self, site: int) -> Row:
        """The row of a call."""
        self.count[site] += 1
        return self.sites[site][self.count[site] - 1]


_current: ContextVar[_Call] = ContextVar("nexfort_substitutes")


@contextlib.contextmanager
def called_with(
    mappings: list[dict[Any, Any]],
    sites: list[list[Row]],
    check: Callable[[list[Any]], bool],
    changed: list[torch.Tensor],
    module: nn.Module,
    unchanged: Callable[[], bool] = lambda: True,
) -> Iterator[None]:
    """Inside the block an artefact finds its substitutes in these mappings.

    check: whether mappings answer as the captured ones did. changed: what the artefact writes to, put back as it was
    where a function strayed, so that the block can run. module: whose artefact it is. unchanged: whether the module is
    what it was when the artefact was chosen; asked after each call of a submodule that carries code of others.
    """
    before = [tensor.clone() for tensor in changed]
    token = _current.set(_Call(module, mappings, sites, check, unchanged))
    try:
        yield
    except Strayed:
        for tensor, was in zip(changed, before, strict=True):
            tensor.copy_(was)
        raise
    finally:
        _current.reset(token)


def _substitute(
    given: list[torch.Tensor],
    numbers: list[int],
    sizes: list[int],
    ranks: list[int],
    dtypes: str,
    site: int,
    spare: list[bool],
    after: list[torch.Tensor],
) -> list[torch.Tensor]:
    call = _current.get()
    row = call.next(site)
    target = row[0]
    lends = target[:1] != [MODULE]  # hooks are there to keep what they see
    # as views, so that what is done to a tensor's sizes is not done to what compiled code holds
    tensors = [t.detach() if own and lends else _copy(t) for t, own in zip(given, spare, strict=True)]
    lent = [tensor for tensor, own in zip(tensors, spare, strict=True) if own and lends]
    copies = [tensor for tensor, own in zip(tensors, spare, strict=True) if not own]
    held, versions = list(map(_holders, lent)), [copy._version for copy in copies]
    due = _taken_apart(_called(call, row, tensors, numbers), row)
    if not lends and not call.unchanged():
        raise Strayed(target, "changes what the block uses afterwards")
    if not lends and _share(due, tensors):
        raise Strayed(target, "gives back memory that it is given, or twice the same")
    results, device, rest = [], given[0].device, list(sizes)
    for rank, dtype in zip(ranks, dtypes.split(), strict=True):
        result, size, rest = due.pop(0), rest[:rank], rest[rank:]
        if type(result) is not torch.Tensor:
            raise Strayed(target, f"gives back a {type(result).__qualname__} and not a tensor")
        if (list(result.shape), result.dtype, result.device) != (size, _torch_s(dtype), device):
            found = f"{result.dtype} {list(result.shape)} on {result.device}"
            raise Strayed(target, f"gives back {found}, and not {dtype} {size} on {device}")
        is_own = _holders(result) == _alone() and not result.storage_offset()  # code that follows writes over it
        results.append(result.contiguous() if is_own else result.clone(memory_format=torch.contiguous_format))
    del result
    if list(map(_holders, lent)) != held:
        raise Strayed(target, "keeps a tensor that it is given")
    if [copy._version for copy in copies] != versions:
        raise Strayed(target, "changes a tensor that the block may use afterwards")
    return [*results, given[0].new_empty(1)]


def _taken_apart(result: Any, row: Row) -> list[Any]:
    """The tensors that came back. Raises Strayed where they lie in other containers than they should."""
    wanted = row[3] if len(row) > 3 else TENSOR
    if wanted == TENSOR:
        return [result]
    flat = Flat()
    try:
        found = spec_text(flatten_result(result, flat))
    except Unsupported as reason:
        raise Strayed(row[0], f"gives back {reason}") from None
    if found != wanted:
        raise Strayed(row[0], f"gives back {found}, and not {wanted}")
    return flat.tensors


def _share(results: list[Any], given: list[torch.Tensor]) -> bool:
    """Whether results lie in memory of one another or of what was given; the block may write to either."""
    memory = [t.untyped_storage()._cdata for t in results if isinstance(t, torch.Tensor)]
    return len(set(memory)) < len(memory) or not {t.untyped_storage()._cdata for t in given}.isdisjoint(memory)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that counts how often it is changed, which tensors of inference mode do not; as large in memory."""
    with torch.inference_mode(False), torch.no_grad():
        part = tensor
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            part = part.narrow(dim, 0, 1) if stride == 0 and size > 1 else part
        return part.clone().expand(tensor.shape)


def _called(call: _Call, row: Row, tensors: list[torch.Tensor], numbers: list[int]) -> Any:
    target, args, kwargs = row[:3]
    built = _Built(call, tensors, numbers)
    if target[:1] == [MODULE]:
        child = call.module.get_submodule(target[1])
        function = child if target[2] else child.forward
    else:
        function = look(call.mappings, from_json_path(target))
    given, more = built.of_each(args), built.of_items(kwargs)
    answered = call.check(call.mappings)  # not where the block wrote what it looked at before
    try:
        result = function(*given, **more)
    except BaseException as error:
        error.__dict__[_RAISED_BY] = describe_target(target)
        raise
    if answered and not call.check(call.mappings):
        raise Strayed(target, "changes an option that the block looks at")
    return result


def _holders(tensor: torch.Tensor) -> tuple[int, int, int]:
    """How many hold on to a tensor, in C++ and Python, and to its memory."""
    return tensor._use_count(), sys.getrefcount(tensor), _uses(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]


_uses = torch._C._storage_Use_Count  # type: ignore[attr-defined]


@functools.cache
def _alone() -> tuple[int, int, int]:
    """What `_holders` says of a tensor that one local variable holds and nobody else."""
    probe = torch.empty(1)
    return _holders(probe)


class _Built:
    """Values again from what callback_sites.py wrote down."""

    def __init__(self, call: _Call, tensors: list[torch.Tensor], numbers: list[int]) -> None:
        self._call, self._tensors, self._numbers = call, tensors, numbers

    def of(self, row: Row) -> Any:
        kind, value, *rest = row
        if kind == "tensor":
            return self._tensors[value]
        if kind == "number":
            return self._numbers[value]
        if kind == "plain":
            return value
        if kind == "torch":
            return _torch_s(value)
        if kind == "option":
            return functools.reduce(lambda inner, step: inner[step], rest[0], self._look(value))
        if kind == "own":
            return self._with_changes(self._look(value), *rest)
        if kind == "copy":
            return self._with_changes(dict(self._look(value)), *rest)
        if kind == "function":
            importlib.import_module(value)
            return named(value, *rest)
        if kind == "made":
            if value not in self._call.made:
                self._call.made[value] = self.of(rest[0])
            return self._call.made[value]
        if kind == "dict":
            return self._dict(value, rest[0])
        return tuple(self.of_each(value)) if kind == "tuple" else self.of_each(value)

    def of_each(self, rows: list[Row]) -> list[Any]:
        return [self.of(row) for row in rows]

    def of_items(self, items: list[list[Any]]) -> dict[Any, Any]:
        """What is not there, since the sampler does not note it now, is left out."""
        found = ((_key(key), self.of(row)) for key, row in items)
        return {key: value for key, value in found if value is not MISSING}

    def _look(self, path: list[Any]) -> Any:
        return look(self._call.mappings, from_json_path(path))

    def _with_changes(self, mapping: Any, written: list[list[Any]], removed: list[Any]) -> Any:
        for key in removed:
            mapping.pop(_key(key), None)
        mapping.update(self.of_items(written))
        return mapping

    def _dict(self, items: list[Any], source: list[Any] | None) -> dict[Any, Any]:
        made = self.of_items(items)
        if source is not None:
            now = self._look(source)
            made |= {key: now[key] for key in now if key in BOOKKEEPING and key not in made}
        return made


def named(module: str, name: str, depth: int) -> Any:
    """A function by its module, its name, and how often to look behind a wrapper."""
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part)
    for _ in range(depth):
        found = found.__wrapped__
    return found


def _key(raw: Any) -> Any:
    return from_json_path([raw])[0]


def _torch_s(text: str) -> Any:
    """A dtype, layout or memory format by its name, or a device."""
    name = text.removeprefix("torch.")
    return getattr(torch, name) if name != text else torch.device(text)


# ---- the operator ----------------------------------------------------------------------------------------------------


@functools.cache
def operator() -> Any:
    """`nexfort::substitute`: the function of a site, called with tensors and numbers.

    sizes, ranks, dtypes: of the tensors that it gives: all sizes in a row, how many each has, their names in a row.
    spare: which of the tensors it may change. after: what the call before this one gave besides its result, so that
    calls stay in their order. What loads or unpacks code that calls it asks for it first.
    """
    library = torch.library.Library("nexfort", "FRAGMENT")
    library.define(
        "substitute(Tensor[] given, SymInt[] numbers, SymInt[] sizes, int[] ranks, str dtypes, int site, bool[] spare, "
        "Tensor[] after) -> Tensor[]"
    )
    library.impl("substitute", _substitute, "CompositeExplicitAutograd")
    torch.library.register_fake("nexfort::substitute", _fake, lib=library)
    operator.library = library  # type: ignore[attr-defined]  # the operator goes with it
    return torch.ops.nexfort.substitute.default


def _fake(given: Any, _numbers: Any, sizes: Any, ranks: Any, dtypes: str, _site: Any, _spare: Any, _after: Any) -> Any:
    results, rest = [], list(sizes)
    for rank, dtype in zip(ranks, dtypes.split(), strict=True):
        size, rest = rest[:rank], rest[rank:]
        results.append(given[0].new_empty(size, dtype=_torch_s(dtype)))
    return [*results, given[0].new_empty(1)]
