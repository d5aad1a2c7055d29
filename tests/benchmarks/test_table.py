# SPDX-License-Identifier: Apache-2.0
"""Tables and chart are what results.csv says; rows of an older file stay readable when columns come.

That pages hold them is tested in test_document_figures.py.
"""

from __future__ import annotations

import csv
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import chart, ladder_table, ratios, rows
from benchmarks.rows import COLUMNS, append_rows

COMMAND = "python -m benchmarks.ladder sd21 --steps 20"


def row(way: str, ms: object = 10.0, **more: object) -> rows.Row:
    known = {"backbone": "sd21", "size": "768x768", "steps": 20, "gpu": "A card", "torch": "2.11.0+cu130"}
    known |= {"date": "2026-11-20", "commit": "abc", "command": COMMAND, "way": way, "ms": ms}
    return dict.fromkeys(COLUMNS, "") | known | more


def file_of(folder: Path, *found: rows.Row) -> Path:
    append_rows(folder / "results.csv", list(found), COLUMNS)
    return folder / "results.csv"


# ---- what is committed -------------------------------------------------------------------------------------


def test_the_picture_is_the_one_of_the_rows() -> None:
    drawn = chart.PICTURE.read_text(encoding="utf-8")
    assert drawn == chart.chart(ratios.RESULTS), "python -m benchmarks.figures --write"
    page = (ratios.ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert f"../{chart.PICTURE.relative_to(ratios.ROOT).as_posix()}" in page


# ---- which rows count --------------------------------------------------------------------------------------

TOGETHER = [row("eager", 40.0), row("core", 30.0), row("cold", 21.0), row("warm", 20.0)]


def test_the_newest_that_were_run_together_count(tmp_path: Path) -> None:
    newer = [row("warm", 5.0, commit="later"), row("cold", 4.0, options='{"mode": "O3"}'), row("core", "", reason="x")]
    file = file_of(tmp_path, *TOGETHER, *newer)
    (found,) = ratios.runs(table_rows := ratios.read(file), ratios.CORE, ratios.MODES["O2"]).values()
    assert len(table_rows) == 7
    assert {way: found[way]["ms"] for way in found} == {"eager": "40.0", "core": "30.0", "cold": "21.0", "warm": "20.0"}
    again = [{**one, "commit": "new", "ms": str(float(one["ms"]) / 2)} for one in TOGETHER]
    append_rows(file, again, COLUMNS)
    (found,) = ratios.runs(ratios.read(file), ratios.CORE, ratios.MODES["O2"]).values()
    assert found["eager"]["ms"] == "20.0", "the newest run counts"


def test_the_chart_has_a_bar_as_long_as_each_figure(tmp_path: Path) -> None:
    file = file_of(tmp_path, *TOGETHER, row("eager", 1.0, backbone="flux"))
    drawn = ElementTree.fromstring(chart.chart(file))
    svg = "{http://www.w3.org/2000/svg}"
    bars = {}
    for box in drawn.iter(f"{svg}rect"):
        if float(box.attrib["height"]) > 12 and box.attrib["class"] != "page":
            bars[box.attrib["class"]] = float(box.attrib["width"])
    assert bars["core"] / bars["eager"] == pytest.approx(30 / 40, abs=1e-3)
    assert bars["warm"] / bars["eager"] == pytest.approx(20 / 40, abs=1e-3)
    texts = [text.text for text in drawn.iter(f"{svg}text")]
    assert {"40.0 ms", "30.0 ms, 1.33× as fast", "20.0 ms, 2.00× as fast", "SD2.1"} <= set(texts)
    assert "Flux-dev" not in texts, "its three ways were not run together"


# ---- the file ----------------------------------------------------------------------------------------------


def test_a_file_from_before_a_column_keeps_its_rows(tmp_path: Path) -> None:
    file = tmp_path / "old.csv"
    new = ("tflops", "of_ceiling", "reason", "ms_queued")
    old = COLUMNS[: -len(new)]
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, old, lineterminator="\n")
        writer.writeheader()
        writer.writerow({name: f'{name}, "old"' for name in old})
    append_rows(file, [row("eager", tflops=1.5)], COLUMNS)
    first, second = ratios.read(file)
    assert first == {**{name: f'{name}, "old"' for name in old}, **dict.fromkeys(new, "")}
    assert second["tflops"] == "1.5" and list(second) == COLUMNS
    append_rows(file, [row("core")], COLUMNS)
    assert [one["way"] for one in ratios.read(file)][1:] == ["eager", "core"]
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("date,price\n1,2\n")
    with pytest.raises(ValueError, match="has the columns price; expected some of date, gpu"):
        append_rows(tmp_path / "other.csv", [row("eager")], COLUMNS)
    assert (tmp_path / "other.csv").read_text() == "date,price\n1,2\n"


