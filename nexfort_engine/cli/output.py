# SPDX-License-Identifier: Apache-2.0
"""Lines and tables to the terminal, at once and in whatever code page it has. For the commands alone.

On a terminal `rich` draws tables and colours, where it is installed. The plugin installs no package, and ComfyUI's
requirements bring rich with transformers from 5 on, but with no older one. So there is a plain form as well, which a
pipe gets in any case: scripts read it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

Row = Sequence[str]


def say(line: str) -> None:
    """Prints a line at once: progress must be seen when it happens, also through a pipe."""
    try:
        sys.stdout.write(line + "\n")
    except UnicodeEncodeError:  # a terminal with an old code page
        encoding = sys.stdout.encoding or "ascii"
        sys.stdout.write(line.encode(encoding, "replace").decode(encoding) + "\n")
    sys.stdout.flush()


def say_table(headings: Row, rows: Sequence[Row], colours: Mapping[str, str] | None = None) -> None:
    """Prints rows below their headings. colours: of cells that hold these words and nothing else."""
    console = _console(sys.stdout)
    if console is None:
        from ..cache.table import aligned

        for line in aligned([headings, *rows]):
            say(line)
        return
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        made.add_column(heading, overflow="fold")
    for row in rows:  # as Text: what others wrote is no markup
        made.add_row(*(Text(cell, (colours or {}).get(cell, "")) for cell in row))
    console.print(made)


def say_failure(line: str) -> None:
    """Prints the reason for which a command ends, to the standard error."""
    console = _console(sys.stderr)
    if console is None:
        sys.stderr.write(line + "\n")
        return
    from rich.text import Text

    console.print(Text(line, "red"), soft_wrap=True)


def _console(stream: TextIO) -> Any:
    """What draws on a terminal; None for a pipe, and where rich is not installed."""
    if not stream.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=stream, highlight=False)
