# SPDX-License-Identifier: Apache-2.0
"""`python -m demo`: the main job in this machine's ComfyUI, or in a diffusers pipeline where there is none.

Prints one table, writes the pictures and report.json, and ends with exit code 1 if a promise did not hold.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from nexfort_engine.hosts.comfy_install import ComfyError, comfyui_version, find_comfyui

from .outcome import Outcome


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser("python -m demo", description="Run the main job once and print what it gave.")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="where pictures and report.json go")
    parser.add_argument("--without-comfyui", action="store_true", help="run the diffusers pipeline all the same")
    options = parser.parse_args()
    if os.environ.get("NEXFORT_DISABLE"):
        say("NEXFORT_DISABLE is set, so nothing would be compiled. Unset it and run this again.")
        return 1
    output = options.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    (output / "report.json").unlink(missing_ok=True)  # a demo that fails must not leave the last one's
    began = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(prefix="nexfort-demo-", ignore_cleanup_errors=True) as scratch:
            outcome = _run(output, Path(scratch), options.without_comfyui)
    except (ComfyError, RuntimeError) as error:
        say(f"The demo did not get to its end: {error}")
        return 1
    file = outcome.write(output)
    say(f"\n{outcome.table()}\n")
    for note in outcome.notes():
        say(note)
    say(f"Pictures and {file.name} are in {output}; it took {time.perf_counter() - began:.0f} s.")
    for broken in outcome.broken_promises():
        say(f"NOT AS PROMISED: {broken}")
    return 1 if outcome.broken_promises() else 0


def _run(output: Path, scratch: Path, without_comfyui: bool) -> Outcome:
    found = None if without_comfyui else find_comfyui()
    if found is None:
        from . import in_diffusers

        say("No ComfyUI: the embedded diffusers pipeline runs. To run in yours: COMFYUI_PATH=/path/to/it make demo")
        return in_diffusers.run(output, scratch, say)
    from . import in_comfyui

    say(f"ComfyUI {comfyui_version(found[0]) or ''} in {found[0]} ({found[1]})")
    return in_comfyui.run(found[0], output, scratch, say)


if __name__ == "__main__":
    raise SystemExit(main())
