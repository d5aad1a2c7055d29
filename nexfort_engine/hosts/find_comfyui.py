# SPDX-License-Identifier: Apache-2.0
"""The search for a ComfyUI as a command: `python -m nexfort_engine.hosts.find_comfyui` prints its root, or nothing.

For the Makefile and scripts. The search itself, and its order, are in comfy_install.py; it needs nothing but Python.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .comfy_install import ComfyError, find_comfyui


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the root and returns 0, found or not; 1 with the reason if COMFYUI_PATH names something else."""
    parser = argparse.ArgumentParser(
        "python -m nexfort_engine.hosts.find_comfyui", description="Print the root of a ComfyUI on this machine."
    )
    parser.add_argument("--how", action="store_true", help="say on a second line how it was found")
    options = parser.parse_args(arguments)
    try:
        found = find_comfyui()
    except ComfyError as error:
        sys.stderr.write(f"nexfort: {error}\n")
        return 1
    if found is not None:
        sys.stdout.write(f"{found[0]}\n")
        if options.how:
            sys.stdout.write(f"{found[1]}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
