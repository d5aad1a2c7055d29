# SPDX-License-Identifier: Apache-2.0
"""Pages that are read: how long each is and each of its sentences, what its first paragraph says, which words it uses.

The counts are for English. Tooltips, panels, the report and the log are held to the same length of a sentence.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pages
import pytest
from pages import DESIGN, README, ROOT, USER, name_of, read
from test_project import ENGINE, sources

MOST_WORDS = {README: 600}
MOST_WORDS_ELSE = 1000
USERS, DEVELOPERS = 25, 30  # words of a sentence
LINE = 120
FIRST_PARAGRAPH = 20  # words at least
# Words of the engine's own that have one in the field (docs/design/overview.md has the glossary).
PRIVATE = {
    r"stand-ins?": "shim, or placeholder",
    r"lenders?": "weight provider",
    r"loans?|lends?|lent|borrow\w*": "lease",
    r"misfits?": "guard failure",
    r"ghosts?": "meta example",
    r"rehears\w+": "capture check",
    r"glue": "module fingerprint",
    r"remed(?:y|ies)": "recovery",
    r"attic": "quarantine",
    r"shelf": "catalog",
    r"forkers?": "fork server",
    r"few keys": "short-KV",
    r"unpadded": "odd head dim",
    r"narrow attention": "low-precision attention",
    r"asides": "step-invariant value",
    r"parting": "graph splitting",
    r"prepared weights?": "prepacked weights",
    r"whole rows": "persistent reductions",
    r"measured attention": "autotuned attention",
    r"cpu probes?": "vector-ISA cache",
    r"strengths are": "dynamic scalars are",
    r"products?": "matmul",
    r"wider computations?": "run in higher precision",
    r"fast profile": "fast-compile profile",
    r"core's TorchCompile\w+": "ComfyUI's",
}
# Words of the engine that a user needs not know: they stand in pages on how it works.
OF_THE_ENGINE = re.compile(r"\b(?:artefacts?|eager|regions?|distances?)\b", re.IGNORECASE)
PRIVATE_WORD = re.compile(rf"\b(?:{'|'.join(PRIVATE)})\b", re.IGNORECASE)
# (page, line's beginning): where a word stands for what it means in plain English
PLAIN: set[tuple[str, str]] = set()


@pytest.mark.parametrize("page", [*USER, *DESIGN], ids=name_of)
def test_a_page_is_short(page: Path) -> None:
    assert pages.prose_words(read(page)) <= MOST_WORDS.get(page, MOST_WORDS_ELSE)


@pytest.mark.parametrize("page", [*USER, *DESIGN], ids=name_of)
def test_sentences_are_short(page: Path) -> None:
    most = DEVELOPERS if page in DESIGN else USERS
    long = [f"{name_of(page)}:{line}: {n} words: {one}" for line, one, n in _counted(read(page)) if n > most]
    assert not long, "\n".join(long)


def _counted(text: str) -> Iterator[tuple[int, str, int]]:
    for line, one in pages.sentences(text):
        yield line, one, pages.words(one)


OTHERS = [ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"]
WRAPPED = [page for page in [*USER, *DESIGN, *OTHERS] if page.parent.parent.name != "web"]


@pytest.mark.parametrize("page", WRAPPED, ids=name_of)
def test_lines_are_wrapped(page: Path) -> None:
    """Help pages are not: ComfyUI's front end keeps each line break."""
    lines = enumerate(pages.blanked(read(page), pages.FENCED).splitlines(), 1)
    long = [number for number, line in lines if len(line) > LINE and not line.lstrip().startswith(("|", "<", "!["))]
    assert not long


@pytest.mark.parametrize("page", [*USER, *DESIGN], ids=name_of)
def test_the_first_paragraph_stands_alone(page: Path) -> None:
    """It says what Nexfort is or does, to somebody who has read nothing else."""
    assert re.match(r"# \S", read(page)), "a page begins with its heading"
    first = next(block for _, block, cell in pages.blocks(read(page)) if not cell)
    assert pages.words(first) >= FIRST_PARAGRAPH, first
    if page.parent.name != "docs" or page.parent.parent.name != "web":  # a help page belongs to a node that is seen
        assert "Nexfort" in first, first


