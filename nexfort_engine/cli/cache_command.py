# SPDX-License-Identifier: Apache-2.0
"""The command `cache`: shows what the compile cache holds, checks it, takes away, pins, and carries it as a bundle.

It parses, calls, prints and sets the exit code. What an entry is and how it is kept safe is the business of `cache/`,
which is imported by the action that needs it, so that looking at a cache loads no torch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .output import say, say_table

if TYPE_CHECKING:
    from ..cache.bundle import Bundle
    from ..cache.entry import Entry
    from ..cache.store import Removed, Store

HEADINGS = ("id", "region", "model", "shapes", "size", "last used", "state", "made by")
# Of each action, as it is typed behind `nexfort cache`.
EXAMPLES = {
    "list": ("list", "list --base-directory /data/comfyui --json"),
    "show": ("show 3fa9c1",),
    "verify": ("verify", "verify 3fa9c1 --dir /data/cache"),
    "prune": ("prune --max-size 2GiB",),
    "pin": ("pin 3fa9c1 b07d",),
    "unpin": ("unpin 3fa9c1",),
    "clear": ("clear", "clear 3fa9c1", "clear --pinned"),
    "export": ("export flux.nexfort", "export flux.nexfort 3fa9c1 b07d"),
    "import": ("import flux.nexfort", "import flux.nexfort --trust"),
    "path": ("path --comfyui ~/ComfyUI",),
}
COLOURS = {"ready": "green", "pinned": "cyan", "base": "blue"}
TRUST = (
    "nothing was imported. A bundle is code, and what is imported runs in your ComfyUI as if you had installed it: if "
    "you know who made {file} and trust them, run the command again with --trust"
)


class UnknownEntryError(ValueError):
    """An id on the command line that names no entry, or several."""


def add_to(commands: Any) -> None:
    """Adds `cache` with all its actions to the parser of the command line."""
    examples = [EXAMPLES[name][0] for name in ("list", "prune", "export")]
    text = "show, check, reduce, export and import the compile cache"
    cache = commands.add_parser("cache", help=text, **examples_below("cache", examples))
    actions = cache.add_subparsers(required=True, metavar="ACTION")
    _add(actions, "list", _list, "list the artefacts, the most recently made last")
    _add_ids(_add(actions, "show", _show, "show all that is known about artefacts"), "+")
    verify = _add(actions, "verify", _verify, "read every file and compare it with its hash; changes nothing")
    _add_ids(verify, "*", "(default: all)")
    prune = _add(actions, "prune", _prune, "remove the least recently used artefacts down to a size; pinned ones stay")
    text = "keep at most this much, such as 2GiB (default: NEXFORT_CACHE_LIMIT, else 8GiB)"
    prune.add_argument("--max-size", type=_size, metavar="SIZE", help=text)
    _add_ids(_add(actions, "pin", _pin, "keep artefacts: neither the size limit nor prune nor clear takes them"), "+")
    _add_ids(_add(actions, "unpin", _unpin, "take the pin off again"), "+")
    clear = _add(actions, "clear", _clear, "remove all artefacts but pinned ones; they are compiled again when needed")
    clear.add_argument("--pinned", action="store_true", help="pinned ones too")
    _add_ids(clear, "*", "remove exactly these, pinned or not (default: all)")
    export = _add(actions, "export", _export, "write artefacts into one bundle file, for a machine of the same kind")
    export.add_argument("file", type=Path, metavar="FILE", help="the bundle to write")
    _add_ids(export, "*", "(default: all)")
    taken = _add(actions, "import", _import, "show what a bundle holds and, with --trust, take it in")
    taken.add_argument("file", type=Path, metavar="FILE", help="a bundle that `cache export` wrote")
    taken.add_argument("--trust", action="store_true", help="take it in: its code will run here")
    _add(actions, "path", _path, "print where the cache lies")


def _add(actions: Any, name: str, command: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
    shown = examples_below("cache", EXAMPLES[name])
    action: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text, **shown)
    add_where(action).set_defaults(command=command)
    return action


def examples_below(command: str, examples: Sequence[str]) -> dict[str, Any]:
    """What a parser is made with that shows these examples of `nexfort COMMAND` below its help."""
    lines = [f"  nexfort {command} {one}".rstrip() for one in examples]
    return {"epilog": "\n".join(["examples:", *lines]), "formatter_class": argparse.RawDescriptionHelpFormatter}


def add_where(action: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Gives a command the arguments that say which cache is meant, and that JSON is wanted."""
    action.add_argument("--json", action="store_true", help="print JSON")
    where = action.add_mutually_exclusive_group()
    where.add_argument("--dir", type=Path, metavar="DIR", help="the cache in this directory")
    where.add_argument("--comfyui", type=Path, metavar="PATH", help="the cache of the ComfyUI in this directory")
    text = "the cache of the ComfyUI that has this --base-directory"
    where.add_argument("--base-directory", type=Path, metavar="DIR", help=text)
    return action


