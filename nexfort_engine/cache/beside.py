# SPDX-License-Identifier: Apache-2.0
"""Small facts about this machine, as JSON files beside the artefacts. Losing one costs finding it out again."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from .disk import make_private, replace_file

log = logging.getLogger("nexfort")


def recall(folder: Path | None, name: str) -> Any:
    """What was remembered under this name; None if nothing was, or if it is damaged."""
    if folder is None:
        return None
    try:
        return json.loads((folder / name).read_text())
    except (OSError, ValueError):
        return None


def remember(folder: Path | None, name: str, value: object) -> None:
    """Keep a JSON-able value under this name; without a folder, or where it cannot be written, nothing is kept."""
    if folder is None:
        return
    try:
        make_private(folder)
        replace_file(folder / name, json.dumps(value, indent=1).encode(), folder)
    except OSError as error:
        log.debug("Nexfort: %s could not be stored: %s", name, error)
