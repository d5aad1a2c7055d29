# SPDX-License-Identifier: Apache-2.0
"""Compiles every kernel of the engine for cards that are not there: `python -m benchmarks.kernels_ahead [KERNEL ...]`.

The kernels, their forms and the cards are those of tests/kernels/compiled_*.py. Triton is the one of the Python that
runs the command, such as `.venv/torch-2.15.0/bin/python`, which `make test TORCH=2.15.0` makes. Its rows in
kernels_ahead.csv are replaced. `python -m benchmarks.figures --write` makes the table of them. No GPU is needed, and
nothing is run on one.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CSV = ROOT / "benchmarks" / "kernels_ahead.csv"
COLUMNS = "kernel card triton torch date forms failed reason".split()
Row = dict[str, str]
_PACKAGE = "nexfort_engine.kernels."
_MOST_SECONDS = 300  # for a form
_MOST_CHARACTERS = 300  # of a reason


def cases() -> Iterator[Any]:
    """Every kernel in every form for every card, as the tests have them."""
    sys.path.insert(0, str(ROOT / "tests" / "kernels"))
    import ahead

    return ahead.all_cases()


def name_of(kernel: Any) -> str:
    """A kernel as a row names it: operator, file and function."""
    return f"{kernel.fn.__module__.removeprefix(_PACKAGE)}.{kernel.fn.__name__}"


def card_of(case: Any) -> str:
    """A card as a row names it."""
    return f"sm_{case.card}" if isinstance(case.card, int) else case.card


def why_not(case: Any) -> str:
    """Why a form is not compiled, or nothing. In a process of its own, which a compiler may end."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as said:
        child = os.fork()
        if child == 0:
            _compile(case, said)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        reason = " ".join(said.read().split())[:_MOST_CHARACTERS]
    return reason if status >= 0 else f"the compiler ended with {signal.Signals(-status).name}"


def _compile(case: Any, said: Any) -> None:
    """In the child, which ends here."""
    signal.alarm(_MOST_SECONDS)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        case.compiled()
    except BaseException as error:
        line = traceback.extract_tb(error.__traceback__)[-1].line
        said.write(f"{type(error).__name__}: {str(error) or line}")
        said.flush()
    finally:
        os._exit(0)


def compiled(some: Iterable[Any]) -> list[Row]:
    """A row for each kernel and card. Says of each form that is not compiled why, at once."""
    import torch
    import triton
    from triton.runtime.cache import triton_key

    triton_key()  # of all of Triton's files, once for all children
    rows: dict[tuple[str, str], Row] = {}
    shared = {"triton": triton.__version__, "torch": torch.__version__, "date": datetime.date.today().isoformat()}
    for case in some:
        key = (name_of(case.kernel), card_of(case))
        if key not in rows:
            print(*key, flush=True)
            rows[key] = {"kernel": key[0], "card": key[1], **shared, "forms": "0", "failed": "0", "reason": ""}
        row, reason = rows[key], why_not(case)
        row["forms"] = str(int(row["forms"]) + 1)
        if reason:
            print(f"    {reason}", flush=True)
            row["failed"] = str(int(row["failed"]) + 1)
            row["reason"] = row["reason"] or reason
    return list(rows.values())


def read(file: Path = CSV) -> list[Row]:
    """The rows of a file."""
    with file.open(newline="", encoding="utf-8") as opened:
        return list(csv.DictReader(opened))


def minor(row: Row) -> str:
    """The version of Triton by which rows are told apart, such as 3.6."""
    return ".".join(row["triton"].split(".")[:2])


def replaced(rows: list[Row], new: list[Row], everything: bool) -> list[Row]:
    """Rows with new ones in the place of those of the same Triton; of all kernels, or of theirs alone."""
    gone = {(minor(row), row["kernel"]) for row in new}
    versions = {version for version, _ in gone}
    kept = [
        row for row in rows if (minor(row) not in versions if everything else (minor(row), row["kernel"]) not in gone)
    ]
    return sorted([*kept, *new], key=lambda row: (row["kernel"], _order(row["card"]), _order(minor(row))))


