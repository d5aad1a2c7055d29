# SPDX-License-Identifier: Apache-2.0
"""One source for figures: a measurement stands in a block that benchmarks/figures.py wrote, and nowhere else.

A figure is a number with a unit. By hand it may stand in a page for two reasons. It is a limit: then LIMITS names the
place in the code that has it. Or it is a reason in a page for developers: then its paragraph or row names a GPU or CPU
and a date, and benchmarks/history.md has it.
"""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pages
import pytest
from pages import DESIGN, ROOT, USER, name_of, read
from test_document_words import texts
from test_project import ENGINE

from benchmarks import figures

HISTORY = ROOT / "benchmarks" / "history.md"
UNIT = r"(?:ms|s|sec|seconds?|minutes|microseconds?|µs|GiB|MiB|KiB|GB|MB|it/s|TFLOP/s|%|x|×|times)"
FIGURE = re.compile(rf"(?<![\w.x/-])(\d[\d.,]*\d|\d)(?:(?: to | and |, | or |/)\d[\d.]*)*[ \u00a0]?{UNIT}(?![\w/-])")
NUMBER = re.compile(r"\d+(?:\.\d+)?")
WHERE = re.compile(r"\b(?:H100|H200|A100|CPU|processor)\b")
WHEN = re.compile(r"\b20\d\d-\d\d-\d\d\b")
# A limit, as pages write it -> files of the engine that have it, and what stands there.
LIMITS = {
    "1.1 times": {"dispatch/verify.py": "FACTOR = 1.1"},
    "0.1 s": {"compilation/jobs.py": "WATCH = 0.1"},
    "10 s": {"cache/lock.py": "TIMEOUT = 10.0"},
    "30 s": {"cache/staging.py": "PATIENCE = 30.0", "compilation/handover.py": "LONG = 30.0"},
    "60 s": {
        "cache/root_dir.py": "RETRY_AFTER = 60.0",
        "lowering/worker_pool.py": "_KEPT = 60.0",
        "system/compiler_processes.py": "SILENT = 60.0",
    },
    "600 s": {"lowering/worker_pool.py": "_PATIENCE = 600.0"},
    "32 times": {"compilation/refusals.py": "_MOST_GIVEN_UP = 32"},
    "64 times": {"dispatch/step_times.py": "_MOST_TOLD = 64"},
    "2 GiB": {"weights/prepack_entry.py": "_RESERVE = 1 << 31"},
    "64 MiB": {"hosts/comfy/conditioning.py": "_MOST_BYTES = 2**26"},
    "100 MiB": {"cudagraphs/step_graphs.py": "100 << 20"},
}


def by_hand(page: Path) -> list[tuple[int, str, str]]:
    """(line, figure, paragraph or whole row) of the figures that no command wrote; those in code are examples."""
    text = pages.plain(read(page))
    rows = text.splitlines()
    found = []
    for line, block, cell in pages.blocks(read(page)):
        around = rows[line - 1] if cell else block
        found += [(line, one[0], around) for one in FIGURE.finditer(block)]
    return found


def limit(figure: str) -> bool:
    return figure in LIMITS


def is_history(figure: str, around: str, history: set[str]) -> bool:
    known = set(NUMBER.findall(figure)) <= history
    return known and bool(WHERE.search(around) and WHEN.search(around))


@pytest.mark.parametrize("page", list(figures.pages()), ids=name_of)
def test_blocks_hold_what_the_csvs_say(page: Path) -> None:
    assert figures.written(read(page)) == read(page), "python -m benchmarks.figures --write"


# Pages whose figures come from the catalogue of options, which copies them from history.
CATALOGUE = [page for page in USER if page.name == "options.md"]


@pytest.mark.parametrize("page", [page for page in USER if page not in CATALOGUE], ids=name_of)
def test_no_measurement_stands_by_hand_in_a_page_for_users(page: Path) -> None:
    found = [f"{name_of(page)}:{line}: {figure}" for line, figure, _ in by_hand(page) if not limit(figure)]
    assert not found, "put it into a block of benchmarks/figures.py, or name the limit in LIMITS"


@pytest.mark.parametrize("page", [*CATALOGUE, *DESIGN], ids=name_of)
def test_a_measurement_in_a_page_for_developers_is_one_of_history(page: Path) -> None:
    history = set(NUMBER.findall(read(HISTORY)))
    found = [
        f"{name_of(page)}:{line}: {figure}"
        for line, figure, around in by_hand(page)
        if not limit(figure) and not is_history(figure, around, history)
    ]
    assert not found, "its paragraph names GPU and date, and benchmarks/history.md has it; or it is one of LIMITS"


