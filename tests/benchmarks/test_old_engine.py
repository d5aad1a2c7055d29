# SPDX-License-Identifier: Apache-2.0
"""The benchmark as a whole: which commands it runs, in what caches, and how figures come into the table."""

from __future__ import annotations

import csv
import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import old_engine, old_table, text_to_image, text_to_video_latte

FOUND = {
    **{"model": "random:sd21", "device": "A card", "torch": "2.11.0+cu130", "size": [768, 768], "steps": 20},
    **{"iterations_per_second": 51.23456, "inference_s": 0.5, "warmup_s": 12.0, "warmup_peak": {"max_used_gib": 4.0}},
    **{"max_used_gib": 3.5, "max_reserved_gib": 4.5, "warmup_made": {"compiled": 21, "loaded": 0, "eager": []}},
    "likeness_to_reference": {"psnr": 40.0, "ssim": 0.99, "latents": 0.0123},
}
CACHED = {"warmup_s": 3.0, "warmup_made": {"compiled": 0, "loaded": 21, "eager": []}}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """(command, environment) of every process that would have run; each leaves figures."""
    seen: list[tuple[list[str], dict[str, str]]] = []

    def stand_in(command: list[str], *, env: dict[str, str] | None = None, **_: Any) -> Any:
        if "--json" not in command:  # git
            return SimpleNamespace(stdout="abc1234\n", returncode=0)
        assert env is not None
        seen.append((command, env))
        found = dict(FOUND)
        if command[command.index("--compiler") + 1] == "nexfort":
            found["iterations_per_second"] = 153.7
            found["cached"] = CACHED
            found["resolutions"] = [{"size": [544, 408], "compiled": 0}]
            found["likeness_to_eager"] = {"psnr": None, "ssim": 1.0, "latents": 0.0}
        if "--quantize" in command:
            found["iterations_per_second"] = 204.9
            found["quantisation"] = {"parts": {"unet": [{"type": "fp8"}, {"type": None}, {"type": "fp8"}]}}
        Path(command[command.index("--json") + 1]).write_text(json.dumps(found))
        if "--save-result" in command:
            Path(command[command.index("--save-result") + 1]).write_bytes(b"")
        return SimpleNamespace(stdout="", stderr="", returncode=0)

    monkeypatch.setattr(subprocess, "run", stand_in)
    return seen


@pytest.mark.parametrize("name", old_engine.FAMILIES)
def test_every_command_is_one_that_the_scripts_take(name: str, ran: list[Any]) -> None:
    assert old_engine.main([name, "--ways", ",".join(old_engine.WAYS)]) == 0
    assert len(ran) == len(old_engine.WAYS)
    parse = text_to_video_latte.parse if name == "latte" else text_to_image.parse
    for way, (command, _) in zip(old_engine.WAYS, ran, strict=True):
        assert Path(command[1]).is_file()
        args = parse(command[2:])
        assert args.model == f"random:{name}"
        assert args.compiler == ("none" if way in ("fp32", "eager") else way.removesuffix("-fp8"))
        assert args.quantize is (way == "nexfort-fp8")
        assert args.warmup_steps == (2 if way == "fp32" else None)
        assert (args.dtype == "float32") is (way == "fp32")
        assert bool(args.reference) is (way != "fp32"), "errors are to the float32 run"
        assert args.cached_warmup is way.startswith("nexfort")


