# SPDX-License-Identifier: Apache-2.0
"""Read-set guards of mappings: what a block consulted in `transformer_options` and the like, and what it found.

While a block is captured each mapping it is given is a `Recording`. Whatever the block asks of it (is the key there, is
it None, which keys are there, what is the value) becomes a guard; a later call whose mapping answers every guard the
same may use the artefact. Recording survives `in`, `get`, `[]`, `len`, iteration, `.items()`, `.copy()`, `dict(d)` and
`{**d}`: a dict subclass that overrides `__iter__` makes CPython take the generic path there, and should anything copy
the raw storage, it copies sentinels.

A present value is handed out as a *sentinel* that raises on any use but identity: fetching `sigmas` into a copy and
never looking at it is not a dependency. On use, the capture is begun again with that path admitted: a plain value
becomes a guard by value, a tensor becomes one more input of the artefact, anything else (a callable, an object) ends
the capture with the reason: such a block runs eager.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..modules.memory_format import is_plain as is_plain_tensor
from ..modules.module_keys import OfTree, holds_module, is_by_modules, real
from ..modules.tree import PLAIN
from .sentinels import Path, Place, Sentinel, ValueUsed, place_in, resolved, template_of

# What the sampler and the networks write on every step for their own bookkeeping (facts measured over 13 families).
# Their presence is no guard where a block merely walks over all keys; a block that looks one of them up by name, or
# uses its value, is guarded on it like on any other.
BOOKKEEPING = frozenset(
    "cond_or_uncond uuids sigmas sample_sigmas wrappers callbacks prefetch_dynamic_vbars multigpu_thread_device "
    "original_shape activations_shape transformer_index block block_index block_type total_blocks img_slice".split()
)

MISSING = object()


class Here:
    """A key that is the number of the thread that makes the call, as mappings are looked up with it."""

    def __hash__(self) -> int:
        return hash(threading.get_ident())

    def __eq__(self, other: object) -> bool:
        return other is self or other == threading.get_ident()


HERE = Here()


class OfThread(int):
    """What a block that is captured gets for the number of its thread: that of the call's."""


class At(NamedTuple):
    """A key of a list: the number that lies at a path, and some more."""

    path: Path
    plus: int


@dataclass
class Change:
    """What a block did to a list or a mapping that it was given. path: of the container; op: see given_changes.py."""

    path: Path
    op: str
    key: Any = None
    value: Any = None


class Refused(Exception):
    """The block depends on something that no artefact can hold. The text is the reason for the report."""


class ReadSet:
    """What one capture read. `admitted` maps the paths whose values were used to the value the block may see.

    shown: what a block that changes lists and mappings is shown of what lies in them (list_recorder.py), None where it
    changes none. opened: the lists that are read as a whole. named: gives the names of keys that are modules.
    """

    def __init__(
        self,
        admitted: Mapping[Path, Any],
        shown: Callable[..., Any] | None = None,
        opened: Collection[Path] = (),
        named: Callable[[Any], Any] | None = None,
    ) -> None:
        self.admitted, self._shown, self.opened, self._named = admitted, shown, opened, named
        self.changes: list[Change] = []  # of what it was given, in their order
        self.wanted: list[Path] = []  # used and not yet admitted
        self.kinds: dict[Path, str] = {}  # "list", "int", "tuple of 2"
        self.least: dict[Path, int] = {}  # what numbers that pick entries have to be at least
        self.places: dict[Path, dict[Any, int]] = {}  # of lists: by which names entries were reached, and their places
        self._one: dict[Path, Any] = {}
        self.present: dict[Path, bool] = {}
        self.none: dict[Path, bool] = {}
        self.handed: dict[Path, bool] = {}  # what was fetched as a sentinel: whether it is data or plain
        self.keys: dict[Path, tuple[str, ...]] = {}
        self.walks: dict[Path, Mapping[Any, Any]] = {}  # the mappings that were walked over
        self.lengths: dict[Path, int] = {}
        self.nested: list[Recording] = []  # the mappings inside mappings, which copies share with the caller
        self.patched: list[tuple[Path, list[Any], bool]] = []  # keys made of places, and whether they were there
        self.flags: dict[Path, bool] = {}
        self.mappings: dict[Path, bool] = {}

    def key(self, key: Any) -> Any:
        """A key that the block uses, as paths have it. Raises Refused for a module that has no name."""
        return self._named(key) if self._named is not None and holds_module(key) else key

    def walked(self, path: Path, mapping: Mapping[Any, Any]) -> None:
        if is_by_modules(mapping):
            raise Refused(f"it walks over {where(path)}, whose keys are modules")
        self.walks[path] = mapping
        self.keys[path] = tuple([str(k) for k in mapping if k not in BOOKKEEPING])

    def looked_up(self, path: Path, found: bool) -> None:
        self.present.setdefault(path, found)

    @property
    def changeable(self) -> bool:
        """Whether the block may change what it is given."""
        return self._shown is not None

    def show(self, path: Path, value: Any) -> Any:
        """What the block is shown of a value that may change."""
        assert self._shown is not None
        return self._shown(self, path, value)

    def stood_for(self, *, foreign: bool) -> list[Path]:
        """The values that were fetched by name and never used, which code has in its hands as something else.

        foreign: what is neither data nor plain as well.
        """
        found = [path for path in self.handed if path not in self.admitted and path[:-1] not in self.keys]
        return [path for path in found if foreign or self.handed[path]]

    def want(self, path: Path) -> None:
        """Have the capture begin again with a value admitted, also where code catches what is raised."""
        if path not in self.wanted:
            self.wanted.append(path)

    def one(self, path: Path, make: Callable[[], Any]) -> Any:
        """What stands for a container, the same wherever it is reached."""
        if path not in self._one:
            self._one[path] = make()
        return self._one[path]

    def met(self, path: Path) -> bool:
        """Whether a key that is fetched was met while walking over all keys; the set of keys guards it then."""
        return path[:-1] in self.keys and path[-1] in BOOKKEEPING


