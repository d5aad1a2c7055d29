# SPDX-License-Identifier: Apache-2.0
"""Dependences: what code reaches by name while it is captured, and whether all of it is still what it was.

A function that others replace (`F.scaled_dot_product_attention`, a class's `forward`), a value in a module, a function
in a registry or a closure are dependences of an artefact like an attribute of its block. `capture/reached_names.py`
lists them after a capture: an address and a digest each. `Watched` holds the places of all addresses that an engine's
artefacts depend on, and compares them by identity, each once a step. Only where one differs are digests compared again.
"""

from __future__ import annotations

import importlib
import sys
import threading
import weakref
from collections.abc import Sequence
from contextvars import ContextVar
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

from .bytecode_names import IMPORT
from .name_resolver import (
    CELL_CONTENT,
    CODE,
    FIELD,
    TABLE,
    Place,
    Resolver,
    Row,
    address_of,
    content_of,
    field_of,
    text_of,
)
from .option_recorder import MISSING
from .value_digests import cell_contents, digest

_CODE_OF = attrgetter("__code__")


def _is_of_a_thread(value: object) -> bool:
    """Whether what a value holds is another thing in other threads or contexts."""
    return isinstance(value, (ContextVar, threading.local))


class Watched:
    """The places that an engine's artefacts depend on, each once.

    changes: how often something else was found in one of them. epoch: a number that is another one after that, and when
    places were given up. The places of a new dependence are added to those that are there: a start binds dozens of
    artefacts, and comparing all places anew for each took a tenth of a warm one.
    """

    def __init__(self) -> None:
        self.epoch = self.changes = 0
        self._dependences: weakref.WeakSet[Dependence] = weakref.WeakSet()
        self._numbers: dict[tuple[int, int, Any], int] = {}  # of a place in its group: by group, holder and name
        self._numbered = 0  # dependences that have such numbers
        self._stale = False  # the places are no longer those of the dependences
        self._lock = threading.RLock()  # several threads may step at once
        self._holders: list[list[Any]] = [[] for _ in _GROUPS]
        self._names: list[list[Any]] = [[] for _ in _GROUPS]
        self._now: list[list[Any]] = [[] for _ in _GROUPS]

    def __len__(self) -> int:
        return sum(map(len, self._holders))

    def add(self, dependence: Dependence) -> None:
        """Watch the places of a dependence, which may have others than before."""
        with self._lock:
            if self._stale or dependence in self._dependences or len(self._dependences) != self._numbered:
                self._stale = True
            else:
                self._number(dependence)
            self._dependences.add(dependence)

    def look(self) -> None:
        """Compare all places with what was in them the last time."""
        with self._lock:
            self._look()

    def _look(self) -> None:
        if self._stale:
            self._rebuild()
            return
        for group, read in enumerate(_GROUPS):
            now = self._now[group]
            if not now:
                continue
            found = read(self._holders[group], self._names[group])
            same = map(is_, found, now) if group in _SINGLE else map(_same_items, found, now)
            if not all(same):
                self._now[group] = found
                self.epoch += 1
                self.changes += 1

    def _rebuild(self) -> None:
        self._stale = False
        before = {
            (group, id(holder), name): value
            for group, found in enumerate(zip(self._holders, self._names, self._now, strict=True))
            for holder, name, value in zip(*found, strict=True)
        }
        self._numbers, self._numbered = {}, 0
        self._holders, self._names, self._now = ([[] for _ in _GROUPS] for _ in range(3))
        for dependence in list(self._dependences):
            self._number(dependence)
        self.epoch += 1
        self.changes += any(
            key in before and not self._is_same(key[0], before[key], self._now[key[0]][number])
            for key, number in self._numbers.items()
        )

    def _number(self, dependence: Dependence) -> None:
        """Watch the places of one more dependence, as far as they are not watched yet."""
        found, watched = [], [len(holders) for holders in self._holders]
        for group, holder, name in dependence.places:
            key = (group, id(holder), name)
            number = self._numbers.get(key)
            if number is None:
                number = self._numbers[key] = len(self._holders[group])
                self._holders[group].append(holder)
                self._names[group].append(name)
            found.append((group, number))
        dependence.numbers = found
        self._numbered += 1
        for read, holders, names, now, start in zip(
            _GROUPS, self._holders, self._names, self._now, watched, strict=True
        ):
            if len(holders) > start:
                now += read(holders[start:], names[start:])

    @staticmethod
    def _is_same(group: int, one: Any, other: Any) -> bool:
        return one is other or (group not in _SINGLE and _same_items(one, other))

    def holds(self, dependence: Dependence) -> bool:
        """Whether the places of a dependence hold what they held when it was resolved."""
        with self._lock:
            if self._stale:
                self._rebuild()
            now = self._now
            return all(
                self._is_same(group, now[group][number], value)
                for (group, number), value in zip(dependence.numbers, dependence.values, strict=True)
            )


def _in_tables(tables: list[Any], names: list[Any]) -> list[Any]:
    return list(map(dict.get, tables, names, repeat(MISSING)))


