# SPDX-License-Identifier: Apache-2.0
"""One line to the terminal, at once and in whatever code page it has. For the commands alone."""

from __future__ import annotations

import sys


def say(line: str) -> None:
    """Prints a line at once: progress must be seen when it happens, also through a pipe."""
    try:
        sys.stdout.write(line + "\n")
    except UnicodeEncodeError:  # a terminal with an old code page
        encoding = sys.stdout.encoding or "ascii"
        sys.stdout.write(line.encode(encoding, "replace").decode(encoding) + "\n")
    sys.stdout.flush()