def test_each_process_begins_with_empty_caches(ran: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEXFORT_CACHE_DIR", "/full")
    old_engine.main(["sdxl"])
    for name in ("NEXFORT_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        places = [environment[name] for _, environment in ran]
        assert len(set(places)) == 3 and not any(map(os.path.exists, places)), name


def test_figures_come_into_the_table(ran: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "found.csv"
    assert old_engine.main(["sd21", "--csv", str(file)]) == 0
    with file.open(newline="") as stream:
        rows = {row["way"]: row for row in csv.DictReader(stream)}
    ours = rows["nexfort"]
    assert (ours["rate"], ours["cached_s"], ours["compiled"], ours["cached_compiled"]) == ("153.7", "3.0", "21", "0")
    assert (ours["error_to_fp32"], ours["error_to_eager"], ours["psnr"]) == ("0.0123", "0.0", "")
    assert (ours["sizes_compiled"], ours["warmup_used_gib"]) == ("544x408:0", "4.0")
    assert rows["eager"]["rate"] == "51.23" and rows["eager"]["gpu"] == "A card"
    lines = old_table.table([], old_table.read(file)).splitlines()
    assert len(lines) == 3
    assert "| **3.00** | 51.23 → **153.7** | 12.0 | 3.0 | 3.5 → 3.5 | 0.0123 → 0.0123 |" in lines[2]
    assert "python -m benchmarks.old_engine sd21 --ways fp32,eager,nexfort" in lines[2]


def test_a_quantised_run_says_how_much_of_it_is(ran: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "found.csv"
    assert old_engine.main(["flux", "--ways", "eager,nexfort,nexfort-fp8", "--csv", str(file)]) == 0
    row = old_table.read(file)[-1]
    assert (row["way"], row["rate"], row["packed"], row["cached_s"]) == ("nexfort-fp8", "204.9", "2 of 3", "3.0")
    assert (row["error_to_fp32"], row["error_to_eager"]) == ("0.0123", "0.0")
    lines = old_table.table([], old_table.read(file)).splitlines()
    assert len(lines) == 4 and "**3.00**" in lines[2]
    assert "**4.00**" in lines[3] and "`O2`, 2 of 3 layers in fp8, " in lines[3]


def test_a_float32_result_serves_later_commands_with_the_same_flags(ran: list[Any], tmp_path: Path) -> None:
    command = ["latte", "--fp32", str(tmp_path)]
    old_engine.main([*command, "--ways", "fp32"])
    for more in ([], ["--more=--steps 20"], ["--tiny"]):
        old_engine.main([*command, "--ways", "eager", *more])
    references = [text_to_video_latte.parse(command[2:]).reference for command, _ in ran]
    (kept,) = (str(file) for file in tmp_path.iterdir())
    assert references == [None, kept, None, None]
    old_engine.main([*command, "--ways", "fp32,nexfort-fp8", "--more=--steps 20"])
    assert text_to_video_latte.parse(ran[-1][0][2:]).steps == 20
    assert text_to_video_latte.parse(ran[-1][0][2:]).reference not in (None, kept)


def test_eager_on_a_slow_machine_flatters_nobody(ran: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "found.csv"
    old_engine.main(["sd21", "--csv", str(file)])
    rows = old_table.read(file)
    slow = [{**row, "rate": "10.0", "commit": "later"} for row in rows if row["way"] == "eager"]
    assert old_table.table([], rows + slow) == old_table.table([], slow + rows) == old_table.table([], rows)
    assert "| **3.00** |" in old_table.table([], rows)
    elsewhere = [{**row, "gpu": "Another card"} for row in slow]
    assert old_table.table([], rows + elsewhere) == old_table.table([], rows)


def test_a_ratio_is_of_one_run_and_of_no_slow_eager(ran: list[Any], tmp_path: Path) -> None:
    """Figures of two runs stand beside each other without a ratio, as the hosts of such a card differ."""
    file = tmp_path / "found.csv"
    old_engine.main(["sd21", "--csv", str(file)])
    rows = old_table.read(file)
    for name, other in (("commit", "later"), ("command", "python -m benchmarks.old_engine sd21 --ways eager")):
        apart = [{**row, name: other} if row["way"] == "eager" else row for row in rows]
        assert "| none: two runs | 51.23 → **153.7** |" in old_table.table([], apart)
    for rate, expected in (("10.0", "| none: two runs | 51.23 → "), ("51.0", "| **3.01** | 51.0 → ")):
        own = [{**row, "rate": rate} if row["way"] == "eager" else row for row in rows]
        fastest = [{**row, "commit": "before"} for row in rows if row["way"] == "eager"]
        assert expected in old_table.table([], own + fastest)


def test_a_tiny_run_stays_out_of_the_table(ran: list[Any], tmp_path: Path) -> None:
    old_engine.main(["sd21", "--tiny", "--csv", str(tmp_path / "found.csv")])
    assert len(old_table.table([], old_table.read(tmp_path / "found.csv")).splitlines()) == 2
    assert "--height" not in ran[0][0], "sizes are those of full models"


def test_published_figures_are_whole_and_best_first() -> None:
    rows = old_table.read(old_table.PUBLISHED)
    best = {name: max(float(r["rate"]) / float(r["eager_rate"]) for r in rows if r["model"] == name) for name in
            ("sd21", "sdxl", "pixart", "latte")}  # fmt: skip
    assert {name: round(ratio, 2) for name, ratio in best.items()} == {
        **{"sd21": 2.56, "sdxl": 2.01, "pixart": 1.89, "latte": 1.42},
    }
    lines = [line for line in old_table.table(rows, []).splitlines() if line.startswith("| SD2.1")]
    assert lines[0].split("|")[2].strip() == "2.56"


def test_a_row_that_lacks_a_figure_is_not_shown(ran: list[Any], tmp_path: Path) -> None:
    old_engine.main(["sd21", "--csv", str(tmp_path / "found.csv")])
    rows = old_table.read(tmp_path / "found.csv")
    assert len(old_table.table([], rows).splitlines()) == 3
    assert len(old_table.table([], [{**row, "cached_s": ""} for row in rows]).splitlines()) == 2


def test_a_failed_run_is_said_and_ends_with_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = SimpleNamespace(stdout="", stderr="out of memory", returncode=1)
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: failed)
    assert old_engine.main(["flux", "--ways", "eager", "--commit", "abc"]) == 1
    assert "eager failed with status 1:\nout of memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "said"),
    [(["sd15"], "'sd15'"), (["sdxl", "--ways", "eager,warm"], "'warm'"), (["sdxl", "--fp32", "/not/there"], "make it")],
)
def test_what_there_is_not_is_refused(command: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert old_engine.main(command) == 2
    assert said in capsys.readouterr().err