def _in_cells(cells: list[Any], _names: list[Any]) -> list[Any]:
    return list(map(cell_contents, cells))


def _in_fields(objects: list[Any], names: list[Any]) -> list[Any]:
    return list(map(field_of, objects, names))


def _in_functions(functions: list[Any], _names: list[Any]) -> list[Any]:
    return list(map(_CODE_OF, functions))


def _in_containers(containers: list[Any], _names: list[Any]) -> list[Any]:
    return list(map(content_of, containers))


# by the number of their group
_GROUPS = (_in_tables, _in_cells, _in_fields, _in_functions, _in_containers)
_SINGLE = (TABLE, CELL_CONTENT, FIELD, CODE)  # whose values are compared by identity, and not item by item


def _same_items(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))


class Dependence:
    """What one artefact depends on by name, for blocks of the same classes in one engine.

    places, values: where its names led through when it was resolved last, and what was there. What each thread or
    context has for itself, as in a ContextVar, is no place that is watched: it is compared where it is asked, and each
    thread that asks has a dependence of its own then.
    """

    def __init__(self, rows: Sequence[Row], classes: tuple[type, ...], watched: Watched, *, deep: bool = True) -> None:
        self._deep = deep  # as the rows were made
        self._rows, self._classes, self._watched = rows, classes, watched
        self.places: list[Place] = []
        self.values: list[Any] = []
        self.numbers: list[tuple[int, int]] = []  # of its places among those that are watched
        self._own: list[tuple[Place, Any]] = []  # places that each thread has for itself, and what this one had
        self._of_threads = threading.local()
        self._differs: str | None = None
        self._resolve()
        self._epoch = -1

    def holds(self) -> bool:
        """Whether all names lead to what they led to at capture, as far as the engine looked."""
        if self._own:
            return self._here()._holds()
        if self._epoch == self._watched.epoch:  # asked in each call
            return self._differs is None
        return self._holds()

    @property
    def differs(self) -> str | None:
        """The first name that leads to another thing than at capture, for this thread."""
        return self._here()._differs if self._own else self._differs

    def _here(self) -> Dependence:
        """The same for this thread alone."""
        found: Dependence | None = getattr(self._of_threads, "found", None)
        if found is None:
            found = self._of_threads.found = Dependence(self._rows, self._classes, self._watched, deep=self._deep)
        return found

    def _holds(self) -> bool:
        same = all(_is_there(place, value) for place, value in self._own)
        if not same or self._epoch != self._watched.epoch:
            if not same or self._differs is not None or not self._watched.holds(self):
                self._resolve()
            self._epoch = self._watched.epoch
        return self._differs is None

    def look(self) -> None:
        """Compare all places that are watched with what was in them the last time."""
        self._watched.look()

    def _resolve(self) -> None:
        resolver = Resolver(self._classes, deep=self._deep)
        self._differs = next((text_of(row) for row in self._rows if not _fits(row, resolver, self._deep)), None)
        found = list(zip(resolver.places, resolver.values, strict=True))
        self._own = [one for one in found if _is_of_a_thread(one[0][1])]
        shared = [one for one in found if not _is_of_a_thread(one[0][1])] if self._own else found
        before, self.places, self.values = self.places, [place for place, _ in shared], [value for _, value in shared]
        if self._differs is not None:  # it is resolved again on any change, and keeps nothing alive until then
            self.places, self.values = [place for place in self.places if place[0] == TABLE], []
        if len(before) != len(self.places) or not all(map(_same_place, before, self.places)):
            self._watched.add(self)


def _is_there(place: Place, value: Any) -> bool:
    """Whether a place that each thread has for itself holds a value for this one."""
    group, holder, name = place
    (now,) = _GROUPS[group]([holder], [name])
    return now is value or (group not in _SINGLE and _same_items(now, value))


class Epoch:
    """Holds as long as nothing that is watched changes."""

    def __init__(self, watched: Watched) -> None:
        self._watched, self._changes = watched, watched.changes

    def holds(self) -> bool:
        """Whether nothing changed since."""
        return self._watched.changes == self._changes


def _same_place(one: Place, other: Place) -> bool:
    return one[0] == other[0] and one[1] is other[1] and one[2] == other[2]


def _fits(row: Row, resolver: Resolver, deep: bool) -> bool:
    try:
        if digest(resolver.ends(address_of(row)), deep=deep)[0] == row[2]:
            return True
        return _import_library(row) and digest(resolver.ends(address_of(row)), deep=deep)[0] == row[2]
    except Exception:
        # code of others ran, such as a `__repr__` or a `__getattr__`: what cannot be compared is another thing
        return False


def _import_library(row: Row) -> bool:
    """Import what code imports when it runs, where torch or Python has it. Whether there is such a module now."""
    kind, name = row[1][0]
    package = str(name).partition(".")[0]
    if kind != IMPORT or name in sys.modules or not (package == "torch" or package in sys.stdlib_module_names):
        return False
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True
