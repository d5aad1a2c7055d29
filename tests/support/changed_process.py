# SPDX-License-Identifier: Apache-2.0
"""The other process of tests/test_changes.py: `python changed_process.py STATE,STATE,... NAME...` prints JSON.

A state is "plain" or the name of a change. Each backbone is compiled once and runs in all of them, one after another.
Printed is, by backbone and state, the distance to eager and how many artefacts were compiled and loaded. No test lives
here.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch


def main(states: list[str], names: list[str]) -> None:
    """Run the named backbones."""
    torch.set_num_threads(1)
    if os.environ.get("COMFYUI_PATH"):
        from conftest import import_comfyui

        import_comfyui(Path(os.environ["COMFYUI_PATH"]))
    from backbones import make
    from changes import CHANGES
    from subjects import Subject

    found: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        subject, rows, counted = Subject(make(name)), [], (0, 0)
        for state in states:
            with CHANGES[state](subject.module) if state != "plain" else contextlib.nullcontext():
                distance = subject.same()
            told = subject.report.as_dict()
            now = told["artefacts_compiled"], told["artefacts_loaded"]
            new = dict(zip(("compiled", "loaded"), (now[0] - counted[0], now[1] - counted[1]), strict=True))
            rows.append({"state": state, "distance": distance, "eager": told["eager"], **new})
            counted = now
        found[name] = rows
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1].split(","), sys.argv[2:])