# ---- the ladder's table ------------------------------------------------------------------------------------


def test_a_rung_is_one_line_with_both_of_its_processes(tmp_path: Path) -> None:
    found = [
        row("eager", 40.0, error_to_fp32=1e-3, first_s=1.5, tflops=100.0, of_ceiling=0.125),
        row("plain", 21.0, first_s=30.0, error_to_fp32=9e-4),
        row("plain, warm", 20.0, first_s=2.0, error_to_fp32=8e-4, error_to_eager=5e-4, device_gib=3.5, of_ceiling=0.5),
        row("plain+O3", "", reason="no fp8 | here"),
        *(row("core", 25.0), row("cold", 19.0)),
    ]
    file = file_of(tmp_path, *found)
    text = ladder_table.table(ladder_table.newest(ratios.read(file)))
    assert text == ladder_table.table(ratios.read(file)) and text == ladder_table.table(found)
    lines = [[cell.strip() for cell in line.replace("\\|", "/").split("|")[1:-1]] for line in text.splitlines()[4:]]
    assert lines[0][:7] == ["eager", "1.5", "40.0", "", "1.00", "100.0", "12%"]
    assert lines[1] == ["plain", "30.0 / 2.0", "20.0", "", "2.00", "", "50%", "3.5", "0.001 / 0.0008", "0.0005", ""]
    assert lines[2][0] == "plain+O3" and lines[2][2] == "" and lines[2][-1] == "no fp8 / here"


@pytest.mark.parametrize(
    ("rung", "gpu", "to_fp32", "to_eager", "said"),
    [
        ("default", "A card", 1.05e-3, 5e-4, ""),
        ("default", "A card", 1.2e-3, 5e-4, "further from fp32 than 1.1 times eager"),
        ("default", "A card", 1e-3, 1.7e-3, "further from eager than twice"),
        ("default+O3", "A card", 1e-2, 1e-2, ""),
        ("core", "A card", 1e-2, 1e-2, ""),
        ("plain", "CPU", 1e-2, 5e-5, ""),
        ("plain", "CPU", 1e-6, 2e-4, "more than 0.0001 from eager"),
    ],
)
def test_a_rung_over_the_distance_rule_is_marked(
    rung: str, gpu: str, to_fp32: float, to_eager: float, said: str
) -> None:
    ways = "warm" if rung == "default" else rung
    found = [
        row("eager", error_to_fp32=1e-3, gpu=gpu),
        row("noise", error_to_fp32=1e-3, error_to_eager=8e-4, gpu=gpu),
        row(ways, error_to_fp32=to_fp32, error_to_eager=to_eager, gpu=gpu),
    ]
    remark = ladder_table.table(found).splitlines()[-1].split("|")[-2].strip()
    assert remark == "" if not said else said in remark


def test_the_last_ladder_of_each_network_is_shown_that_compares() -> None:
    """One on a GPU that has ComfyUI's compile node beside Nexfort's defaults; on a processor any."""

    def whole(**more: object) -> list[rows.Row]:
        return [row(way, 1.0, **more) for way in ("eager", "core", "cold")]

    first, second, other = whole(commit="old"), whole(), whole(backbone="flux", commit="old")
    part = row("plain", 5.0, command=f"{COMMAND} --rungs plain")
    recorded = row("eager", 4.0, commit="new", command="python -m benchmarks.record sd21")
    alone = row("eager", 9.0, commit="new")
    small = row("eager", 6.0, backbone="sd21, small", gpu="CPU", commit="new")
    found = [*first, *other, *second, recorded, part, alone, small]
    assert ladder_table.newest(found) == [*other, *second, part, small]


def test_the_faster_process_counts_and_fp8_has_no_ceiling() -> None:
    found = [
        row("eager", 40.0, ms_queued=39.0),
        *(row("core", 30.0), row("core, warm", 60.0), row("default+O3", 10.0, of_ceiling=1.3, ms_queued=9.0)),
    ]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in ladder_table.table(found).splitlines()[4:]]
    assert [(line[2], line[3], line[4]) for line in lines] == [
        *(("40.0", "39.0", "1.00"), ("30.0", "", "1.33"), ("10.0", "9.0", "4.00")),
    ]
    assert lines[2][6] == "", "the ceiling is a product in the model's dtype"
    assert " error to fp32" not in ladder_table.table(found), "nobody measured one"
