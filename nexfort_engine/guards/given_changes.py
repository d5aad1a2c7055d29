# SPDX-License-Identifier: Apache-2.0
"""What a block does to lists and mappings that it is given, as rows that are stored, and how it is done again.

A capture notes the changes in their order (list_recorder.py, option_recorder.py). After each call of the artefact they
are made on the caller's own containers, all of them after its code has ended: a call that fails leaves nothing half
written. What is put there is named and not kept: a tensor of the call, an entry that is there, a result of the code.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..modules.module_keys import real
from ..modules.tree import PLAIN
from .list_recorder import Cursor, RecordedList
from .option_guards import from_json_key, from_json_path, json_key, json_path
from .option_recorder import HERE, At, Change, Recording, Refused, look, place_of
from .sentinels import Sentinel

_VALUES = ("set", "append", "insert", "slice", "put")


class Names:
    """Names for what a block puts into containers that it is given.

    given: the tensors of the call by their ids. held: those that lie in its containers, by their ids, with their paths.
    made: the results of the code; what is put away and is none of these becomes one more. key: gives the names of keys
    that are modules.
    """

    def __init__(
        self,
        given: Sequence[torch.Tensor],
        held: Mapping[int, Sequence[Any]],
        made: list[torch.Tensor],
        key: Callable[[Any], Any],
    ) -> None:
        self.made, self._held, self._key = made, held, key
        self._given = {id(tensor): i for i, tensor in enumerate(given)}
        self._sizes: dict[str, list[int]] = {}
        for i, tensor in enumerate(given):
            for d, size in enumerate(tensor.shape):
                if isinstance(size, torch.SymInt):
                    self._sizes.setdefault(str(size.node.expr), [i, d])
        self._containers: list[Any] = []  # new ones, each of which stays one

    def of(self, value: Any) -> dict[str, Any]:
        """The name of a value. Raises Refused for what has none."""
        kind = type(value)
        if kind is Cursor:
            return {"at": json_path(value.path), "plus": value.plus}
        if kind is RecordedList or kind is Recording or isinstance(value, Sentinel):
            return self._of_container(value)
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value)
        if kind is torch.SymInt and (place := self._sizes.get(str(value.node.expr))) is not None:
            return {"size": place}
        if kind in (list, dict, tuple):
            return self._of_new(value)
        if kind in PLAIN:
            return {"plain": value}
        raise Refused(f"it puts a {kind.__qualname__} into a list or a mapping that it is given")

    def _of_container(self, value: Any) -> dict[str, Any]:
        if type(value) is Recording and value.is_copy:
            raise Refused("it keeps a copy of a mapping that it is given")
        path = object.__getattribute__(value, "_path" if not isinstance(value, RecordedList) else "path")
        return {"of": json_path(path)}

    def _of_tensor(self, value: torch.Tensor) -> dict[str, Any]:
        if id(value) in self._given:
            return {"given": self._given[id(value)]}
        if id(value) in self._held:
            return {"of": json_path(tuple(self._held[id(value)]))}
        place = next((i for i, one in enumerate(self.made) if one is value), len(self.made))
        if place == len(self.made):
            self.made.append(value)
        return {"made": place}

    def _of_new(self, value: Any) -> dict[str, Any]:
        known = next((i for i, one in enumerate(self._containers) if one is value), None)
        if known is not None:
            return {"same": known}
        self._containers.append(value)
        number = len(self._containers) - 1
        if type(value) is dict:
            return {"new": number, "dict": [[json_key(self._key(key)), self.of(item)] for key, item in value.items()]}
        return {"new": number, type(value).__name__: [self.of(item) for item in value]}


def rows_of(changes: Sequence[Change], names: Names) -> list[list[Any]]:
    """Changes as rows (operation, path of the container, key, name of the value). Raises Refused."""
    rows = []
    threads = {number for thread in threading.enumerate() for number in (thread.ident, thread.native_id)}
    for change in _needed(changes):
        if type(change.key) is int and change.op == "put" and change.key in threads:
            raise Refused("it keeps things by the number of a thread, which the capture ran on in the place of its own")
        value = names.of(change.value) if change.op in _VALUES else None
        key = change.key if change.op == "slice" else json_key(change.key)
        rows.append([change.op, json_path(change.path), key, value])
    return rows


def _needed(changes: Sequence[Change]) -> list[Change]:
    """Changes without those that another one makes undone: an entry of a list that is set twice, and nothing else."""
    moved = {change.path for change in changes if change.op not in ("set", "put", "remove")}
    last = {(change.path, change.key): i for i, change in enumerate(changes) if change.op == "set"}
    return [
        change
        for i, change in enumerate(changes)
        if change.op != "set" or change.path in moved or last[change.path, change.key] == i
    ]


Rows = list[tuple[str, Any, Any, Any]]


def parsed(rows: Sequence[Sequence[Any]]) -> Rows:
    """Stored rows as `make_again` takes them."""
    return [
        (op, from_json_path(path), key if op == "slice" else from_json_key(key), value) for op, path, key, value in rows
    ]


def make_again(rows: Rows, mappings: list[Any], given: Sequence[torch.Tensor], made: Sequence[Any]) -> None:
    """Make the changes on a call's own containers. made: what the code gave.

    All names are followed before the first change, which may lead them elsewhere.
    """
    values = _Values(mappings, given, made)
    due: list[tuple[Callable[..., Any], Any, Any, Any]] = []
    for op, path, key, value in rows:
        container = look(mappings, path)
        key = place_of(mappings, container, key) if type(key) is At else _real(key, mappings)
        due.append((_OPERATIONS[op], container, key, values.of(value) if op in _VALUES else None))
    for make, container, key, value in due:
        make(container, key, value)


class _Values:
    def __init__(self, mappings: list[Any], given: Sequence[torch.Tensor], made: Sequence[Any]) -> None:
        self._mappings, self._given, self._made = mappings, given, made
        self._new: dict[int, Any] = {}

    def of(self, name: Mapping[str, Any]) -> Any:
        """The value of a name."""
        if "made" in name:
            return self._made[name["made"]]
        if "plain" in name:
            return name["plain"]
        if "at" in name:
            return look(self._mappings, from_json_path(name["at"])) + name["plus"]
        if "given" in name:
            return self._given[name["given"]]
        if "of" in name:
            return look(self._mappings, from_json_path(name["of"]))
        if "size" in name:
            i, d = name["size"]
            return self._given[i].shape[d]
        if "same" in name:
            return self._new[name["same"]]
        return self._made_new(name)

    def _made_new(self, name: Mapping[str, Any]) -> Any:
        if "dict" in name:
            found: Any = {_real(from_json_key(key), self._mappings): self.of(item) for key, item in name["dict"]}
        else:
            found = [self.of(item) for item in name["list" if "list" in name else "tuple"]]
            found = tuple(found) if "tuple" in name else found
        self._new[name["new"]] = found
        return found


def _real(key: Any, mappings: Any) -> Any:
    return threading.get_ident() if key is HERE else real(key, mappings)


def _delete(container: Any, key: Any, _value: Any) -> None:
    del container[key]


_OPERATIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "set": lambda container, key, value: container.__setitem__(key, value),
    "put": lambda container, key, value: container.__setitem__(key, value),
    "slice": lambda container, key, value: container.__setitem__(slice(*key), value),
    "append": lambda container, _key, value: container.append(value),
    "insert": lambda container, key, value: container.insert(key, value),
    "clear": lambda container, _key, _value: container.clear(),
    "del": _delete,
    "remove": _delete,
}