class Recording(dict):
    """A dict that reports every read of it to a ReadSet, and keeps writes apart (`written`)."""

    is_copy = False  # the block's own, and not the caller's

    def __init__(self, source: Mapping[Any, Any], path: Path, log: ReadSet, written: dict[Any, Any] | None = None):
        super().__init__()
        self._source, self._path, self._log = source, path, log
        if len(path) > 1:
            log.nested.append(self)
        self.written: dict[Any, Any] = {} if written is None else written
        self.removed: set[Any] = set()
        for key, value in source.items():
            dict.__setitem__(self, key, self._wrap(key, value))
        for key, value in self.written.items():
            dict.__setitem__(self, key, value)

    def real(self) -> dict[Any, Any]:
        """The content as a plain dict, without recording: for code that guards its reads by itself."""
        return {**{k: v for k, v in self._source.items() if k not in self.removed}, **self.written}

    def _wrap(self, key: Any, value: Any) -> Any:
        path = (*self._path, key)
        if path in self._log.admitted:
            return self._log.admitted[path]
        if isinstance(value, Recording):
            return value
        if isinstance(value, dict):
            if self._log.changeable:
                return self._log.one(path, lambda: Recording(value, path, self._log))
            return Recording(value, path, self._log)
        if key in BOOKKEEPING and type(value) in (tuple, int, str):
            return Place(path, value)
        # code may compare a flag by identity, which no sentinel notices; it is guarded by value where it is read
        if value is None or (type(value) is bool and key not in BOOKKEEPING):
            return value
        return Sentinel(path)

    def _place(self, key: Any) -> bool:
        """Whether a key is made of a Place and is not in this mapping, so that its value does not matter.

        Raises Refused where others put code under it.
        """
        path = place_in(key)
        if path is None:
            return False
        if not self._source and not self.written:
            self._log.lengths[self._path] = 0
            return True
        template = template_of(key)
        if template is None or self.written or self.removed:
            raise ValueUsed(path)
        value = self._source.get(resolved(key), MISSING)
        row = (self._path, template, value is not MISSING)
        if row not in self._log.patched:
            self._log.patched.append(row)
        if value is MISSING:
            return True
        if isinstance(value, torch.Tensor) or is_plain(value):
            raise ValueUsed(path)
        # refused here, without a word on which block it is: the same refusal serves all that are replaced
        what = f"{where(self._path)} at the key of its own place ({describe_foreign(value)})"
        raise Refused(f"it uses {what}, which compiled code cannot hold")

    def _read(self, key: Any, *, fetched: bool = False) -> Any:
        """Log the look-up of one key and give what the block may see, or MISSING. `fetched`: as `mapping[key]`."""
        key = self._log.key(key)
        if self._place(key):
            return MISSING
        if key in self.written:
            return self.written[key]
        found = dict.__contains__(self, key)
        path = (*self._path, key)
        if key not in self.removed and not (fetched and found and self._log.met(path)):
            self._log.looked_up(path, found)
            if found:
                value = self._source.get(key)
                self._log.none[path] = value is None
                if type(value) is bool:
                    self._log.flags[path] = value
                elif isinstance(value, dict):
                    self._log.mappings[path] = True
                elif self._log.changeable and self._is_data(value) and key not in BOOKKEEPING:
                    return self._log.show(path, value)
        if not found:
            return MISSING
        value = dict.__getitem__(self, key)
        if type(value) is Sentinel:
            given = self._source.get(key)
            self._log.handed[path] = isinstance(given, torch.Tensor) or is_plain(given)
        return value

    def _is_data(self, value: Any) -> bool:
        return type(value) in (int, list, tuple) or isinstance(value, torch.Tensor)

    def _change(self, op: str, key: Any, value: Any = None) -> None:
        if not self.is_copy:
            self._log.changes.append(Change(self._path, op, key, value))

    def __contains__(self, key: Any) -> bool:
        key = self._log.key(key)
        if self._place(key):
            return False
        if key not in self.written and key not in self.removed:
            self._log.looked_up((*self._path, key), dict.__contains__(self, key))
        return dict.__contains__(self, key)

    def __getitem__(self, key: Any) -> Any:
        value = self._read(key, fetched=True)
        if value is MISSING:
            raise KeyError(key)
        return value

    def get(self, key: Any, default: Any = None) -> Any:
        value = self._read(key)
        return default if value is MISSING else value

    def __iter__(self) -> Iterator[Any]:
        self._log.walked(self._path, self._source)
        return dict.__iter__(self)

    def keys(self) -> Any:
        self._log.walked(self._path, self._source)
        return dict.keys(self)

    def values(self) -> Any:
        return [self[k] for k in self]

    def items(self) -> Any:
        return [(k, self[k]) for k in self]

    def __len__(self) -> int:
        # bookkeeping keys come and go; code that counts keys depends on all of them
        self._log.lengths[self._path] = len(self._source)
        for key in (*self.written, *self.removed):
            self._log.looked_up((*self._path, key), key in self._source)
        return dict.__len__(self)

    def __bool__(self) -> bool:
        if self.written or self.removed:
            return len(self) > 0
        self._log.lengths.setdefault(self._path, -1 if self._source else 0)  # -1: any number but none
        return dict.__len__(self) > 0

    def __eq__(self, other: object) -> bool:
        return dict(self.items()) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]

    def __reversed__(self) -> Iterator[Any]:
        return reversed(list(self))

    def copy(self) -> Recording:
        new = Recording(self._source, self._path, self._log, dict(self.written))
        new.is_copy = True
        for key in self.removed:
            dict.pop(new, key, None)
            new.removed.add(key)
        return new

    __copy__ = copy

    def __deepcopy__(self, _memo: Any) -> Recording:
        return self.copy()

    def __or__(self, other: Any) -> Any:
        new = self.copy()
        new.update(other)
        return new

    def __ror__(self, other: Any) -> Any:
        return {**other, **self}

    def __setitem__(self, key: Any, value: Any) -> None:
        key = self._log.key(key)
        self._change("put", key, value)
        self.written[key] = value
        self.removed.discard(key)
        dict.__setitem__(self, key, value)

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def setdefault(self, key: Any, default: Any = None) -> Any:
        value = self._read(key)
        if value is MISSING:
            self[key] = value = default
        return value

    def pop(self, key: Any, *default: Any) -> Any:
        value = self._read(key)
        if value is MISSING:
            if default:
                return default[0]
            raise KeyError(key)
        del self[key]
        return value

    def popitem(self) -> Any:
        raise Refused(f"it takes an arbitrary item out of {where(self._path)}")

    def clear(self) -> None:
        for key in list(self):
            del self[key]

    def __delitem__(self, key: Any) -> None:
        key = self._log.key(key)
        if self._read(key) is MISSING:
            raise KeyError(key)
        self._change("remove", key)
        self.written.pop(key, None)
        self.removed.add(key)
        dict.pop(self, key)


