# SPDX-License-Identifier: Apache-2.0
"""The command line: `python -m nexfort_engine cache|doctor|run`.

It parses, calls, prints and sets the exit code; the work is done in `cache/`, `doctor.py` and
`headless_run.py`, which are imported only by the command that needs them.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

PROGRAM = "python -m nexfort_engine"


def say(line: str) -> None:
    """Prints a line at once: progress must be seen when it happens, also through a pipe."""
    try:
        sys.stdout.write(line + "\n")
    except UnicodeEncodeError:  # a terminal with an old code page
        encoding = sys.stdout.encoding or "ascii"
        sys.stdout.write(line.encode(encoding, "replace").decode(encoding) + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code: 0 done, 1 failed with a reason, 2 wrong usage."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    try:
        return int(options.command(options))
    except (OSError, ValueError, RuntimeError) as error:
        sys.stderr.write(f"nexfort: {error}\n")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(PROGRAM, description="Nexfort's compile cache, self-check and headless runs.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_cache(commands)
    doctor = commands.add_parser("doctor", help="print what a bug report needs, and check that compiling works")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.add_argument("--no-check", action="store_true", help="do not compile anything")
    doctor.set_defaults(command=_doctor)
    _add_run(commands)
    return parser


def _add_cache(commands: Any) -> None:
    cache = commands.add_parser("cache", help="show or reduce the compile cache")
    actions = cache.add_subparsers(required=True, metavar="ACTION")
    for name, command, text in (
        ("list", _cache_list, "list the artefacts, the most recently made last"),
        ("clear", _cache_clear, "remove all artefacts; they are compiled again when needed"),
        ("prune", _cache_prune, "remove the least recently used artefacts down to a size"),
        ("path", _cache_path, "print where the cache lies"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("--json", action="store_true", help="print JSON")
        where = action.add_mutually_exclusive_group()
        where.add_argument("--dir", type=Path, metavar="DIR", help="the cache in this directory")
        where.add_argument("--comfyui", type=Path, metavar="PATH", help="the cache of the ComfyUI in this directory")
        if name == "prune":
            text = "keep at most this much, such as 2GiB (default: NEXFORT_CACHE_LIMIT, else 8GiB)"
            action.add_argument("--max-size", type=_size, metavar="SIZE", help=text)
        action.set_defaults(command=command)


def _add_run(commands: Any) -> None:
    run = commands.add_parser(
        "run",
        help="run workflows in a real ComfyUI without a browser",
        description="Starts ComfyUI, runs the workflows one by one, saves what they make, stops ComfyUI.",
    )
    run.add_argument("workflows", nargs="+", type=Path, metavar="WORKFLOW_API.json", help="workflow in API format")
    run.add_argument("--comfyui", type=Path, metavar="PATH", help="ComfyUI's root (default: looked for)")
    run.add_argument("--report", type=Path, metavar="FILE", help="write what was compiled and how long it took")
    run.add_argument("--output-dir", type=Path, metavar="DIR", help="where images go (default: ComfyUI's output)")
    run.add_argument("--cache-dir", type=Path, metavar="DIR", help="keep compiled artefacts here")
    run.add_argument("--base-dir", type=Path, metavar="DIR", help="ComfyUI's --base-directory")
    run.add_argument("--python", default=sys.executable, metavar="FILE", help="the Python that ComfyUI runs with")
    run.add_argument(
        "--comfy-arg",
        action="append",
        default=[],
        metavar="ARG",
        help="an argument for ComfyUI, such as --comfy-arg=--lowvram; may be given more than once",
    )
    run.add_argument("--verbose", action="store_true", help="print ComfyUI's log too")
    run.set_defaults(command=_run)


# -- cache ---------------------------------------------------------------------------------------------------


def _size(text: str) -> int:
    from .cache.place import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def cache_root(options: argparse.Namespace) -> Path:
    """The cache the options mean: a named one, that of a ComfyUI, or that of this user."""
    from .cache.place import default_root
    from .locate import ComfyError, comfyui_around, comfyui_cache, is_comfyui

    if options.dir is not None:
        return Path(options.dir).expanduser().absolute()
    if options.comfyui is not None:
        if not is_comfyui(options.comfyui):
            raise ComfyError(f"found no ComfyUI at {options.comfyui}: expected its root, with main.py and comfy/")
        return comfyui_cache(options.comfyui)
    around = None if os.environ.get("NEXFORT_CACHE_DIR") else comfyui_around()
    return default_root() if around is None else comfyui_cache(around)


def _cache_path(options: argparse.Namespace) -> int:
    root = cache_root(options)
    say(json.dumps({"path": str(root)}) if options.json else str(root))
    return 0


def _cache_list(options: argparse.Namespace) -> int:
    from .cache.place import size_text
    from .cache.store import Store

    store = Store(cache_root(options))
    rows = store.rows()
    total = sum(row["size"] for row in rows)
    if options.json:
        say(json.dumps({"path": str(store.root), "bytes": total, "entries": rows}, indent=1))
        return 0
    for row in rows:
        used = "never used since" if row["last_used"] is None else f"used {_day(row['last_used'])}"
        what = row["info"].get("region") or row["info"].get("kind") or "artefact"
        made = f"torch {row['made_by'].get('torch', '?')}, made {row['created'][:16].replace('T', ' ')}"
        say(f"{row['id']}  {size_text(row['size']):>10}  {what}  {made}, {used}")
    say(f"{len(rows)} artefacts, {size_text(total)}, in {store.root}")
    return 0


def _day(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):  # a clock that was far off
        return "at an unknown time"


def _cache_clear(options: argparse.Namespace) -> int:
    from .cache.store import Store

    store = Store(cache_root(options))
    return _removed(options, store.root, store.clear())


def _cache_prune(options: argparse.Namespace) -> int:
    from .cache.store import Store

    store = Store(cache_root(options))
    return _removed(options, store.root, store.prune(options.max_size))


def _removed(options: argparse.Namespace, root: Path, removed: Any) -> int:
    from .cache.place import size_text

    if options.json:
        say(json.dumps({"path": str(root), "removed": removed.entries, "bytes": removed.bytes}))
    else:
        say(f"{removed.entries} artefacts removed ({size_text(removed.bytes)}) from {root}")
    return 0


# -- doctor and run ------------------------------------------------------------------------------------------


def _doctor(options: argparse.Namespace) -> int:
    from . import doctor

    facts = doctor.collect(check=not options.no_check)
    say(json.dumps(facts, indent=1) if options.json else doctor.as_text(facts))
    return 0


def _run(options: argparse.Namespace) -> int:
    from .headless import ComfyError, ComfyServer, find_comfyui, plugin_root
    from .headless_run import load_workflow, run_workflows

    workflows = {str(path): load_workflow(path) for path in options.workflows}
    found = (options.comfyui, "--comfyui") if options.comfyui is not None else find_comfyui()
    if found is None:
        raise ComfyError("found no ComfyUI: give its root with --comfyui PATH or in COMFYUI_PATH")
    output = options.output_dir.absolute() if options.output_dir is not None else None
    arguments = list(options.comfy_arg)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        arguments += ["--output-directory", str(output)]
    server = ComfyServer(
        found[0],
        plugin=plugin_root(),
        cache_dir=options.cache_dir,
        base_dir=options.base_dir,
        extra_args=arguments,
        python=options.python,
        on_line=say if options.verbose else None,
    )
    say(f"starting ComfyUI in {server.comfyui} ({found[1]})")
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        with server:
            run = run_workflows(server, workflows, say, output)
    finally:
        signal.signal(signal.SIGTERM, previous)
    if options.report is not None:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(json.dumps(run.as_dict(), indent=1) + "\n", encoding="utf-8")
        say(f"report: {options.report}")
    return 1 if run.failed else 0


def _terminate(number: int, frame: object) -> NoReturn:
    """Ends like Ctrl-C does, so that the server is stopped on the way out."""
    raise SystemExit(128 + number)