def _add_ids(action: argparse.ArgumentParser, count: str, text: str = "") -> None:
    action.add_argument("ids", nargs=count, metavar="ID", help=f"an id or its beginning, as listed {text}".rstrip())


def _size(text: str) -> int:
    from ..cache.paths import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# -- which cache, which entries ------------------------------------------------------------------------------


def cache_root(options: argparse.Namespace) -> Path:
    """The cache the options mean: a named one, that of a ComfyUI, or that of this user.

    ValueError for a named directory that is not there. A bundle may be imported into a new one.
    """
    from ..cache.paths import chosen_root, default_root
    from ..hosts.comfy_install import ComfyError, base_around, comfyui_cache, is_comfyui

    if options.dir is not None:
        return given_directory(options.dir, "--dir", may_be_new=options.command is _import)
    if options.base_directory is not None:
        return comfyui_cache(given_directory(options.base_directory, "--base-directory"))
    if options.comfyui is not None:
        if not is_comfyui(options.comfyui):
            raise ComfyError(f"found no ComfyUI at {options.comfyui}: expected its root, with main.py and comfy/")
        return comfyui_cache(options.comfyui)
    around = None if chosen_root() else base_around()
    return default_root() if around is None else comfyui_cache(around)


def given_directory(path: Path, option: str, *, may_be_new: bool = False) -> Path:
    """A directory that an option names, as an absolute path; ValueError where there is none."""
    found = Path(path).expanduser().absolute()
    if not found.is_dir() and not (may_be_new and not found.exists()):
        raise ValueError(
            f"{option} is {found}, {'a file' if found.exists() else 'which is not there'}; expected a directory"
        )
    return found


def store_of(options: argparse.Namespace) -> Store:
    """That cache, over the base cache if there is one; a directory that was named stands for itself alone."""
    from ..cache.paths import base_root
    from ..cache.store import Store

    return Store(cache_root(options), None if options.dir is not None else base_root())


def _found(store: Store, ids: Sequence[str]) -> list[Entry]:
    with _of_entries():
        return [store.find(text) for text in dict.fromkeys(ids)]


@contextmanager
def _of_entries() -> Iterator[None]:
    """Calls of the store that name entries: one that is not there is the user's mistake, or another process's doing."""
    try:
        yield
    except LookupError as error:
        raise UnknownEntryError(str(error)) from error


def _print(options: argparse.Namespace, facts: Mapping[str, Any], *lines: str) -> None:
    """The facts as JSON, or the lines."""
    for line in [json.dumps(facts, indent=1)] if options.json else lines:
        say(line)


# -- looking -------------------------------------------------------------------------------------------------


def _path(options: argparse.Namespace) -> int:
    root = cache_root(options)
    _print(options, {"path": str(root)}, str(root))
    return 0


