# SPDX-License-Identifier: Apache-2.0
"""What a block is besides its weights: the plain attributes its code reads, and the structure of its module tree.

While a block is captured every attribute read on it or a submodule is recorded (capture/shadow_module.py), so that an
artefact is guarded by what its code consulted and by nothing else: a layer's number that no code reads splits no
artefacts, a flag that is read and later flipped does. `ModuleState` turns that into flat slots that are compared before
every call, and into text that another process can compare.

Weights are found here too: parameters, buffers and plain tensor attributes, all of them arguments of the artefact.
"""

from __future__ import annotations

import collections
import functools
import inspect
import types
from collections.abc import Collection, Iterator, Mapping
from itertools import repeat
from operator import contains, is_, itemgetter
from typing import Any

import torch
from torch import nn

from ..modules.tree import ABSENT, INTERNAL, PLAIN, Hidden, Slot, Tree, class_name, modules_in, structure
from . import collectives, scalar_inputs
from .name_resolver import content_of
from .option_recorder import MISSING, Refused
from .value_digests import cell_contents, code_digest, table_of

_METHOD = ["method"]  # how METHOD is described
METHOD = object()  # stands for a function that was read and that the class has: the module has none of its own


def describe(value: Any, depth: int = 3) -> Any:
    """A value as JSON that is equal in two processes exactly when code cannot tell the values apart.

    Raises Refused for values of which that cannot be said (open files, locks, closures over such).
    """
    if type(value) is scalar_inputs.Strength:  # asked first: to `isinstance` it is a number
        return scalar_inputs.described(value)
    if type(value) in PLAIN:
        return value if not isinstance(value, float) else ["float", value.hex()]
    if collectives.is_group(value):
        return collectives.describe_group(value)
    if isinstance(value, (tuple, list, torch.Size)):
        return [type(value).__name__, *[describe(v, depth) for v in tuple(value)]]
    if type(value) is range:
        return ["range", value.start, value.stop, value.step]
    if isinstance(value, (set, frozenset)):
        return ["set", *sorted([describe(v, depth) for v in tuple(value)], key=repr)]
    if isinstance(value, dict):
        return [_kind(value), *[[describe(k, depth), describe(v, depth)] for k, v in list(value.items())]]
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return ["torch", str(value)]
    if isinstance(value, type):
        return ["type", class_name(value)]
    if isinstance(value, functools.partial):
        return ["partial", *[describe(v, depth) for v in (value.func, value.args, value.keywords)]]
    if inspect.isroutine(value):
        return _describe_function(value, depth)
    if isinstance(value, nn.Module):
        return ["module", structure(value), [[*at[2:], describe(at[0][at[1]])] for at in _plain_fields(value)]]
    if value is MISSING or value is METHOD:
        return ["absent"] if value is MISSING else list(_METHOD)
    if isinstance(value, torch.Tensor):
        raise Refused("it reads a tensor inside an object that is not a module")
    if depth <= 0:
        raise Refused(f"it reads an object nested too deeply to compare ({type(value).__qualname__})")
    fields = getattr(value, "__dict__", None)
    if fields is None:
        if isinstance(value, (int, float, str)):  # enums and other scalar subclasses
            return [class_name(type(value)), str(value)]
        raise Refused(f"it reads an object that cannot be compared ({type(value).__qualname__})")
    apart = collectives.of_ranks(fields)
    return [
        "object",
        class_name(type(value)),
        [[k, ["of a rank"] if k in apart else describe(v, depth - 1)] for k, v in sorted(fields.items())],
    ]


def _kind(value: Any) -> str:
    """The class of a mapping, which code may ask for."""
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else class_name(kind)


def _plain_fields(module: nn.Module) -> list[tuple[dict[str, Any], str, str]]:
    """The plain attributes of a module tree: the table that each is in, its name, and its dotted name."""
    return [
        (sub.__dict__, name, f"{path}.{name}")
        for path, sub in module.named_modules()
        for name, value in sorted(sub.__dict__.items())
        if type(value) in PLAIN and name not in INTERNAL
    ]


def _describe_function(value: Any, depth: int) -> Any:
    cells = getattr(value, "__closure__", None) or ()
    owner = getattr(value, "__self__", None)
    bound = describe(owner, depth - 1) if owner is not None and not inspect.ismodule(owner) and depth > 0 else None
    name = f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    text = code_digest(code) if code is not None else None
    defaults = [describe(default, depth - 1) for default in getattr(value, "__defaults__", None) or ()]
    if words := getattr(value, "__kwdefaults__", None):
        defaults.append(describe(words, depth - 1))
    return ["function", name, bound, text, defaults, [describe(cell_contents(c), depth - 1) for c in cells]]


