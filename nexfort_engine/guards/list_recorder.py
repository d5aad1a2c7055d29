# SPDX-License-Identifier: Apache-2.0
"""Read-set guards of lists that a block changes: which entries it looked at, what it found there, what it put there.

A video's autoencoder hands its blocks one list of frames to keep. Each block looks at the entries that are its own and
leaves others there. While such a block is captured the list is a `RecordedList`: entries that are read become guards
(None, text, a number) or inputs of the artefact (tensors), the rest does not count, and changes are noted in order
(given_changes.py), to be made again on the caller's own list.

A number that counts entries, such as the place of the next one, is handed out as a `Cursor`: adding to it and taking an
entry by it leaves it free, so that one artefact serves blocks at other places of the list. Any other use begins the
capture again with the number as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch

from ..modules.memory_format import is_plain
from ..modules.tree import PLAIN
from .option_recorder import At, Change, Path, ReadSet, Recording, Refused
from .sentinels import Sentinel, ValueUsed


class Cursor:
    """Stands for a number among what a block is given: `value` is what lies at `path`, and `plus` was added."""

    __slots__ = ("_log", "path", "plus", "value")

    def __init__(self, log: ReadSet, path: Path, value: int, plus: int = 0) -> None:
        self._log, self.path, self.value, self.plus = log, path, value, plus

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return int  # so that `isinstance(place, int)` is answered as for the number itself

    @property
    def now(self) -> int:
        """The number in the call that is captured."""
        return self.value + self.plus

    def as_it_is(self, *_args: Any, **_kwargs: Any) -> Any:
        self._log.want(self.path)  # code may catch what is raised here
        raise ValueUsed(self.path)

    def __add__(self, other: Any) -> Cursor:
        if type(other) is not int:
            self.as_it_is()
        return Cursor(self._log, self.path, self.value, self.plus + other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Cursor:
        return self + -other if type(other) is int else self.as_it_is()

    def __deepcopy__(self, _memo: Any) -> Cursor:
        return self

    @classmethod
    def __torch_function__(cls, _func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return next(_cursors_in((args, kwargs or {}))).as_it_is()


for _name in (
    "repr str bytes format hash bool complex int float index round trunc floor ceil neg pos abs invert rsub mul rmul "
    "matmul truediv rtruediv floordiv rfloordiv mod rmod divmod rdivmod pow rpow lshift rlshift rshift rrshift and "
    "rand or ror xor rxor lt le eq ne gt ge reduce_ex"
).split():
    setattr(Cursor, f"__{_name}__", Cursor.as_it_is)


def _cursors_in(value: Any) -> Iterator[Cursor]:
    if type(value) is Cursor:
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _cursors_in(item)
    elif isinstance(value, dict):
        yield from _cursors_in(list(value.values()))


class _Raw(Sentinel):
    """What code finds that reads the memory of a recorded list, as torch's parser of arguments does.

    Its use is that of the list: the capture begins again with the list opened, all of which counts as read then.
    """

    @classmethod
    def __torch_function__(cls, _func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            if isinstance(value, RecordedList):
                raise ValueUsed(value.path)
        raise Refused("it hands a list that it is given to torch inside another one")


class _Original:
    """An entry that is as it was given, by its place there."""

    __slots__ = ("place",)

    def __init__(self, place: int) -> None:
        self.place = place


def hand(log: ReadSet, path: Path, value: Any) -> Any:
    """What a block is shown of a value that it was given, now that it looks at it. The look is noted."""
    log.present[path] = True
    if path in log.admitted:
        return log.admitted[path]
    kind = type(value)
    if value is None:
        log.none[path] = True
    elif kind in PLAIN and kind is not int:
        log.flags[path] = value
    elif kind is int:
        log.kinds[path] = "int"
        return Cursor(log, path, value)
    elif isinstance(value, torch.Tensor):
        if not is_plain(value):
            raise Refused(f"it is given a list or a mapping that holds a tensor of {kind.__qualname__}, {value.layout}")
        log.want(path)  # from the next turn on it is an input; this one goes on, to find what else is
        return torch.empty(value.shape, dtype=value.dtype, device=value.device)
    elif kind is list:
        log.kinds[path] = "list"
        return log.one(path, lambda: RecordedList(value, path, log))
    elif kind is dict:
        log.mappings[path] = True
        return log.one(path, lambda: Recording(value, path, log))
    elif kind is tuple:
        log.kinds[path] = f"tuple of {len(value)}"
        return log.one(path, lambda: tuple(hand(log, (*path, i), item) for i, item in enumerate(value)))
    else:
        return Sentinel(path)
    return value


class RecordedList(list):
    """A list that reports what is read of it to a ReadSet, and notes what is put there.

    Entries are named by how code reaches them: by a place from the front or the end, or by a Cursor. Once entries came
    or went, only places from the front go on leading to what they led to; for any other the length is a guard.
    """

    def __init__(self, source: list[Any], path: Path, log: ReadSet) -> None:
        super().__init__()
        self._source, self.path, self._log = list(source), path, log
        self._items: list[Any] = [_Original(place) for place in range(len(source))]
        self._names: dict[int, Any] = {}  # by which entries were reached first
        self._shown: dict[int, Any] = {}  # what they are shown as
        self._is_still, self._is_counted = True, False  # no entry came or went; those that did are counted from the end
        if path in log.opened:
            self._exactly()
        self._fill()

    def _fill(self) -> None:
        """Have its memory be what code may find there that reads it past the methods."""
        opened = self.path in self._log.opened
        raw = [self._entry(item) for item in self._items] if opened else [_Raw(self.path) for _ in self._items]
        list.__setitem__(self, slice(None), raw)

    def _exactly(self) -> None:
        """Its length counts, and with it every place in it."""
        self._log.kinds[self.path] = "list"
        self._log.lengths[self.path] = len(self._source)

    def _entry(self, item: Any, name: Any = None) -> Any:
        """What an entry is shown as. name: by which it was reached, None for its place."""
        if type(item) is not _Original:
            return item
        place = item.place
        if place not in self._shown:
            name = self._names.setdefault(place, place if name is None else name)
            self._note(name, place)
            self._shown[place] = hand(self._log, (*self.path, name), self._source[place])
        return self._shown[place]

    def _note(self, name: Any, place: int) -> None:
        """Names have to lead to as many entries in later calls."""
        self._log.places.setdefault(self.path, {})[name] = place

    def _find(self, key: Any) -> tuple[int, Any]:
        """Where a key leads to, and the name of the entry that was given there; None where it is another.

        Raises IndexError where there is none.
        """
        place, name = self._reached(key)
        if not 0 <= place < len(self._items):
            if self._is_still:
                self._log.kinds[self.path] = "list"
                self._is_there(name, False)
            else:
                self._exactly()
            raise IndexError("list index out of range")
        item = self._items[place]
        if self._is_still:
            self._note(name, place)
            self._is_there(name, True)
            return place, name
        if type(item) is not _Original:
            self._exactly()
            return place, None
        self._is_there(item.place, True)
        return place, item.place

    def _is_there(self, name: Any, found: bool) -> None:
        path = (*self.path, name)
        self._log.present[path] = found

    def _reached(self, key: Any) -> tuple[int, Any]:
        if type(key) is Cursor:
            if not self._is_still or key.now < 0:
                key.as_it_is()
            self._log.least[key.path] = max(-key.plus, self._log.least.get(key.path, 0))  # less counts from the end
            return key.now, At(key.path, key.plus)
        name = operator.index(key)
        if not self._is_still and (name < 0 or self._is_counted):
            self._exactly()
        return (name + len(self._items) if name < 0 else name), name

    def _change(self, op: str, key: Any = None, value: Any = None) -> None:
        self._log.changes.append(Change(self.path, op, key, value))

    # -- reads -----------------------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return self.copy()[key]
        place, name = self._find(key)
        return self._entry(self._items[place], name)

    def __iter__(self) -> Iterator[Any]:
        self._exactly()
        place = 0
        while place < len(self._items):
            yield self._entry(self._items[place])
            place += 1

    def __len__(self) -> int:
        self._exactly()
        return len(self._items)

    def __bool__(self) -> bool:
        if not self._is_still:
            return len(self) > 0
        self._log.kinds[self.path] = "list"
        self._log.lengths.setdefault(self.path, -1 if self._source else 0)  # -1: any number but none
        return bool(self._items)

    def __reversed__(self) -> Iterator[Any]:
        return reversed(list(iter(self)))

    def __contains__(self, value: Any) -> bool:
        return value in list(iter(self))

    def index(self, *args: Any) -> int:
        return list(iter(self)).index(*args)

    def count(self, value: Any) -> int:
        return list(iter(self)).count(value)

    def copy(self) -> list[Any]:
        return list(iter(self))

    __copy__ = copy

    def __eq__(self, other: object) -> bool:
        return self is other or list(iter(self)) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Any) -> Any:
        return list(iter(self)) + list(other)

    def __radd__(self, other: Any) -> Any:
        return other + list(iter(self))

    def __mul__(self, times: Any) -> Any:
        return list(iter(self)) * times

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return repr(list(iter(self)))

    # -- changes ---------------------------------------------------------------------------------------------

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(key, slice):
            self._put_slice(key, list(value))
            return
        place, name = self._find(key)
        self._change("set", place if name is None or not self._is_still else name, value)
        self._items[place] = value
        self._fill()

    def _put_slice(self, key: slice, value: list[Any]) -> None:
        if any(type(one) not in (int, type(None)) for one in (key.start, key.stop, key.step)):
            raise Refused("it changes a part of a list that it is given, from a place that may vary")
        self._exactly()
        self._items[key] = value
        self._come_or_gone("slice", [key.start, key.stop, key.step], value, counted=True)

    def _come_or_gone(self, op: str, key: Any = None, value: Any = None, *, counted: bool) -> None:
        self._is_still, self._is_counted = False, self._is_counted or counted
        self._change(op, key, value)
        self._fill()

    def append(self, value: Any) -> None:
        self._items.append(value)
        self._come_or_gone("append", None, value, counted=False)

    def extend(self, values: Any) -> None:
        for value in list(values):
            self.append(value)

    def __iadd__(self, values: Any) -> Any:
        self.extend(values)
        return self

    def insert(self, key: Any, value: Any) -> None:
        self._exactly()
        place = operator.index(key)
        self._items.insert(place, value)
        self._come_or_gone("insert", place, value, counted=True)

    def pop(self, key: Any = -1) -> Any:
        place, name = self._find(key)
        found = self._entry(self._items[place], name)
        self._take(key, place)
        return found

    def __delitem__(self, key: Any) -> None:
        if isinstance(key, slice):
            self._put_slice(key, [])
        else:
            self._take(key, self._find(key)[0])

    def _take(self, key: Any, place: int) -> None:
        if type(key) is Cursor:
            key.as_it_is()
        del self._items[place]
        self._come_or_gone("del", operator.index(key), counted=key < 0)

    def clear(self) -> None:
        self._items.clear()
        self._come_or_gone("clear", counted=True)

    def _refuse(self, *_args: Any, **_kwargs: Any) -> Any:
        raise Refused("it puts a list that it is given in another order, or makes copies of all that it holds")

    remove = reverse = sort = __imul__ = __deepcopy__ = __reduce_ex__ = _refuse
