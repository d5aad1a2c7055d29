# SPDX-License-Identifier: Apache-2.0
"""The fixed ways of benchmarks.record: which process gets which flags and caches, and what its rows say."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record
from benchmarks.ratios import read


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """What each process would have been given, by the name of its latent."""
    found: dict[str, dict[str, Any]] = {}

    def child(backbone: str, way: str, flags: list[str], *, latent: Path, caches: Path, log: Path | None) -> Any:
        found[latent.stem] = {"way": way, "flags": flags, "caches": caches}
        report = {"artefacts_compiled": 3, "artefacts_loaded": 0, "eager": [{"region": "a", "reason": "b"}]}
        if way == "core":
            return {"reason": "it ended with status 1: out of memory"}
        return {
            "ms": 2.0,
            "first_s": 1.0,
            "lora_s": [3.0, 1.0, 2.0],
            **({"report": report} if way == "nexfort" else {}),
        }

    monkeypatch.setattr(record, "child", child)
    return found


def test_ways_get_their_caches_and_rows_their_conditions(
    asked: dict[str, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "rows.csv"
    given = ["sdxl", "--ways", "eager,core,cold,warm", "--lora", "--budget", "12", "--options", '{"mode": "O3"}']
    monkeypatch.setattr(sys, "argv", ["record", *given, "--csv", str(file), "--commit", "abc"])
    assert record.main() == 1, "a way failed"
    assert asked["cold"]["caches"] == asked["warm"]["caches"]
    assert len({asked[way]["caches"] for way in ("eager", "core", "cold")}) == 3
    assert all("--budget" in one["flags"] and "--lora" in one["flags"] for one in asked.values())
    assert [name for name, one in asked.items() if "--options" in one["flags"]] == ["cold", "warm"]
    rows = {row["way"]: row for row in read(file)}
    assert list(rows) == [
        *("eager, 12 GiB", "eager, 12 GiB, LoRA's strength changed", "core, 12 GiB", "cold, 12 GiB"),
        *("cold, 12 GiB, LoRA's strength changed", "warm, 12 GiB", "warm, 12 GiB, LoRA's strength changed"),
    ]
    assert rows["core, 12 GiB"]["ms"] == "" and rows["core, 12 GiB"]["reason"].endswith("out of memory")
    cold = rows["cold, 12 GiB"]
    assert (cold["compiled"], cold["eager_regions"], cold["commit"]) == ("3", "1", "abc")
    assert rows["cold, 12 GiB, LoRA's strength changed"]["first_s"] == "2.0"
    assert "'region': 'a'" in capsys.readouterr().out