def _order(name: str) -> tuple[str, list[int]]:
    """Cards and versions in their order: sm_90 before sm_100, 3.9 before 3.10."""
    start = name.rstrip("0123456789.")
    return ("" if start == "sm_" else start, [int(part) for part in name.removeprefix(start).split(".")])


def table(rows: list[Row]) -> str:
    """In Markdown: which Tritons compile every form of a kernel for a card."""
    cards = sorted({row["card"] for row in rows}, key=_order)
    versions = sorted({minor(row) for row in rows}, key=_order)
    lines = [f"| operator, kernel | language | {' | '.join(cards)} |", "|---" * (len(cards) + 2) + "|"]
    for kernel in sorted({row["kernel"] for row in rows}):
        operator, file, function = kernel.split(".")
        own = [row for row in rows if row["kernel"] == kernel]
        cells = (_cell([row for row in own if row["card"] == card]) for card in cards)
        language = file.removesuffix("_kernel").capitalize()
        lines.append(f"| `{operator}`, `{function}` | {language} | {' | '.join(cells)} |")
    failed = [_failure(row) for row in rows if row["reason"]]
    reasons = ["", "| * failed | Triton | forms | reason |", "|---|---|---|---|", *failed] if failed else []
    return "\n".join([*lines, "", *_tried(rows, versions), *reasons])


def _cell(rows: list[Row]) -> str:
    if not rows:
        return "-"
    good = sorted({minor(row) for row in rows if not row["reason"]}, key=_order)
    mark = "*" if any(row["reason"] for row in rows) else ""
    if len(good) > 1 and _behind(good[0], len(good) - 1) == good[-1]:
        return f"{good[0]} to {good[-1]}{mark}"
    return (", ".join(good) or "none") + mark


def _behind(version: str, many: int) -> str:
    """The version so many behind one, as 3.8 is two behind 3.6."""
    major, _, low = version.partition(".")
    return f"{major}.{int(low) + many}"


def _failure(row: Row) -> str:
    reason = row["reason"].replace("|", "\\|").replace("<", "&lt;")
    function = row["kernel"].rpartition(".")[2]
    forms = f"{row['failed']} of {row['forms']}"
    return f"| `{function}`, {row['card']} | {row['triton']} | {forms} | {reason} |"


def _tried(rows: list[Row], versions: list[str]) -> Iterator[str]:
    yield "| Triton | torch | date | forms that are compiled |"
    yield "|---|---|---|---|"
    for version in versions:
        own = [row for row in rows if minor(row) == version]
        newest = max(own, key=lambda row: row["date"])
        forms = sum(int(row["forms"]) for row in own)
        good = forms - sum(int(row["failed"]) for row in own)
        yield f"| {newest['triton']} | {newest['torch'].partition('+')[0]} | {newest['date']} | {good} of {forms} |"


def main(argv: list[str] | None = None) -> int:
    """Compile all kernels, or those that are named, and replace their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", help="names of functions; otherwise all")
    parser.add_argument("--csv", type=Path, default=CSV, help="the file that has the rows")
    options = parser.parse_args(argv)
    some = [case for case in cases() if not options.kernels or case.kernel.fn.__name__ in options.kernels]
    if not some:
        parser.error(f"found no kernel {' or '.join(options.kernels)}; tests/kernels/compiled_*.py have them")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        new = compiled(some)
    rows = replaced(read(options.csv) if options.csv.exists() else [], new, not options.kernels)
    with options.csv.open("w", newline="", encoding="utf-8") as opened:
        writer = csv.DictWriter(opened, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    failed = [row for row in new if row["reason"]]
    print(f"{len(new) - len(failed)} of {len(new)} kernels and cards are compiled; {options.csv.name} has the rest")
    return 0


if __name__ == "__main__":
    sys.exit(main())