def where(path: Path) -> str:
    """A path as a user would write it: options['patches']['attn1_patch']."""
    return "options" + "".join("[...]" if type(key) is At else f"[{key!r}]" for key in path[1:])


def look(mappings: list[Any] | tuple[Any, ...], path: Path) -> Any:
    """The value at a path, or MISSING."""
    value: Any = mappings[path[0]]
    for key in path[1:]:
        if type(key) is OfTree or type(key) is tuple:
            key = real(key, mappings)
        if isinstance(value, dict):
            if not dict.__contains__(value, key):
                return MISSING
            value = dict.__getitem__(value, key)
        else:
            place = place_of(mappings, value, key)
            if place is None:
                return MISSING
            value = value[place]
    return value


def place_of(mappings: list[Any] | tuple[Any, ...], value: Any, key: Any) -> int | None:
    """Where a key leads to in a list or a tuple; None where it leads nowhere."""
    if type(value) not in (list, tuple):
        return None
    place: Any = key
    if type(key) is At:
        base = look(mappings, key.path)
        place = base + key.plus if type(base) is int else -1
        return place if 0 <= place < len(value) else None
    if type(place) is not int or not -len(value) <= place < len(value):
        return None
    return place + len(value) if place < 0 else place


def admit(mappings: list[Any], path: Path) -> Any:
    """What becomes of a value that is used: a plain value or a tensor is returned, anything else refused."""
    value = look(mappings, path)
    if is_plain_tensor(value) if isinstance(value, torch.Tensor) else is_plain(value):
        return value
    raise Refused(cannot_hold(path, value, isinstance(mappings[path[0]], dict)))


def cannot_hold(path: Path, value: Any, of_options: bool = True) -> str:
    """The reason for a value that is neither data nor plain."""
    place = where(path) if of_options else "an entry of a list that it is given"
    return f"it uses {place} ({describe_foreign(value)}), which compiled code cannot hold"


def is_plain(value: Any) -> bool:
    if type(value) in PLAIN:
        return True
    return type(value) in (tuple, list) and all(is_plain(v) for v in value)


def describe_foreign(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {', '.join(sorted({type(v).__qualname__ for v in value})) or 'nothing'}"
    name = getattr(value, "__qualname__", None)
    return f"{name}()" if name and callable(value) else f"a {type(value).__qualname__}"