def _list(options: argparse.Namespace) -> int:
    from ..cache import table
    from ..cache.paths import size_text

    store = store_of(options)
    rows = store.rows()
    total = sum(row["size"] for row in rows)
    lines = [f"{len(rows)} artefacts, {size_text(total)}, in {store.root}"]
    facts: dict[str, Any] = {"path": str(store.root), "bytes": total, "entries": rows}
    if store.base is not None:
        base = str(store.base)
        facts |= {"base": base, "base_problem": store.base_problem}
        lines.append(f"base cache: {base}" + (f", not read: {store.base_problem}" if store.base_problem else ""))
    if rows and not options.json:
        short = table.short_ids(row["id"] for row in rows)
        say_table(HEADINGS, [_cells(row, short[row["id"]]) for row in rows], COLOURS)
    _print(options, facts, *lines)
    return 0


def _cells(row: Mapping[str, Any], short: str) -> tuple[str, ...]:
    from ..cache import table
    from ..cache.paths import size_text

    used, torch = table.moment(row["last_used"]), f"torch {table.plain(row['made_by'].get('torch', table.UNKNOWN))}"
    parts = (table.region(row), table.family(row), table.shapes(row), size_text(row["size"]))
    return short, *parts, used, table.state(row), torch


def _show(options: argparse.Namespace) -> int:
    from ..cache import table
    from ..cache.paths import size_text

    store = store_of(options)
    rows = {row["id"]: row for row in store.rows()}
    shown = []
    for entry in _found(store, options.ids):
        facts = rows.get(entry.id) or _bare_row(entry)
        facts |= {"path": str(entry.path), "machine": entry.machine, "fingerprint": entry.fingerprint}
        facts |= {"files": entry.manifest["files"], "problem": _problem(store, entry)}
        shown.append(facts)
        if options.json:
            continue
        lines = {
            "id": entry.id,
            "region": table.region(facts),
            "model": table.family(facts),
            "shapes": "; ".join(map(table.plain, facts["shapes"])) or "none noted",
            "size": f"{size_text(facts['size'])} in {len(facts['files'])} files",
            "made": f"{table.moment(facts['created'])} by {table.plain_facts(facts['made_by'])}",
            "machine": table.plain_facts(entry.machine) or "not noted",
            "last used": table.moment(facts["last_used"]),
            "state": table.state(facts),
            "path": str(entry.path),
        }
        say("\n".join(f"{name + ':':<11}{value}" for name, value in lines.items()) + "\n")
    if options.json:
        say(json.dumps({"path": str(store.root), "entries": shown}, indent=1))
    return 0


def _bare_row(entry: Entry) -> dict[str, Any]:
    """What a row of the table says of an entry that the table does not have: one that cannot be read."""
    unknown = {"size": entry.size, "created": entry.manifest["created"], "made_by": {}, "info": {}, "last_used": None}
    return {"id": entry.id, "primary": entry.primary, "pinned": entry.pinned, "shapes": [], "base": False, **unknown}


def _problem(store: Store, entry: Entry) -> str | None:
    """What a full check finds. Where the manifest is damaged only the check of all entries tells with what."""
    if "id" in entry.manifest:
        return entry.verify()
    return next((problem for one, problem in store.verify_all() if one.path == entry.path), "it was removed just now")


def _verify(options: argparse.Namespace) -> int:
    from ..cache import table

    store = store_of(options)
    wanted = {entry.id for entry in _found(store, options.ids)}
    checked = [(entry, problem) for entry, problem in store.verify_all() if not wanted or entry.id in wanted]
    bad = {entry.id: problem for entry, problem in checked if problem is not None}
    facts = {"path": str(store.root), "checked": len(checked), "problems": bad}
    lines = [f"{entry}: {table.plain(problem)}" for entry, problem in bad.items()]
    say_last = f"{len(checked)} artefacts checked, {len(bad) or 'none'} with a problem, in {store.root}"
    _print(options, facts, *lines, say_last)
    return 1 if bad else 0


# -- changing ------------------------------------------------------------------------------------------------


def _prune(options: argparse.Namespace) -> int:
    store = store_of(options)
    return _removed(options, store, store.prune(options.max_size))


