# SPDX-License-Identifier: Apache-2.0
"""Guards: what a capture read of its mappings, as rows that are stored, and the check that later calls have to pass.

option_recorder.py records; here a finished ReadSet becomes JSON-able rows, and rows become one function of a call's
mappings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..modules.module_keys import OfTree
from .option_recorder import (
    BOOKKEEPING,
    HERE,
    MISSING,
    At,
    OfThread,
    Path,
    ReadSet,
    Refused,
    is_plain,
    look,
    place_of,
    where,
)

Check = Callable[[list[Any]], bool]


def to_json(log: ReadSet) -> list[list[Any]]:
    """The guards of a finished capture as JSON-able rows. Paths hold plain keys only, else Refused."""
    rows: list[list[Any]] = []
    for path, found in log.present.items():
        rows.append(["present", json_path(path), found])
    for path, is_none in log.none.items():
        if path not in log.flags and (path in log.present or path in log.admitted):
            rows.append(["none" if is_none else "no constant", json_path(path), True])
    for path in log.mappings:
        rows.append(["mapping", json_path(path), True])
    for path, kind in log.kinds.items():
        rows.append(["kind", json_path(path), kind])
    for path, least in log.least.items():
        rows.append(["least", json_path(path), least])
    for path, names in log.places.items():
        if len(names) > 1:
            rows.append(["places", json_path(path), [list(map(json_key, names)), _pattern(list(names.values()))]])
    for path, keys in log.keys.items():
        rows.append(["order", json_path(path), list(keys)])
    for path, template, found in log.patched:
        rows.append(["patch" if found else "no patch", json_path(path), template])
    for path, count in log.lengths.items():
        rows.append(["length", json_path(path), count])
    for path, value in {**log.flags, **log.admitted}.items():
        if is_plain(value):
            rows.append(["value", json_path(path), _json_value(value)])
        elif not issubclass(type(value), torch.Tensor):  # it is called, whatever it is
            rows.append(["function", json_path(path), True])
    return rows


def json_path(path: Path) -> list[Any]:
    """A path as JSON can hold it. Raises Refused for other keys than plain ones."""
    if not all(map(_is_written, path)):
        raise Refused(f"it reads {where(path)}, whose key cannot be written down")
    return list(map(json_key, path))


def _is_written(key: Any) -> bool:
    if type(key) is tuple:
        return all(map(_is_written, key))
    return type(key) in (At, OfThread, OfTree) or is_plain(key)


def json_key(key: Any) -> Any:
    """One key of a path as JSON can hold it. Raises Refused."""
    if type(key) is At:
        return {"at": json_path(key.path), "plus": key.plus}
    if type(key) is OfThread:
        return {"thread": True}
    if type(key) is OfTree:
        return {"module": key.path}
    if not _is_written(key):
        raise Refused("it uses a key that cannot be written down")
    return list(map(json_key, key)) if type(key) is tuple else key


def from_json_path(raw: list[Any]) -> Path:
    """The path that `json_path` wrote."""
    return tuple(map(from_json_key, raw))


def from_json_key(raw: Any) -> Any:
    """The key that `json_key` wrote."""
    if isinstance(raw, dict):
        if "thread" in raw:
            return HERE
        if "module" in raw:
            return OfTree(raw["module"])
        return At(from_json_path(raw["at"]), raw["plus"])
    return tuple(map(from_json_key, raw)) if isinstance(raw, list) else raw


def _pattern(places: list[Any]) -> list[int]:
    """Which of some places are the same."""
    return [places.index(place) for place in places]


def _json_value(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return {"tuple" if isinstance(value, tuple) else "list": [_json_value(v) for v in value]}
    return value


def _from_json_value(value: Any) -> Any:
    if isinstance(value, dict):
        ((kind, items),) = value.items()
        return tuple(map(_from_json_value, items)) if kind == "tuple" else [_from_json_value(v) for v in items]
    return value


def same_value(value: Any, expected: Any) -> bool:
    """Equal in type and sign too: 1, 1.0 and True, or 0.0 and -0.0, take different branches in a block."""
    kind = type(value)
    if kind is not type(expected):
        return False
    if kind is float:
        return value.hex() == expected.hex()
    if isinstance(value, (tuple, list)):
        return len(value) == len(expected) and all(map(same_value, value, expected))
    return bool(value == expected)


def checker(rows: list[list[Any]]) -> Check:
    """A function that says whether a call's mappings answer every guard as the captured call did."""
    tests: list[Check] = []
    for kind, raw, expected in rows:
        tests.append(_test(kind, from_json_path(raw), expected))

    def check(mappings: list[Any]) -> bool:
        for test in tests:  # noqa: SIM110  # asked on every call: a generator in `all` takes twice the time
            if not test(mappings):
                return False
        return True

    return check