def test_no_measurement_stands_in_a_tooltip() -> None:
    found = []
    for path in sorted((ROOT / "locales").rglob("*.json")):
        for key, text in texts(json.loads(path.read_text(encoding="utf-8")), name_of(path)):
            found += [f"{key}: {one[0]}" for one in FIGURE.finditer(text) if not limit(one[0])]
    assert not found


def test_each_limit_is_where_it_is_said_to_be() -> None:
    wrong = [
        f"{one}: {file} has no {said!r}"
        for one, places in LIMITS.items()
        for file, said in places.items()
        if said not in (ENGINE / file).read_text(encoding="utf-8")
    ]
    assert not wrong
    written = "\n".join(read(page) for page in [*USER, *DESIGN])
    assert [one for one in LIMITS if one not in written.replace("\n", " ")] == [], "no page has it any more"


def test_nothing_that_was_measured_is_listed_as_not_measured() -> None:
    """Whole prompts, quantised checkpoints and LoRA on them have rows: what is missing is said to be another one."""
    with open(ROOT / "benchmarks" / "prompt_clock.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    workloads = " ".join(row["workload"] for row in rows)
    measured = [word for word in ("int8", "fp8", "lora") if word in workloads]
    measured += ["quantised"] if "fp8" in measured else []
    measured += ["whole prompts"] if any(row["what"] != "step" for row in rows) else []
    assert len(measured) == 5
    section = read(ROOT / "docs" / "benchmarks.md").partition("## Not measured\n")[2].partition("\n## ")[0]
    items = re.split(r"^- ", section, flags=re.MULTILINE)[1:]
    assert len(items) > 3
    told = [one for one in items if any(word in one.lower() for word in measured)]
    assert [one for one in told if not re.search(r"\bothers?\b|\bran with\b", one)] == []


def test_a_ratio_is_of_one_run(tmp_path: Path) -> None:
    from benchmarks import ratios, rows

    def row(way: str, ms: float, **more: object) -> rows.Row:
        known = {"backbone": "sd21", "size": "768x768", "steps": 20, "gpu": "A card", "torch": "2.11.0+cu130"}
        known |= {"date": "2026-11-20", "commit": "abc", "command": "record", "way": way, "ms": ms, "first_s": 1.0}
        return dict.fromkeys(rows.COLUMNS, "") | known | more

    whole = [row("eager", 40.0), row("core", 30.0), row("core, warm", 50.0), row("cold", 21.0), row("warm", 20.0)]
    others = [row("warm", 1.0, commit="later"), row("eager", 400.0, command="other"), row("cold", 9.0, options="{}")]
    rows.append_rows(tmp_path / "results.csv", [*whole, *others], rows.COLUMNS)
    text = ratios.table(tmp_path / "results.csv")
    assert text.splitlines()[2:] == [
        "| A card | SD2.1, batch 2, 768x768 | `O2` | 1.33x | **2.00x** | 1.0 / 1.0 | 1.0 / 1.0 |"
    ]
    rows.append_rows(tmp_path / "half.csv", whole[:-1], rows.COLUMNS)
    assert len(ratios.table(tmp_path / "half.csv").splitlines()) == 2, "a row with an empty half is not shown"


def test_figures_are_found_and_words_are_not() -> None:
    text = "It takes 3.4 ms, 12 to 15 s, 6 % and 1.5x; 10 GiB. fp8, sm_90, 1024x1024, 8 bits, H100 and 2.11 are none."
    assert [one[0] for one in FIGURE.finditer(text)] == ["3.4 ms", "12 to 15 s", "6 %", "1.5x", "10 GiB"]
    assert is_history("3.4 ms", "3.4 ms (H200, 2026-11-20)", {"3.4"})
    assert not is_history("3.4 ms", "3.4 ms (H200, 2026-11-20)", {"3.5"})
    assert not is_history("3.4 ms", "3.4 ms (H200)", {"3.4"})


def test_an_unknown_block_is_told() -> None:
    with pytest.raises(ValueError, match="there are no figures 'nothing'; expected one of ratios"):
        figures.written("<!-- figures: nothing -->\n<!-- end of figures -->")