def _clear(options: argparse.Namespace) -> int:
    store = store_of(options)
    if options.ids:
        with _of_entries():
            removed = store.remove([entry.id for entry in _found(store, options.ids)])
        return _removed(options, store, removed)
    return _removed(options, store, store.clear(pinned=options.pinned))


def _removed(options: argparse.Namespace, store: Store, removed: Removed) -> int:
    from ..cache.paths import size_text

    pinned = sum(bool(row["pinned"]) for row in store.rows())
    facts = {"path": str(store.root), "removed": removed.entries, "bytes": removed.bytes, "pinned": pinned}
    kept = f"; {pinned} pinned ones stay" if pinned else ""
    _print(options, facts, f"{removed.entries} artefacts removed ({size_text(removed.bytes)}) from {store.root}{kept}")
    return 0


def _pin(options: argparse.Namespace) -> int:
    return _set_pin(options, True)


def _unpin(options: argparse.Namespace) -> int:
    return _set_pin(options, False)


def _set_pin(options: argparse.Namespace, pinned: bool) -> int:
    store = store_of(options)
    with _of_entries():
        ids = [store.pin(entry.id, pinned).id for entry in _found(store, options.ids)]
    word = "pinned" if pinned else "unpinned"
    _print(options, {"path": str(store.root), word: ids}, *(f"{one} {word}" for one in ids))
    return 0


# -- carrying ------------------------------------------------------------------------------------------------


def _export(options: argparse.Namespace) -> int:
    from ..cache import bundle, table
    from ..cache.paths import size_text

    store = store_of(options)
    ids = [entry.id for entry in _found(store, options.ids)] or None
    with _of_entries():
        made = bundle.export(store, options.file, ids)
    facts = {"file": str(options.file), "entries": made.entries, "bytes": made.bytes, "left_out": made.left_out}
    left_out = [f"{one} is left out: {table.plain(reason)}" for one, reason in made.left_out.items()]
    last = f"{made.entries} artefacts ({size_text(made.bytes)}) written to {options.file}"
    _print(options, facts, *left_out, last)
    return 0


def _import(options: argparse.Namespace) -> int:
    """Shows the bundle first, always: who trusts it should see what."""
    from ..cache import bundle, key
    from ..cache.paths import size_text

    held = bundle.inspect(options.file)
    here = key.fingerprints()
    fits = held.fingerprints <= set(here)
    facts: dict[str, Any] = {"file": str(options.file), "created": held.created, "made_by": held.made_by}
    facts |= {"machines": held.machines, "entries": held.entries, "bytes": held.bytes, "this_machine": fits}
    if not options.json:
        _show_bundle(held)
        say(_fit_line(fits, here))
    if not options.trust:
        if options.json:
            say(json.dumps({**facts, "imported": 0}, indent=1))
        raise PermissionError(TRUST.format(file=options.file))
    store = store_of(options)
    taken = bundle.load(store, options.file, trust=True, fingerprints=here)
    kept = f", {taken.kept} of them were there already" if taken.kept else ""
    line = f"{taken.entries} artefacts ({size_text(taken.bytes)}) imported into {store.root}{kept}"
    _print(options, {**facts, "path": str(store.root), "imported": taken.entries, "kept": taken.kept}, line)
    return 0


def _show_bundle(held: Bundle) -> None:
    from ..cache import table
    from ..cache.paths import size_text

    facts = [({"info": one.get("info") or {}}, str(one["id"])) for one in held.entries]
    if facts:
        say_table(("region", "model", "id"), [(table.region(one), table.family(one), name) for one, name in facts])
    say(f"{len(held.entries)} artefacts, {size_text(held.bytes)}")
    say(f"made {table.moment(held.created)} by {table.plain_facts(held.made_by)}")
    for machine in held.machines:
        say(f"for the machine: {table.plain_facts(machine)}")
    if not held.machines:
        say("for a machine not noted")


def _fit_line(fits: bool, here: Mapping[str, str]) -> str:
    devices = ", ".join(here.values()) or "no device that anything is compiled for"
    return f"this machine: {devices}: {'it fits' if fits else 'it does NOT fit, and will be refused'}"