def _test(kind: str, path: Path, expected: Any) -> Check:
    if kind == "present":
        if len(path) == 2 and type(path[1]) is str:  # by far the most frequent: a key of the outermost mapping
            number, key = path
            return lambda maps: (key in maps[number]) is expected
        return lambda maps: (look(maps, path) is not MISSING) is expected
    if kind == "none":
        return lambda maps: look(maps, path) is None
    if kind == "no constant":  # which code tells by `is`
        return lambda maps: (value := look(maps, path)) is not None and type(value) is not bool
    if kind == "mapping":
        return lambda maps: isinstance(look(maps, path), dict)
    if kind == "order":
        return lambda maps: _in_order(look(maps, path)) == expected
    if kind in ("patch", "no patch"):
        return lambda maps: _patched(maps, path, expected, kind == "patch")
    if kind == "length":
        if expected == -1:
            return lambda maps: isinstance(m := look(maps, path), (dict, list)) and len(m) > 0
        return lambda maps: isinstance(m := look(maps, path), (dict, list)) and len(m) == expected
    if kind == "value":
        value = _from_json_value(expected)
        return lambda maps: same_value(look(maps, path), value)
    if kind == "function":
        return lambda maps: callable(look(maps, path))
    if kind == "kind":
        return lambda maps: _is_kind(look(maps, path), expected)
    if kind == "least":
        return lambda maps: type(n := look(maps, path)) is int and n >= expected
    if kind == "places":
        names, pattern = list(map(from_json_key, expected[0])), expected[1]
        return lambda maps: _leads_to(maps, look(maps, path), names) == pattern
    known = (
        "present, none, no constant, mapping, order, patch, no patch, length, value, function, kind, least or places"
    )
    raise ValueError(f"a guard of kind {kind!r} was found, expected {known}")


def _is_kind(value: Any, kind: str) -> bool:
    """Whether a value is of the exact kind that was captured: a list, a number, a tuple of so many."""
    if kind.startswith("tuple"):
        return type(value) is tuple and kind == f"tuple of {len(value)}"
    return type(value) is (list if kind == "list" else int)


def _leads_to(maps: Any, value: Any, names: list[Any]) -> list[int] | None:
    """Which names lead to the same entry of a list; None where one leads nowhere."""
    places = [place_of(maps, value, name) for name in names]
    return None if None in places else _pattern(places)


def _in_order(mapping: Any) -> list[str] | None:
    return [str(k) for k in mapping if k not in BOOKKEEPING] if isinstance(mapping, dict) else None


def _key_now(template: list[Any], maps: Any) -> Any:
    """The key that code would make of a call's mappings. Raises TypeError, IndexError where it would make none."""
    kind, *parts = template
    if kind == "plain":
        return parts[0]
    if kind == "tuple":
        return tuple([_key_now(part, maps) for part in parts])
    value = look(maps, tuple(parts[0]))
    for number in parts[1]:
        if type(value) is not tuple:
            raise TypeError(f"expected a tuple, got a {type(value).__qualname__}")
        value = value[number]
    if type(value) not in (tuple, int, str):
        raise TypeError(f"expected what says where a block sits, got a {type(value).__qualname__}")
    return value


def _patched(maps: Any, path: Path, template: list[Any], found: bool) -> bool:
    """Whether a mapping answers as captured to the key that code makes of where the block sits."""
    mapping = look(maps, path)
    try:
        return isinstance(mapping, dict) and (_key_now(template, maps) in mapping) is found
    except (TypeError, IndexError):
        return False