class ModuleState:
    """The attributes that one capture read on one module tree, as slots that are compared before every call."""

    def __init__(
        self,
        module: nn.Module,
        rows: list[list[Any]],
        hidden: Hidden | None = None,
        boundaries: Collection[str] = (),
    ) -> None:
        """rows: [path, attribute, described value] as `rows_of` gave them; `matches_text` must have held.

        boundaries: dotted names of the submodules that carry code of others.
        """
        hidden = hidden or {}
        by_path = dict(module.named_modules())
        slots: list[Slot] = []
        absent: list[Slot] = []
        held: list[Any] = []  # values that are looked into
        self._loose: dict[int, Any] = {}  # place among the slots -> what was captured, with strengths in it
        on_classes: dict[tuple[type, str], None] = {}
        for path, name, expected in rows:
            if name not in hidden.get(id(by_path[path]), ()):
                sub, own = by_path[path], by_path[path].__dict__
                if name in own:
                    if scalar_inputs.holds_one(expected):
                        self._loose[len(slots)] = expected
                    slots.append((own, name))
                    held.append(own[name])
                    continue
                absent.append((own, name))
                if expected != _METHOD:  # a class's methods are known by name
                    on_classes.update({(kind, name): None for kind in _asked(type(sub), name)})
                if expected == ["absent"]:
                    absent += [(table, name) for table in (sub._parameters, sub._buffers, sub._modules)]
        held += [vars(kind).get(name) for kind, name in on_classes]
        slots += [(table_of(kind), name) for kind, name in on_classes]
        slots += [field[:2] for value in held for inner in modules_in(value) for field in _plain_fields(inner)]
        # In pairs of flat lists: `map` over them takes half the time of a comprehension, and there are thousands.
        self._tables, self._names = [table for table, _ in slots], [name for _, name in slots]
        self._values = Snapshot(self._read())
        self._absent = [table for table, _ in absent], [name for _, name in absent]
        self._fields = [fields for value in held for fields in _objects_in(value)]
        self._objects = Snapshot(self._fields)
        below = [sub for sub in by_path.values() if sub is not module]
        carriers = [by_path[path] for path in boundaries]
        own = [sub for sub in below if sub not in carriers] if carriers else below
        self._tree = Tree([module, *below], own_forwards=own, carriers=carriers)

    def unchanged(self) -> bool:
        """Whether every attribute read at capture still has its value, and no submodule was exchanged or hooked.

        A value that cannot be compared, because its own code raises, is another one.
        """
        try:
            return self._is_same()
        except Exception:
            return False

    def _is_same(self) -> bool:
        if any(map(contains, *self._absent)) or not self._values.same(self._read(), self._loose):
            return False
        return self._tree.unchanged() and (not self._fields or self._objects.same(self._fields))

    def _read(self) -> list[Any]:
        return list(map(dict.get, self._tables, self._names, repeat(MISSING)))


class Snapshot:
    """Some values as they were: their types, what plain containers among them hold, and the code of functions.

    Asked on every call: lists are compared by identity first, which takes 5 ns a value. Numbers and containers may be
    equal and still of another type: they have to be the same objects, or they are looked at one by one.
    """

    def __init__(self, values: list[Any]) -> None:
        self._values = list(values)
        self._before = list(map(_frozen, values))
        self._look_inside()

    def _look_inside(self) -> None:
        self._parts = [part for value in self._values for part in _parts_in(value)]
        self._contents = list(map(_content, self._parts))
        exact = [i for i, value in enumerate(self._values) if isinstance(value, _NUMBERS) or _has_parts(value)]
        self._pick = itemgetter(*exact, *exact[:1]) if exact else itemgetter(slice(0))
        self._picked = self._pick(self._values)

    def same(self, values: list[Any], loose: Mapping[int, Any] | None = None) -> bool:
        """Whether other values are the same; then these are the values from now on.

        loose: place -> the described value of one with numbers in it that may be others (scalar_inputs.py).
        """
        if values == self._values and all(map(is_, self._pick(values), self._picked)) and self._are_parts_same():
            return True
        for i, (value, before) in enumerate(zip(values, self._before, strict=True)):
            if value is not before and not _alike(value, before):
                if not (loose and i in loose and _fits(value, loose[i])):
                    return False
                self._before[i] = _frozen(value)
        self._values = list(values)
        self._look_inside()
        return True

    def _are_parts_same(self) -> bool:
        now = map(_content, self._parts)
        return all(len(a) == len(b) and all(map(is_, a, b)) for a, b in zip(now, self._contents, strict=True))


