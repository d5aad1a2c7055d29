# SPDX-License-Identifier: Apache-2.0
"""The command line: `nexfort cache|doctor|plan|run|tune|warm`; `cache`, `plan` and `tune` have files of their own.

`python -m nexfort_engine` is the same, in the plugin's folder, where the package is not installed.

It parses, calls, prints and sets the exit code; the work is done in `doctor.py`, `run_workflows.py` and `warm.py`,
which are imported only by the command that needs them.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from .. import __version__
from . import cache_command, plan_command, tune_command
from .output import say, say_failure

PROGRAM = "nexfort"
EXAMPLES = """\
examples:
  nexfort run workflows/api/flux_compile_model.json    run a workflow without a browser
  nexfort warm --workflow FILE                         compile ahead of the first user
  nexfort cache list                                   what the cache of this ComfyUI holds
  nexfort cache list --base-directory DIR              that of a ComfyUI with another base directory
  nexfort tune                                         measure this card
  nexfort doctor                                       what a bug report needs
Where the package is not installed, `python -m nexfort_engine` in the plugin's folder is the same as `nexfort`.
"""
RUN_EXAMPLES = """\
examples:
  nexfort run workflow_api.json --comfyui ~/ComfyUI --report report.json
  nexfort run a.json b.json --base-directory /data/comfyui --output-dir pictures