@pytest.mark.parametrize("page", [*USER, *DESIGN], ids=name_of)
def test_words_are_those_of_the_field(page: Path) -> None:
    found = []
    lines = pages.plain(read(page)).splitlines()
    for number, line in enumerate(lines, 1):
        if any(name_of(page) == where and line.startswith(begun) for where, begun in PLAIN):
            continue
        for word, better in PRIVATE.items():
            seen = re.finditer(rf"\b(?:{word})\b", line, re.IGNORECASE)
            found += [f"{name_of(page)}:{number}: {one[0]!r}, say {better}" for one in seen]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", [README, *sorted((ROOT / "web" / "docs").glob("*.md"))], ids=name_of)
def test_a_user_s_first_pages_have_no_words_of_the_engine(page: Path) -> None:
    assert OF_THE_ENGINE.findall(read(page)) == [], "tables and pictures' texts are read too"


# ---- tooltips, panels, report, log ------------------------------------------------------------------------


def texts(tree: object, at: str) -> Iterator[tuple[str, str]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from texts(value, f"{at}.{key}")
    elif isinstance(tree, str):
        yield at, tree


@pytest.mark.parametrize("path", sorted((ROOT / "locales" / "en").glob("*.json")), ids=lambda path: path.name)
def test_sentences_of_the_front_end_are_short(path: Path) -> None:
    found = dict(texts(json.loads(path.read_text(encoding="utf-8")), path.name))
    assert found
    long = [f"{at}: {one}" for at, text in found.items() for one in _sentences(text) if pages.words(one) > USERS]
    assert not long, "\n".join(long)
    assert [at for at, text in found.items() if PRIVATE_WORD.search(text)] == [], "say it in words of the field"


SAID = {"note", "eager", "inactive", "info", "warning", "error", "exception"}


def _text(node: ast.AST) -> str:
    """What a literal says; a value that is put in counts as one word."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else "X" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (_text(node.left) or "X") + (_text(node.right) or "X")
    return ""


def _sentences(text: str) -> list[str]:
    return [one for line in text.splitlines() for one in re.split(r"(?<=[.!?:])\s+(?=[A-Z\"(`])", line)]


@pytest.mark.parametrize("path", sources(ENGINE, ROOT / "nodes"), ids=name_of)
def test_sentences_of_report_and_log_are_short_and_in_words_of_the_field(path: Path) -> None:
    long = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SAID:
            for argument in node.args:
                said = _sentences(_text(argument))
                bad = [one for one in said if pages.words(one) > USERS or PRIVATE_WORD.search(one)]
                long += [f"{name_of(path)}:{node.lineno}: {one}" for one in bad]
    assert not long, "\n".join(long)


# ---- the counting itself ----------------------------------------------------------------------------------


def test_what_counts_as_a_sentence() -> None:
    text = "# Head\n\nOne two `a b` [three](x.md). Four: five\nsix!\n\n- item one. Two\n\n| a | `b c` d |\n|---|---|\n"
    text += "<!-- figures: x -->\n9 ms\n<!-- end of figures -->\n```\ncode here\n```\nLast: Next.\n"
    found = [one for _, one in pages.sentences(text)]
    assert found == ["One two `code` three.", "Four: five six!", "item one.", "Two", "a", "`code` d", "Last:", "Next."]
    assert pages.prose_words(text) == 12 and pages.words("8 GiB of `code`") == 3
    assert [line for line, _ in pages.sentences(text)] == [3, 3, 6, 6, 8, 8, 16, 16]


def test_long_sentences_and_private_words_are_noticed() -> None:
    assert [n for *_, n in _counted(f"{'word ' * 31}end. Short one.")] == [32, 2]
    assert PRIVATE_WORD.search("a lender") and not PRIVATE_WORD.search("production")
    assert _sentences("One. Two") == ["One.", "Two"]
