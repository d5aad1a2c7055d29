# SPDX-License-Identifier: Apache-2.0
"""What was measured of attention, on disk: one readable JSON file for a device and a torch, beside the artefacts.

Read once a process. The first measurement of a kind stands, of whichever process it is, so that a picture stays the
picture that it was; deleting the file measures anew. A file that is damaged, of something else or could be somebody
else's is not read, with the reason, and is made again.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..cache.sidecar import UnreadableError, recall_own, update
from .backends import OWN

log = logging.getLogger("nexfort")

_FORMAT = 1
_MOST = 4096  # kinds; no more are written


@dataclass(frozen=True)
class Row:
    """What was found of one kind. microseconds: of each kernel that was measured. left_out: why others were not."""

    kernel: str
    microseconds: dict[str, float]
    left_out: dict[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """For a report."""
        if not self.microseconds:
            return f"{OWN}'s own choice"
        name = f"{OWN}'s own choice" if self.kernel == OWN else self.kernel
        others = ", ".join(f"{k} {v:.0f}" for k, v in self.microseconds.items() if k != self.kernel)
        took = f"{self.microseconds[self.kernel]:.0f} microseconds"
        return f"{name}, {took} ({others}){without(self.left_out)}" if others else f"{name}{without(self.left_out)}"

    def as_json(self) -> dict[str, Any]:
        """As the file has it."""
        found: dict[str, Any] = {"kernel": self.kernel, "microseconds": self.microseconds}
        return {**found, "left_out": self.left_out} if self.left_out else found


class Table:
    """The rows of one device. problem: why something could not be read or written, or None."""

    def __init__(self, folder: Path | None, device: str) -> None:
        self.rows: dict[str, Row] = {}
        self.problem: str | None = None
        self._folder, self._head = folder, {"format": _FORMAT, "device": device, "torch": str(torch.__version__)}
        self.name = file_name(device)
        self.rows = self._read()

    def find(self, kind: str) -> Row | None:
        """What is known of a kind."""
        return self.rows.get(kind)

    def keep(self, kind: str, row: Row) -> Row:
        """Remember a row; gives the one that stands, which another process may have written meanwhile."""
        self.rows[kind] = row
        if self._folder is None:
            return row
        try:
            update(self._folder, self.name, self._with_ours)
        except OSError as error:
            self.problem = f"what was measured of attention is not remembered: {error}"
            log.warning("Nexfort: %s", self.problem)
        return self.rows[kind]

    def _with_ours(self, found: Any) -> Any:
        """The content of the file with the rows of this process, which its own come before."""
        theirs = self._rows_of(found) if found is not None else None
        self.rows = {**self.rows, **(theirs or {})}
        kept = [(k, row) for k, row in self.rows.items() if row.microseconds][:_MOST]
        return {**self._head, "choices": {kind: row.as_json() for kind, row in kept}}

    def _read(self) -> dict[str, Row]:
        try:
            found = recall_own(self._folder, self.name) if self._folder is not None else None
        except UnreadableError as reason:
            return self._unread(str(reason))
        if found is None:
            return {}
        rows = self._rows_of(found)
        return self._unread("it does not hold what it should") if rows is None else rows

    def _unread(self, reason: str) -> dict[str, Row]:
        self.problem = f"{self.name} is not read and is made again: {reason}"
        log.warning("Nexfort: %s", self.problem)
        return {}

    def _rows_of(self, found: Any) -> dict[str, Row] | None:
        """The rows of a file's content; None where it is not a file of this device and torch."""
        if not isinstance(found, dict) or {k: found.get(k) for k in self._head} != self._head:
            return None
        choices = found.get("choices")
        if not isinstance(choices, dict):
            return None
        rows = {kind: _row(value) for kind, value in choices.items()}
        return None if None in rows.values() else {k: row for k, row in rows.items() if row is not None}


def without(left_out: Mapping[str, str]) -> str:
    """Why kernels are no candidates, for a report."""
    return "".join(f"; not {name}: {reason}" for name, reason in left_out.items())


def file_name(device: str) -> str:
    """Of the file for a device by its name, and this torch."""
    return "attention-" + re.sub(r"[^A-Za-z0-9.+]+", "-", f"{device}-torch-{torch.__version__}") + ".json"


def _row(value: Any) -> Row | None:
    if not isinstance(value, dict):
        return None
    kernel: Any = value.get("kernel")
    took: Any = value.get("microseconds")
    left_out: Any = value.get("left_out", {})
    if not _texts(left_out, str) or not _texts(took, (int, float)) or kernel not in took or OWN not in took:
        return None
    if not all(math.isfinite(v) and v >= 0 for v in took.values()):
        return None
    return Row(kernel, {k: float(v) for k, v in took.items()}, dict(left_out))


def _texts(value: Any, of: Any) -> bool:
    """Whether it is a mapping of texts to values of a type."""
    return isinstance(value, Mapping) and all(isinstance(k, str) and isinstance(v, of) for k, v in value.items())
