# SPDX-License-Identifier: Apache-2.0
"""benchmarks.soak: it sends what it says, finds what does not hold, and sees what a server leaves."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import served

from benchmarks import soak, soak_server
from benchmarks.soak import Disk, Kill, Soak
from benchmarks.soak_prompts import MODELS, Prompt, first, prompts
from benchmarks.soak_server import Left
from nexfort_engine.cache.store import Store

SLEEP = "import time; time.sleep(60)"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that outlives what began it."""
    process = subprocess.Popen([sys.executable, "-c", SLEEP], env={**os.environ, "SOAK_TEST": "here"})
    yield process
    process.kill()
    process.wait()


# ---- what it sends -----------------------------------------------------------------------------------------


def test_prompts_begin_with_every_way_and_then_vary_in_everything() -> None:
    models = ["flux", "wan"]
    sent = list(prompts(400, 0, models))
    assert sent == list(prompts(400, 0, models)) != list(prompts(400, 1, models))
    begin, later = sent[: first(models)], sent[first(models) :]
    ways = [(one.model, bool(one.strength)) for one in begin]
    assert sorted(ways) == sorted(2 * [(model, lora) for model in models for lora in (False, True)])
    assert not [one for one in begin if one.bypass or one.free or one.cancel is not None]
    for some in ("bypass", "free", "strength"):
        assert {bool(getattr(one, some)) for one in later} == {True, False}, some
    assert any(one.cancel is not None for one in later)
    assert len({(one.model, one.width, one.height, one.tokens) for one in sent}) > 350, "sizes change"


@pytest.mark.parametrize("model", MODELS)
def test_a_workflow_has_the_nodes_that_the_prompt_asks_for(model: str) -> None:
    plain = Prompt(model, 64, 96, 20, seed=5)
    workflow = plain.workflow()
    assert {"compile"} == workflow.keys() - plain.workflow(compiled=False).keys()
    assert "compile" not in Prompt(model, 64, 96, 20, 5, bypass=True).workflow()
    with_lora = Prompt(model, 64, 96, 20, 5, strength=0.5).workflow()
    assert with_lora["lora"]["inputs"]["strength_model"] == 0.5
    assert with_lora["compile"]["inputs"]["model"] == ["lora", 0]
    for nodes in (workflow, with_lora):
        links = [one for node in nodes.values() for one in node["inputs"].values() if isinstance(one, list)]
        assert links and {number for number, _ in links} <= nodes.keys()


# ---- what it finds -----------------------------------------------------------------------------------------


def test_a_slope_is_that_of_the_second_half() -> None:
    noise = numpy.random.default_rng(0).normal(0, 3, 200)
    grows = [500.0] * 100 + [500 + 1.5 * place for place in range(100)]
    value, error = soak.slope(list(grows + noise))
    assert error < 0.1 and abs(value - 1.5) <= 1.5 * error
    flat, error = soak.slope([float(one) for one in [place * 5 for place in range(100)] + [500] * 100] + noise)
    assert error < 0.1 and abs(flat) <= 1.5 * error
    assert soak.slope([1.0, 2.0]) == (0.0, math.inf)


def test_a_slope_beyond_eager_s_does_not_hold() -> None:
    flat = [500.0 + place % 2 for place in range(100)]
    held = Soak(prompts=100, mb=flat, eager_mb=flat)
    assert not held.broken()
    held.mb = [one + 1.5 * place for place, one in enumerate(flat)]
    assert held.broken() == ["memory grows by 1.50 MB a prompt, eager's by 0.00"]
    held.eager_mb = held.mb
    assert not held.broken()


@pytest.mark.parametrize(
    "found",
    [
        Soak(unequal=["x"]),
        Soak(errors=["x"]),
        Soak(compiled_late=1),
        Soak(left=Left(processes=["x"])),
        Soak(left_after_start=["x"]),
        Kill(1, unsound="x"),
        Kill(1, processes=["x"]),
        Kill(1, left_after_start=["x"]),
        Disk(1, problems=["x"]),
    ],
)
def test_each_fault_is_told(found: Any) -> None:
    assert len(found.broken()) == 1 and not type(found)(1).broken()


def test_distance_is_infinite_for_what_is_no_picture() -> None:
    eager = numpy.ones((2, 3))
    assert soak.distance(eager, eager) == 0
    assert soak.distance(eager * 1.01, eager) == pytest.approx(0.01)
    assert math.isinf(soak.distance(eager[:1], eager)) and math.isinf(soak.distance(eager * math.nan, eager))


def test_processes_are_found_by_what_is_in_their_environment(sleeper: subprocess.Popen[bytes]) -> None:
    (found,) = _found_within(5)
    assert found.startswith(f"{sleeper.pid} ") and SLEEP in found
    assert not soak_server.processes_with("SOAK_TEST", "her")
    sleeper.kill()  # not waited for: it is a zombie, which holds nothing
    deadline = time.monotonic() + 5
    while soak_server.processes_with("SOAK_TEST", "here") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not soak_server.processes_with("SOAK_TEST", "here")


def _found_within(seconds: float) -> list[str]:
    """A process shows its own command a moment after it was forked."""
    deadline = time.monotonic() + seconds
    while not (found := [one for one in soak_server.processes_with("SOAK_TEST", "here") if SLEEP in one]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def test_an_unsound_cache_is_told(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.stage() as staged:
        (staged / "payload").mkdir(exist_ok=True)
        (staged / "payload" / "code.py").write_text("x = 1\n")
        store.commit("0" * 32, staged, {"info": {"region": "blocks.0", "kind": "Block"}})
    assert soak_server.unsound(tmp_path) is None
    (code,) = tmp_path.glob("entries/*/*/payload/code.py")
    code.write_text("x = 2\n")
    assert soak_server.unsound(tmp_path) is not None


def test_nothing_to_do_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        soak.main(["--seconds", "5"])
    assert end.value.code == 2 and "expected --prompts, --kill-at or --full-disk" in capsys.readouterr().err


# ---- as a whole --------------------------------------------------------------------------------------------


@pytest.mark.comfy
@pytest.mark.large
def test_a_short_soak_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = tmp_path / "soak.json"
    command = ["--prompts", "4", "--kill-at", "1", "--models", "flux", "--comfyui", str(served.comfyui_or_skip())]
    assert soak.main([*command, "--json", str(found)]) == 0, capsys.readouterr().out
    told = json.loads(found.read_text())
    assert told["soak"]["compared"] == 4 and told["soak"]["compiled"] and len(told["kills"]) == 1
    assert "compared with eager" in capsys.readouterr().out