"""
WARM_EXAMPLES = """\
examples:
  nexfort warm --workflow workflow_api.json
  nexfort warm --model flux1-dev.safetensors --width 1024 --height 1024
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code: 0 done, 1 failed with a reason, 2 wrong usage."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    try:
        return int(options.command(options))
    except (OSError, ValueError, RuntimeError) as error:
        plain = isinstance(error, OSError) and error.strerror and error.filename is None
        say_failure(f"nexfort: {error.strerror if plain else error}")  # type: ignore[union-attr]
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        PROGRAM,
        description="Nexfort's compile cache, precision plan, self-check, warming, headless runs.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"nexfort {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    cache_command.add_to(commands)
    plan_command.add_to(commands)
    tune_command.add_to(commands)
    text = "print what a bug report needs, and check that compiling works"
    shown = cache_command.examples_below("doctor", ("", "--no-check", "--json"))
    doctor = commands.add_parser("doctor", help=text, description=text, **shown)
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.add_argument("--no-check", action="store_true", help="do not compile anything")
    doctor.set_defaults(command=_doctor)
    _add_run(commands)
    _add_warm(commands)
    return parser


def _add_run(commands: Any) -> None:
    run = commands.add_parser(
        "run",
        help="run workflows in a real ComfyUI without a browser",
        description="Starts ComfyUI, runs the workflows one by one, saves what they make, stops ComfyUI.",
        epilog=RUN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("workflows", nargs="+", type=Path, metavar="WORKFLOW_API.json", help="workflow in API format")
    run.add_argument("--report", type=Path, metavar="FILE", help="write what was compiled and how long it took")
    run.add_argument("--output-dir", type=Path, metavar="DIR", help="where images go (default: ComfyUI's output)")
    _add_server(run)
    run.set_defaults(command=_run)


def _add_warm(commands: Any) -> None:
    warm = commands.add_parser(
        "warm",
        help="fill the cache before the first user comes",
        description="Starts ComfyUI, runs one step of a workflow or of a model file, and stops ComfyUI. What was\n"
        "compiled stays in the cache. It needs a GPU of the kind that will use the cache.",
        epilog=WARM_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = warm.add_mutually_exclusive_group(required=True)
    what.add_argument("--workflow", type=Path, metavar="FILE", help="a workflow in API format")
    what.add_argument("--model", type=Path, metavar="FILE", help="a checkpoint or diffusion model, as safetensors")
    for name, default, text in (
        ("width", 1024, "of the picture, in pixels"),
        ("height", 1024, "of the picture, in pixels"),
        ("batch", 1, "how many pictures at once"),
        ("length", 33, "frames, for a model of videos"),
    ):
        warm.add_argument(f"--{name}", type=_count, metavar="N", help=f"with --model: {text} (default: {default})")
    warm.add_argument("--steps", type=_count, default=1, metavar="N", help="sampler steps (default: 1, which will do)")
    warm.add_argument("--mode", metavar="MODE", help="mode of compile nodes that are put in (default: the node's)")
    text = "memory format of compile nodes that are put in (default: the node's)"
    warm.add_argument("--memory-format", metavar="FORMAT", help=text)
    warm.add_argument("--cpu", action="store_true", help="warm for this machine's CPU")
    warm.add_argument("--json", action="store_true", help="print JSON; progress goes to the standard error")
    _add_server(warm)
    warm.set_defaults(command=_warm, sizes={"width": 1024, "height": 1024, "batch": 1, "length": 33})


def _add_server(command: argparse.ArgumentParser) -> None:
    command.add_argument("--comfyui", type=Path, metavar="PATH", help="ComfyUI's root (default: looked for)")
    command.add_argument("--cache-dir", type=Path, metavar="DIR", help="keep compiled artefacts here")
    command.add_argument("--base-directory", type=Path, metavar="DIR", help="ComfyUI's --base-directory")
    command.add_argument("--python", default=sys.executable, metavar="FILE", help="the Python that ComfyUI runs with")
    text = "an argument for ComfyUI, such as --comfy-arg=--lowvram; may be given more than once"
    command.add_argument("--comfy-arg", action="append", default=[], metavar="ARG", help=text)
    command.add_argument("--verbose", action="store_true", help="print ComfyUI's log too")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a whole number, 1 or more")
    return int(text)


# -- doctor, run, warm --------------------------------------------------------------------------------------


def _doctor(options: argparse.Namespace) -> int:
    from . import doctor

    facts = doctor.collect(check=not options.no_check)
    say(json.dumps(facts, indent=1) if options.json else doctor.as_text(facts))
    return 0


def _run(options: argparse.Namespace) -> int:
    from ..system.process_settings import WAIT_VARIABLE
    from .comfy_server import ComfyServer, plugin_root
    from .run_workflows import load_workflow, run_workflows

    workflows = {str(path): load_workflow(path) for path in options.workflows}
    comfyui, how = _comfyui(options)
    output = options.output_dir.absolute() if options.output_dir is not None else None
    arguments = list(options.comfy_arg)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        arguments += ["--output-directory", str(output)]
    server = ComfyServer(
        comfyui,
        plugin=plugin_root(),
        cache_dir=options.cache_dir,
        base_dir=_base_directory(options),
        extra_args=arguments,
        env={WAIT_VARIABLE: "1"},
        python=options.python,
        on_line=say if options.verbose else None,
    )
    say(f"starting ComfyUI in {server.comfyui} ({how})")
    with _ends_on_sigterm(), server:
        run = run_workflows(server, workflows, say, output)
    if options.report is not None:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(json.dumps(run.as_dict(), indent=1) + "\n", encoding="utf-8")
        say(f"report: {options.report}")
    return 1 if run.failed else 0


def _warm(options: argparse.Namespace) -> int:
    from . import warm

    given = {name: getattr(options, name) for name in options.sizes if getattr(options, name) is not None}
    if options.workflow is not None and given:
        raise ValueError(f"--{next(iter(given))} goes with --model only: a workflow has sizes of its own")
    settings = {"mode": options.mode, "memory_format": options.memory_format}
    settings = {name: value for name, value in settings.items() if value is not None}
    wish = warm.Wish(options.workflow, options.model, settings, {**options.sizes, **given}, options.steps)
    cpu = options.cpu or "--cpu" in options.comfy_arg
    warm.refuse_in_vain(cpu, options.python)
    tell = _tell_beside if options.json else say
    if cpu:
        tell(warm.CPU_ONLY)
    comfyui, _ = _comfyui(options)
    with _ends_on_sigterm():
        done = warm.warm(
            comfyui,
            wish,
            tell,
            cpu=cpu,
            cache_dir=options.cache_dir,
            extra_args=options.comfy_arg,
            on_line=tell if options.verbose else None,
            base_dir=_base_directory(options),
            python=options.python,
        )
    say(json.dumps(done.as_dict(), indent=1) if options.json else str(done))
    return 0 if done.problem is None else 1


def _base_directory(options: argparse.Namespace) -> Path | None:
    if options.base_directory is None:
        return None
    return cache_command.given_directory(options.base_directory, "--base-directory")


def _tell_beside(line: str) -> None:
    sys.stderr.write(line + "\n")


def _comfyui(options: argparse.Namespace) -> tuple[Path, str]:
    from ..hosts.comfy_install import ComfyError, find_comfyui

    found = (options.comfyui, "--comfyui") if options.comfyui is not None else find_comfyui()
    if found is None:
        raise ComfyError("found no ComfyUI: give its root with --comfyui PATH or in COMFYUI_PATH")
    return found


@contextmanager
def _ends_on_sigterm() -> Iterator[None]:
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _terminate(number: int, frame: object) -> NoReturn:
    """Ends like Ctrl-C does, so that the server is stopped on the way out."""
    raise SystemExit(128 + number)
