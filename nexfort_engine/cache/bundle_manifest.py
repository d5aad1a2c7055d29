# SPDX-License-Identifier: Apache-2.0
"""`bundle.json`: what a bundle says it holds, and everything that must be true of that text before it is used.

The text has one form only, and its own SHA-256 in it: what reads differently from what would be written again is
refused. That finds damage and ambiguity, not malice; whoever makes a bundle can make it consistent, which is why
importing one needs trust. It opens no file and knows no tar.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .bundle_tar import SIZE_LIMIT, quoted
from .entry import MANIFEST_LIMIT, OtherSchemaError, check_manifest, is_key, manifest_text, parse_time
from .payload import TornError

NAME = "bundle.json"
SCHEMA = 1
LIMIT = 16 << 20  # bytes of bundle.json: some thousand entries; more are exported in several bundles
# Text in which values are shorter than this on average takes many times its size in memory. Manifests have twice as
# many bytes for each, and a short text may have less.
_BYTES_OF_A_VALUE = 6
_SHORT = 4096
_NAME_LIMIT = 1024  # bytes of a payload file's name
_PART_LIMIT = 255  # bytes of one part of it: no usual file system takes more
_KEYS = {"schema", "created", "made_by", "machines", "entries", "digest"}
# Names that Windows takes for devices, whatever follows the first dot.
_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


@dataclass(frozen=True)
class Bundle:
    """What a bundle says it holds. `entries` are the manifests in the order of their files; `bytes` counts payload.

    `created` is readable UTC text and `made_by` readable versions and host; both say what the maker wrote there.
    """

    created: str
    made_by: dict[str, str]
    entries: list[dict[str, Any]]
    fingerprints: set[str]
    machines: list[dict[str, Any]]
    bytes: int

    def files(self) -> Iterator[tuple[dict[str, Any], str, int, str]]:
        """(manifest, name, bytes, SHA-256) of every payload file, in the order in which they must come."""
        for manifest in self.entries:
            for name, (size, digest) in files_of(manifest):
                yield manifest, name, size, digest


def write(created: str, made_by: Mapping[str, str], manifests: Sequence[Mapping[str, Any]]) -> bytes:
    """The text of bundle.json for sound manifests (`problem` is None); ValueError if it is larger than `LIMIT`."""
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "created": created,
        "made_by": dict(made_by),
        "machines": machines_of(manifests),
        "entries": list(manifests),
    }
    text = _dump(content | {"digest": _digest(content)})
    if len(text) > LIMIT:
        raise ValueError(
            f"found {len(text)} bytes of manifests, expected at most {LIMIT}: export fewer entries at once"
        )
    if (dense := _dense(text)) is not None:
        raise ValueError(dense)
    return text


def _dense(text: bytes) -> str | None:
    """Why a text would take too much memory once it is read, or None. It is shown before the user trusts its maker."""
    values = sum(map(text.count, (b"[", b"{", b",", b":")))
    if len(text) <= _SHORT or values * _BYTES_OF_A_VALUE <= len(text):
        return None
    return f"it has {values} values in {len(text)} bytes, expected manifests, which have far fewer"


def parse(text: bytes) -> Bundle:
    """What the text of a bundle.json says; ValueError with one sentence for anything that `write` would not write."""
    try:
        if (dense := _dense(text)) is not None:
            raise ValueError(dense)
        content = json.loads(text.decode("ascii"))
        if isinstance(content, dict) and (content.get("schema") != SCHEMA or content["schema"] is True):
            raise ValueError(f"it has schema {_short(content.get('schema'))}, this engine reads {SCHEMA}")
        if not isinstance(content, dict) or content.keys() != _KEYS or not isinstance(content["entries"], list):
            raise ValueError(f"it does not consist of {', '.join(sorted(_KEYS))}")
        rest = {name: value for name, value in content.items() if name != "digest"}
        if content["digest"] != _digest(rest) or _dump(content) != text:
            raise ValueError("its SHA-256 is not the one it names: it was altered")
        manifests = _checked(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the bundle's {NAME} cannot be used: {error}") from None
    return Bundle(
        created=content["created"],
        made_by=content["made_by"],
        entries=manifests,
        fingerprints={one["info"]["fingerprint"] for one in manifests},
        machines=content["machines"],
        bytes=sum(size for one in manifests for size, _ in one["files"].values()),
    )


def _checked(content: dict[str, Any]) -> list[dict[str, Any]]:
    try:
        parse_time(content["created"])
    except (TypeError, ValueError, OverflowError, OSError):
        raise ValueError(f"found {_short(content['created'])} as its date, expected UTC text") from None
    if not _is_texts(content["made_by"]) or unclear([content["made_by"], content["created"]]):
        raise ValueError("it does not say readably who made it")
    manifests = content["entries"]
    if not manifests:
        raise ValueError("it lists no entries")
    for number, manifest in enumerate(manifests, 1):
        if (reason := problem(manifest)) is not None:
            raise ValueError(f"entry {number} of {len(manifests)}: {reason}")
    ids = [manifest["id"] for manifest in manifests]
    if ids != sorted(set(ids)):
        raise ValueError("its entries are not in order or one is there twice")
    if content["machines"] != machines_of(manifests):
        raise ValueError("it names other machines than its entries do")
    return manifests


def problem(manifest: Any) -> str | None:
    """Why an entry with this manifest cannot travel in a bundle, or None if it can."""
    if not isinstance(manifest, dict):
        return f"found {_short(manifest)}, expected a manifest"
    primary, name = manifest.get("primary"), manifest.get("id")
    if not all(isinstance(key, str) and is_key(key) for key in (primary, name)):
        return f"found {_short(name)} and {_short(primary)} as id and primary key, expected hex digits"
    try:
        check_manifest(manifest, str(primary), str(name))
    except (TornError, OtherSchemaError) as error:
        return str(error)
    if len(json.dumps(manifest)) > MANIFEST_LIMIT // 8 and len(manifest_text(manifest)) > MANIFEST_LIMIT:
        return f"its manifest is larger than {MANIFEST_LIMIT} bytes"
    info, made_by = manifest.get("info"), manifest["made_by"]
    if not isinstance(info, dict) or not isinstance(info.get("machine", {}), dict):
        return "its manifest does not say readably what it is"
    if not isinstance(info.get("fingerprint"), str) or not info["fingerprint"]:
        return "it does not say for which machine it is: an older engine made it"
    if not _is_texts(made_by) or (odd := unclear([info, made_by, manifest["created"]])) is not None:
        return f"its description is not plain text: {odd if _is_texts(made_by) else 'who made it'}"
    return _names_problem(manifest["files"])


def _names_problem(files: Mapping[str, Sequence[Any]]) -> str | None:
    """Why these files cannot be written inside one directory of any usual file system, each to a place of its own."""
    if not files:
        return "it lists no files"
    folded: dict[str, str] = {}  # what a file system that ignores case would see -> what the manifest says
    for name, (size, _) in files_of({"files": files}):
        if (reason := name_problem(name)) is not None:
            return f"found {quoted(name)} as a file's name: {reason}"
        if size >= SIZE_LIMIT:
            return f"found {quoted(name)} with {size} bytes, expected fewer than {SIZE_LIMIT}"
        parts = name.split("/")
        for end in range(1, len(parts) + 1):
            path = "/".join(parts[:end])
            if folded.setdefault(path.lower(), path) != path:
                other = quoted(folded[path.lower()])
                return f"found {quoted(name)} and {other}, expected names that differ in more than case"
            if end < len(parts) and path in files:
                return f"found {quoted(path)} as a file and as the directory of {quoted(name)}"
    return None


def name_problem(name: str) -> str | None:
    """Why `name` is no relative path that means the same on every system, or None if it is one."""
    # Compilers name files by hashes and identifiers. In ASCII there are no two ways to write one name.
    if not name.isascii() or not name.isprintable():
        return "it holds characters other than printable ASCII"
    if "\\" in name or ":" in name:
        return "it holds a backslash or a colon"
    if len(name) > _NAME_LIMIT:
        return f"it is longer than {_NAME_LIMIT} bytes"
    for part in name.split("/"):
        if part in ("", ".", ".."):
            return "it is not a path inside the entry"
        if len(part) > _PART_LIMIT:
            return f"a part of it is longer than {_PART_LIMIT} bytes"
        if part[-1] in ". " or _DEVICES.fullmatch(part):
            return "on Windows it would be another name"
    return None


def unclear(value: Any) -> str | None:
    """A text inside `value` that a terminal would not show as it is, quoted, or None.

    A bundle's description is shown before the user decides whether to trust it: it must not be able to move the
    cursor, to change colours or to write from right to left.
    """
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, dict):
            pending += [*one.keys(), *one.values()]
        elif isinstance(one, list):
            pending += one
        elif isinstance(one, str):
            for sign in "" if one.isascii() and one.isprintable() else one:
                direction = unicodedata.bidirectional(sign)
                odd = unicodedata.category(sign) in ("Cc", "Cs", "Zl", "Zp")
                if odd or direction in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"):
                    return quoted(one)
    return None


def files_of(manifest: Mapping[str, Any]) -> list[tuple[str, Sequence[Any]]]:
    """(name, [bytes, SHA-256]) of a manifest's files in the order in which a bundle holds them."""
    return sorted(manifest["files"].items())


def machines_of(manifests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The different machines for which the entries were made, in a fixed order."""
    machines = [one["info"].get("machine", {}) for one in manifests]
    found = {json.dumps(machine, sort_keys=True): machine for machine in machines}
    return [found[text] for text in sorted(found)]


def machine_text(machine: Mapping[str, Any]) -> str:
    """One readable line for the facts about a machine."""
    told = [f"{name} {value if isinstance(value, str) else json.dumps(value)}" for name, value in machine.items()]
    return ", ".join(told) or "a machine that is not described"


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(_dump(content)).hexdigest()


def _dump(content: Mapping[str, Any]) -> bytes:
    """The one form of the text: what the bundle is on the first line, then a line for each entry."""
    cover = json.dumps({name: value for name, value in content.items() if name != "entries"}, sort_keys=True)
    lines = ",\n".join(json.dumps(manifest, sort_keys=True) for manifest in content["entries"])
    return f'{cover[:-1]}, "entries": [\n{lines}\n]}}\n'.encode("ascii")


def _is_texts(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(one, str) for pair in value.items() for one in pair)


def _short(value: object) -> str:
    return quoted(value if isinstance(value, str) else repr(value)) if value is not None else "nothing"
