# SPDX-License-Identifier: Apache-2.0
"""The project's pages as a reader meets them: prose, sentence by sentence, without code and figures of a command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
USER = [README, *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "web" / "docs").glob("*.md"))]
DESIGN = [ROOT / "DESIGN.md", *sorted((ROOT / "docs" / "design").glob("*.md"))]

FIGURES = re.compile(r"<!-- figures: [\w-]+ -->.*?<!-- end of figures -->", re.DOTALL)
FENCED = re.compile(r"^(```|~~~).*?^\1[^\n]*$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?<=\n\n)(?: {4}(?! *[-*\d])[^\n]*\n)+")
CODE = re.compile(r"`[^`\n]+`")
COMMENT, TAG = re.compile(r"<!--.*?-->", re.DOTALL), re.compile(r"<[^>]*>", re.DOTALL)
PICTURE = re.compile(r"!\[[^\]]*\]\([^)]*\)")
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)]*\)")
ITEM = re.compile(r"^\s*(?:[-*]|\d+\.)\s+")
ENDED = re.compile(r"(?<=[.!?:])[\"')*]*\s+(?=[\"'(*]*[A-Z0-9`])|(?<=[.!?])[\"')*]*\s+(?=[\"'(*]*[a-z`])")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blanked(text: str, pattern: re.Pattern[str]) -> str:
    """Text without what a pattern finds; each line keeps its number."""
    return pattern.sub(lambda found: "\n" * found[0].count("\n"), text)


def plain(text: str) -> str:
    """A page without what is no prose: code, figures that a command wrote, pictures, comments, addresses of links."""
    for pattern in (FIGURES, FENCED, INDENTED, COMMENT, PICTURE, TAG):
        text = blanked(text, pattern)
    text = CODE.sub("`code`", text)
    return LINK.sub(r"\1", text)


def blocks(text: str) -> Iterator[tuple[int, str, bool]]:
    """(line, paragraph or list item or cell of a table, whether it is a cell) of a page in turn; no headings."""
    begun, gathered = 0, ""
    for number, line in enumerate([*plain(text).splitlines(), ""], 1):
        row = line.lstrip().startswith("|")
        if gathered and (not line.strip() or row or line.startswith("#") or ITEM.match(line)):
            yield begun, gathered, False
            gathered = ""
        if row:
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
            yield from ((number, cell, True) for cell in cells if re.search(r"\w", cell))
        elif line.strip() and not line.startswith("#"):
            begun = begun if gathered else number
            gathered = f"{gathered} {ITEM.sub('', line).strip()}".strip()


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """(line at which its paragraph begins, sentence); a colon before a capital ends one, as a list does."""
    for line, block, _ in blocks(text):
        yield from ((line, one) for one in ENDED.split(block) if re.search(r"\w", one))


def words(text: str) -> int:
    """How many words a text has; code and a number with its unit are one each."""
    return len(re.findall(r"[\w`][^\s]*", re.sub(r"(?<=\d) (?=(?:ms|s|GiB|MiB|MB|GB|%)\b)", "", text)))


def prose_words(text: str) -> int:
    """Words of a page's prose: tables, captions, code and figures of a command do not count."""
    return sum(words(block) for _, block, cell in blocks(text) if not cell)
