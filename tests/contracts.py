# SPDX-License-Identifier: Apache-2.0
"""The promises, one test each, over four tiny backbones of backbones.py in `make test`, over all in `make test-large`.

Each first asserts that what it varies moves the eager result by a hundred times the tolerance, so that none can pass on
a network that ignores it. "Nothing new" means neither compiled nor loaded: a cache that is warm from an earlier run
hides nothing. Those about faults are in contracts_faults.py, those about what changes in contracts_changes.py.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from backbones import BACKBONES, FOUR, make
from inputs import shuffled_calls
from outside import unexplained
from restarted import counting, digests
from subjects import (
    MOVES,
    TOLERANCE,
    Beside,
    Subject,
    assert_nothing_left,
    assert_plain,
    cold_subject,
    distance,
    equal_bits,
    every,
    graphs_as_they_are,
    installed,
    names,
    new_since,
    subject,
)
from torch import nn

from nexfort_engine.dispatch import region as dispatch

pytestmark = pytest.mark.usefixtures("threads", "artefact_cache")


# ---- the result ---------------------------------------------------------------------------------------------


@every
def test_result_equals_eager(tiny: Subject) -> None:
    base = tiny.eager()
    for call in ({}, {"seed": 1}, {"prompt": 1}, {"step": 1}, {"batch": 1}, {"length": tiny.tiny.kind.lengths[1]}):
        wanted = tiny.eager(**call)
        if call and "batch" not in call:
            assert distance(wanted, base) > MOVES, f"{call} does not matter to the network"
        assert distance(tiny.run(**call), wanted) < TOLERANCE, call


@every
def test_same_call_gives_the_same_bits(tiny: Subject) -> None:
    assert distance(tiny.eager(seed=1), tiny.eager()) > MOVES
    first = tiny.run()
    tiny.run(seed=1)
    assert equal_bits(tiny.run(), first)


@every
def test_a_verified_step_is_the_same_step(tiny: Subject) -> None:
    before, calls = tiny.run(), tiny.report.calls
    tiny.engine.verify_next()
    assert equal_bits(tiny.run(), before)
    told = tiny.report.as_dict()
    assert told["calls"] == calls + 1
    verified, eager = told["verifications"][-1], {row["region"] for row in told["eager"]}
    assert verified["distance"] < TOLERANCE
    rows = {row["region"]: row for row in verified["regions"]}
    assert rows.keys() == {row["name"] for row in told["regions"]} - eager
    assert not [row for row in rows.values() if row["over"] or row["unjudged"]]


@every
def test_nothing_runs_as_python_that_the_report_does_not_name(tiny: Subject) -> None:
    assert unexplained(tiny.module, {"eager": []}, tiny.eager), "without the engine everything runs so"
    assert not unexplained(tiny.module, tiny.report.as_dict(), tiny.run)


# ---- one artefact for all ------------------------------------------------------------------------------------


def _walk(tiny: Subject, most: int) -> list[dict[str, Any]]:
    """Every size, prompt length and batch, or `most` of them, in an order that is shuffled and always the same."""
    kind = tiny.tiny.kind
    calls = shuffled_calls(kind.sizes, kind.lengths)
    for name, values in (("batch", (1, 2, 3, 4)), ("size", kind.sizes), ("length", kind.lengths)):
        assert {call[name] for call in calls[:most]} == set(values)
    return calls[:most]


def _assert_walk_needs_nothing_new(tiny: Subject, most: int = 60) -> None:
    kind = tiny.tiny.kind
    assert distance(tiny.eager(length=kind.lengths[1]), tiny.eager()) > MOVES
    rows = [row for tensor in tiny.eager() for row in tensor[:2]]
    assert distance(rows[:1], rows[1:2]) > MOVES, "both rows of the batch give the same"
    surprises = []
    with counting() as counted:
        for call in _walk(tiny, most):
            mark = tiny.report.mark()
            error = tiny.same(**call)
            new = new_since(tiny, mark)
            if [row["region"] for row in new.get("eager", ())] == [kind.bound_to_sizes]:
                del new["eager"]
            if new or not error < TOLERANCE:
                surprises.append((call, error, new))
    assert not surprises, "\n".join(map(str, surprises))
    assert counted.as_dict() == {"exports": 0, "lowerings": 0}


@every
def test_first_call_serves_every_size_length_and_batch(tiny: Subject) -> None:
    _assert_walk_needs_nothing_new(tiny, most=30 if tiny.tiny.kind.name in FOUR else 60)


@functools.cache
def _batch_of_one_first(name: str) -> tuple[Subject, list[Any]]:
    """A backbone whose first call was one of batch 1, and what others saw of its module meanwhile.

    Each look gives whether its weights were its own and whether it gave the eager result, or an error.
    """
    cold = cold_subject(make(name))
    beside = Beside(functools.partial(cold.run, batch=1, size=cold.tiny.kind.sizes[0]))

    def look() -> tuple[bool, bool]:
        values = cold.module.state_dict()
        fake = any(type(v) is not torch.Tensor and type(v) is not nn.Parameter for v in values.values())
        return list(values) == cold.keys_before and not fake, equal_bits(cold.eager(), cold.eager_before)

    return cold, beside.while_running(look)


@pytest.mark.parametrize("name", names(few=("torch_dit", "comfy_wan")))
def test_batch_of_one_first_serves_every_size_length_and_batch(host: str) -> None:
    with graphs_as_they_are():
        cold, _ = _batch_of_one_first(host)
        assert cold.same(batch=1, size=cold.tiny.kind.sizes[0]) < TOLERANCE
        assert cold.report.as_dict()["artefacts_compiled"] > 0
        _assert_walk_needs_nothing_new(cold, most=20)


@pytest.mark.parametrize("name", names(few=("torch_dit",)))
def test_any_first_call_serves_every_size_length_and_batch(host: str) -> None:
    with graphs_as_they_are():
        cold = cold_subject(make(host))
        kind = cold.tiny.kind
        assert cold.same(batch=3, size=kind.sizes[3], length=kind.lengths[2]) < TOLERANCE
        assert cold.report.as_dict()["artefacts_compiled"] > 0
        _assert_walk_needs_nothing_new(cold, most=20)


@every
def test_twelve_blocks_need_what_two_need(tiny: Subject) -> None:
    deep = Subject(make(tiny.tiny.name, depth=12))
    assert sum(1 for _ in deep.module.modules()) > 2 * sum(1 for _ in tiny.module.modules())
    assert deep.same() < TOLERANCE
    again = tiny.again()
    again.run()
    wanted, found = again.report.as_dict(), deep.report.as_dict()
    assert found["artefacts_compiled"] == 0 and not found["eager"]
    assert {row["key"] for row in found["artefacts"]} == {row["key"] for row in wanted["artefacts"]}


# ---- what persists ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.large)], ids=["four", "the others"])
def test_second_process_compiles_nothing_and_gives_the_same_bits(
    request: pytest.FixtureRequest, artefact_cache: Path, few: bool
) -> None:
    names_here = [name for name in installed(request) if (name in FOUR) == few]
    wanted = {name: digests(subject(name).tiny, subject(name).compiled) for name in names_here}
    assert all(len(set(found)) == len(found) for found in wanted.values()), "two calls of a backbone gave the same"
    environment = {**os.environ, "NEXFORT_CACHE_DIR": str(artefact_cache)}
    if any(BACKBONES[name].host == "comfy" for name in names_here):
        environment["COMFYUI_PATH"] = str(request.getfixturevalue("comfyui"))
    here, support = Path(__file__).parent, Path(__file__).with_name("support")
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (here.parent, here, support)))
    control = ["--control"] if few else []  # once is enough: the hooks are the same
    command = [sys.executable, str(support / "restarted.py"), *names_here, *control]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["counted"] == {"exports": 0, "lowerings": 0}
    if control:
        assert answer["control"]["problem"] is None
        assert min(answer["control"]["exports"], answer["control"]["lowerings"]) > 0, "the hooks see nothing"
    for name, found in answer["backbones"].items():
        assert found["artefacts_compiled"] == 0 and found["artefacts_loaded"] > 0, name
        assert {row["region"] for row in found["eager"]} <= {BACKBONES[name].bound_to_sizes}, name
        assert found["digests"] == wanted[name], name


# ---- the model stays itself ----------------------------------------------------------------------------------


@every
def test_model_is_itself_before_during_and_after(tiny: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(tiny.compiled, type(tiny.module))
    inside, looked = threading.Event(), threading.Event()
    run = dispatch.Region._run

    def paused(region: Any, *args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert looked.wait(60)
        return run(region, *args)

    monkeypatch.setattr(dispatch.Region, "_run", paused)
    thread = threading.Thread(target=tiny.run, daemon=True)
    thread.start()
    assert inside.wait(60)
    try:
        assert_plain(tiny)
        assert [path for path, sub in tiny.module.named_modules() if "forward" in vars(sub)], "no call was under way"
    finally:
        looked.set()
        thread.join(60)
    assert_plain(tiny)
    assert_nothing_left(tiny)


@every
def test_model_is_itself_for_others_while_it_is_captured(host: str) -> None:
    with graphs_as_they_are():
        cold, looks = _batch_of_one_first(host)
    assert len(looks) > 3
    wrong = [answer for answer in looks if answer != (True, True)]
    assert not wrong, f"{len(wrong)} of {len(looks)} looks saw another model, such as {wrong[0]!r}"
    told = cold.report.as_dict()["eager"]
    assert {row["region"] for row in told} <= {cold.tiny.kind.bound_to_sizes}


@every
def test_compiled_and_uncompiled_run_at_once(tiny: Subject) -> None:
    calls: list[dict[str, Any]] = [{}, {"seed": 1}, {"step": 1, "batch": 1}]
    assert distance(tiny.eager(**calls[1]), tiny.eager()) > MOVES
    wanted = {True: [tiny.run(**c) for c in calls], False: [tiny.eager(**c) for c in calls]}
    mark = tiny.report.mark()
    problems: list[Any] = []
    start = threading.Barrier(3)

    def work(compiled: bool) -> None:
        start.wait(60)
        try:
            for _ in range(5):
                for call, result in zip(calls, wanted[compiled], strict=True):
                    found = tiny.run(**call) if compiled else tiny.eager(**call)
                    if not equal_bits(found, result):
                        problems.append((compiled, call, distance(found, result)))
        except Exception as error:  # shown by the assertion below
            problems.append((compiled, error))

    workers = [threading.Thread(target=work, args=(compiled,)) for compiled in (True, False, True)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert not problems and not new_since(tiny, mark)
    assert_nothing_left(tiny)