_LOOKED_INTO = (list, tuple, dict, collections.OrderedDict, collections.defaultdict, collections.deque, set, frozenset)
_NUMBERS = (int, float, complex, str)  # of which others may be equal: True and 1, a member of an enumeration and a word
_INSIDE = 4  # containers and functions in each other


class _Frozen:
    """A container or a function as it was: itself, its class, and what it held."""

    def __init__(self, value: Any, depth: int) -> None:
        self.value, self.kind = value, type(value)
        self.held = tuple(_frozen(part, depth) for part in _content(value))


def _frozen(value: Any, depth: int = _INSIDE) -> Any:
    """A copy of what a value holds, so that a change of one inside another shows."""
    return _Frozen(value, depth - 1) if depth and _has_parts(value) else value


def _has_parts(value: Any) -> bool:
    kind = type(value)
    return kind in _LOOKED_INTO or isinstance(value, (types.FunctionType, types.MethodType, functools.partial, dict))


def _content(value: Any) -> tuple[Any, ...]:
    """What a container holds, in order; and what a function's result depends on besides its arguments."""
    if isinstance(value, types.FunctionType):
        cells = map(cell_contents, value.__closure__ or ())
        return (value.__code__, value.__defaults__, value.__kwdefaults__, *cells)
    if isinstance(value, types.MethodType):
        return (value.__func__, value.__self__)
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords)
    return content_of(value)


def _parts_in(value: Any, depth: int = _INSIDE) -> Iterator[Any]:
    """A value and what it holds, as far as something may change in its place."""
    if not depth or not _has_parts(value):
        return
    if type(value) is not tuple:
        yield value
    for part in _content(value):
        yield from _parts_in(part, depth - 1)


def _alike(value: Any, before: Any) -> bool:
    """Whether code cannot tell a value from one as it was: of equal type, 2 is not 2.0, and equal order."""
    if isinstance(before, _Frozen):
        if type(value) is not before.kind or (value is not before.value and isinstance(value, types.FunctionType)):
            return False
        held = _content(value)
        return len(held) == len(before.held) and all(map(_alike, held, before.held))
    if value is before:
        return True
    if type(value) is not type(before):
        return False
    return repr(value) == repr(before) if type(value) is float else bool(value == before)


def _objects_in(value: Any, depth: int = 3) -> Iterator[dict[str, Any]]:
    """The attribute tables of an object, and of the objects that it and plain containers hold."""
    if isinstance(value, (list, tuple, dict)):
        for item in list(value.values() if isinstance(value, dict) else value):
            yield from _objects_in(item, depth)
        return
    fields = getattr(value, "__dict__", None)
    if fields is None or depth <= 0 or isinstance(value, (type, nn.Module)) or inspect.isroutine(value):
        return
    yield fields
    for item in list(fields.values()):
        yield from _objects_in(item, depth - 1)


def _asked(kind: type, name: str) -> Iterator[type]:
    """The classes in which Python looks for a name, to the first that has it."""
    for one in kind.__mro__[:-1]:
        yield one
        if name in vars(one):
            return


def rows_of(reads: Mapping[tuple[str, str], Any]) -> list[list[Any]]:
    """What was read, as JSON-able rows. Raises Refused, naming the attribute, for a value that cannot be compared."""
    rows = []
    for (path, name), value in sorted(reads.items()):
        try:
            rows.append([path, name, describe(value)])
        except Refused as reason:
            raise Refused(f"{reason} (attribute {name} of {path or 'the block'})") from None
    return rows


def matches_text(module: nn.Module, rows: list[list[Any]], hidden: Hidden | None = None) -> bool:
    """Whether another module of the same structure answers every recorded read the same; `hidden` answers first."""
    hidden = hidden or {}
    by_path = dict(module.named_modules())
    for path, name, expected in rows:
        sub = by_path.get(path)
        shown = hidden.get(id(sub), {})
        value = shown[name] if name in shown else getattr(sub, name, MISSING)
        if expected == _METHOD and value is not MISSING and name not in shown:
            value = METHOD if sub is None or name not in sub.__dict__ else value
        if not _fits(MISSING if value is ABSENT else value, expected):
            return False
    return True


def _fits(value: Any, expected: Any) -> bool:
    """Whether a value answers as the described one did."""
    try:
        found = describe(value)
    except Refused:
        return False
    if found == expected and repr(found) == repr(expected):  # True is not 1
        return True
    return scalar_inputs.holds_one(expected) and scalar_inputs.fits(found, expected)
