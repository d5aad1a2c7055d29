# SPDX-License-Identifier: Apache-2.0
"""The demo's own promises: its table, its verdict, and the embedded pipeline from end to end."""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from subjects import graphs_as_they_are

from demo import in_diffusers
from demo.outcome import SIZES, Outcome, Stop, first_step_s, per_step_ms

ROOT = Path(__file__).resolve().parent.parent


def kept() -> Outcome:
    """An outcome in which every promise held."""
    stops = [Stop(size, 20.0, 10.0, 1e-7, 6 if size == SIZES[0] else 0) for size in SIZES]
    return Outcome(
        host="ComfyUI 1", model="a model", device="cpu", stops=stops, cold_first_step=31.5, warm_first_step=1.25,
        warm_loaded=6, same_bits=True, moved=0.5,
    )  # fmt: skip


def test_the_table_shows_every_size_and_both_first_steps() -> None:
    text = kept().table()
    lines = text.splitlines()
    assert all(f"{width}x{height}" in lines[2] for width, height in SIZES)
    assert next(line for line in lines if line.startswith("artefacts compiled")).split()[2:] == ["6", "0", "0", "0"]
    assert "31.50" in text and "1.25" in text
    assert len({len(line) for line in lines[2:8]}) == 1, "the columns are aligned"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda o: setattr(o.stops[2], "artefacts_compiled", 1), "compiled again"),
        (lambda o: setattr(o.stops[0], "artefacts_compiled", 0), "nothing was compiled"),
        (lambda o: setattr(o.stops[1], "error", 0.01), "away from eager"),
        (lambda o: setattr(o.stops[1], "error", float("nan")), "away from eager"),
        (lambda o: setattr(o, "warm_compiled", 2), "second process compiled 2"),
        (lambda o: setattr(o, "warm_loaded", 0), "loaded 0"),
        (lambda o: setattr(o, "same_bits", False), "another picture"),
        (lambda o: setattr(o, "moved", 1e-5), "prove nothing"),
        (lambda o: o.stops.clear(), "nothing was compiled"),
    ],
)
def test_each_broken_promise_is_named(change: object, says: str) -> None:
    outcome = kept()
    assert outcome.broken_promises() == []
    change(outcome)  # type: ignore[operator]
    assert [line for line in outcome.broken_promises() if says in line]


def test_the_report_file_holds_the_table_and_the_verdict(tmp_path: Path) -> None:
    content = json.loads(kept().write(tmp_path).read_text())
    assert content["table"] == kept().table() and content["broken_promises"] == []
    assert content["stops"][0]["artefacts_compiled"] == 6


def test_steps_are_timed_without_the_first_with_gaps_and_outliers() -> None:
    ends = [(0, 10.0), (1, 40.0), (2, 40.1), (5, 40.4), (6, 49.0)]
    assert per_step_ms(ends) == pytest.approx(100.0)
    assert first_step_s(ends) == 30.0
    for too_few in ([], [(0, 1.0), (1, 2.0)]):
        with pytest.raises(ValueError, match="two steps"):
            per_step_ms(too_few)


def test_the_embedded_pipeline_keeps_its_promises_with_small_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both roles in this process, with graphs as they are. The demo itself is the next test."""
    pytest.importorskip("diffusers")
    pytest.importorskip("transformers")
    roles = []

    def in_this_process(command: list[str], **_: Any) -> Any:
        assert command[1:3] == ["-m", "demo.in_diffusers"]
        roles.append(command[3])
        gc.collect()  # what the other role held
        monkeypatch.setattr(sys, "argv", command[2:])
        in_diffusers.main()
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(in_diffusers.subprocess, "run", in_this_process)
    monkeypatch.setattr(in_diffusers, "SIZES", [(128, 128), (160, 128), (128, 160), (144, 96)])
    monkeypatch.setattr(in_diffusers, "STEPS", 3)
    level = logging.getLogger("nexfort").level
    try:
        with graphs_as_they_are():
            found = in_diffusers.run(tmp_path, tmp_path, lambda _: None)
    finally:
        logging.getLogger("nexfort").setLevel(level)
    assert roles == ["cold", "warm"]
    assert found.broken_promises() == [] and [stop.artefacts_compiled for stop in found.stops[1:]] == [0, 0, 0]
    assert len(found.images) == 2 * len(SIZES) and all((tmp_path / name).stat().st_size > 0 for name in found.images)


@pytest.mark.slow
@pytest.mark.large
def test_the_embedded_pipeline_keeps_its_promises(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    pytest.importorskip("transformers")
    dropped = ("NEXFORT_CACHE_DIR", "NEXFORT_DISABLE", "OMP_NUM_THREADS")
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    command = [sys.executable, "-m", "demo", "--without-comfyui", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert [stop["artefacts_compiled"] for stop in report["stops"][1:]] == [0, 0, 0]
    assert report["warm_first_step"] < report["cold_first_step"]
    assert len(report["images"]) == 2 * len(SIZES)
    assert all((tmp_path / name).stat().st_size > 0 for name in report["images"])


def test_a_demo_that_would_prove_nothing_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "demo", "--output", str(tmp_path)]
    env = {**os.environ, "NEXFORT_DISABLE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "NEXFORT_DISABLE" in done.stdout
