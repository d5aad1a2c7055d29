# SPDX-License-Identifier: Apache-2.0
"""The report: nothing is lost, nothing is told twice, and a difference is exact while other threads write."""

from __future__ import annotations

import copy
import json
import pickle
import threading

import pytest

from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.reporting.report import MORE_REASONS, MOST_REASONS, Report

_KEYS = {
    "regions",
    "artefacts_loaded",
    "artefacts_compiled",
    "artefacts",
    "variants",
    "compiling_beside",
    "eager",
    "seconds_cold",
    "seconds_warm",
    "seconds_calls",
    "calls",
    "cache_dir",
    "config",
    "inactive",
    "notes",
    "pace",
    "precision",
    "speed",
    "unsaved",
    "verifications",
}


def _filled() -> Report:
    report = Report(CompileConfig.parse("max-autotune:quant"), cache_dir="/cache")
    for _ in range(2):
        report.inactive("quant", "no weight is quantised")
    report.region("blocks.0", kind="Block", key="k1")
    report.region("blocks.1", kind="Block", key="k1")
    report.compiled("blocks.0", "k1", 2.5)
    report.made(1.5)
    report.loaded("blocks.1", "k1", 0.25)
    report.variant("blocks.0", "batch of one")
    report.eager("blocks.1", "a block replacement is installed")
    report.call(0.5)
    report.note("the cache is read-only")
    return report


def test_as_dict_holds_everything_and_is_json():
    data = _filled().as_dict()
    assert set(data) == _KEYS
    assert json.loads(json.dumps(data)) == data
    assert data["artefacts"] == [
        {"region": "blocks.0", "key": "k1", "seconds": 2.5, "source": "compiled"},
        {"region": "blocks.1", "key": "k1", "seconds": 0.25, "source": "loaded"},
    ]
    assert (data["artefacts_compiled"], data["artefacts_loaded"]) == (1, 1)
    assert (data["seconds_cold"], data["seconds_warm"], data["seconds_calls"]) == (1.5, 0.25, 0.5)
    assert data["regions"][1] == {"name": "blocks.1", "kind": "Block", "key": "k1"}
    assert data["variants"] == [{"region": "blocks.0", "reason": "batch of one"}]
    assert data["eager"] == [{"region": "blocks.1", "reason": "a block replacement is installed"}]
    assert (data["calls"], data["cache_dir"], data["notes"]) == (1, "/cache", ["the cache is read-only"])
    assert data["config"]["mode"] == "max-autotune:quant"
    assert [row["token"] for row in data["inactive"]] == ["quant"]


def test_an_empty_report_has_the_same_keys():
    data = Report().as_dict()
    assert set(data) == _KEYS
    assert data["config"] == {} and data["calls"] == 0 and data["seconds_cold"] == 0.0


def test_it_says_whether_artefacts_are_made_beside_the_steps():
    report = Report()
    assert report.as_dict()["compiling_beside"] is False
    for begins in (True, True, False):
        report.making(begins)
    assert report.is_making and report.as_dict()["compiling_beside"] is True
    assert copy.deepcopy(report).is_making is False, "what makes them is not copied"
    report.making(False)
    assert not report.is_making


def test_what_is_handed_out_is_a_copy():
    report = _filled()
    data = report.as_dict()
    for name in ("regions", "variants", "eager", "artefacts", "inactive"):
        data[name][0].clear()
        data[name].clear()
    data["config"]["options"]["overrides.conv_benchmark"] = True
    data["notes"].clear()
    assert report.as_dict() == _filled().as_dict()


def test_repeats_are_kept_once():
    report = _filled()
    before = report.as_dict()
    for _ in range(3):
        report.region("blocks.0", kind="Block", key="k1")
        report.variant("blocks.0", "batch of one")
        report.eager("blocks.1", "a block replacement is installed")
        report.note("the cache is read-only")
    assert report.as_dict() == before


def test_since_gives_only_what_is_new():
    report = _filled()
    mark = report.mark()
    nothing = report.since(mark)
    assert set(nothing) == _KEYS
    assert not any(nothing[name] for name in ("regions", "artefacts", "variants", "eager", "notes"))
    assert (nothing["calls"], nothing["artefacts_compiled"], nothing["seconds_cold"]) == (0, 0, 0.0)
    assert nothing["config"] == report.as_dict()["config"] and nothing["cache_dir"] == "/cache"

    report.eager("blocks.1", "a block replacement is installed")  # known before the mark: not new
    report.eager("blocks.1", "failed at run time")
    report.compiled("blocks.2", "k2", 0.4)
    report.made(0.1)
    report.call(0.3)
    new = report.since(mark)
    assert new["eager"] == [{"region": "blocks.1", "reason": "failed at run time"}]
    assert (new["artefacts_compiled"], new["artefacts_loaded"]) == (1, 0)
    assert (new["seconds_cold"], new["calls"], new["seconds_calls"]) == (0.1, 1, 0.3)
    assert report.since(mark) == new, "a mark can be used again"


def test_what_can_be_saved_again_is_not_unsaved():
    report = Report()
    for reason in ("the disk is full", None):
        report.unsaved(reason)
        assert report.as_dict()["unsaved"] == reason
    assert report.as_dict()["notes"] == ["artefacts last only as long as this process: the disk is full"]


def test_a_mark_of_another_report_is_refused():
    with pytest.raises(ValueError, match="another report"):
        Report().since(Report().mark())


def test_since_is_exact_while_other_threads_write():
    report, rounds, writers = Report(), 300, 4
    stop = threading.Event()
    errors: list[str] = []

    def write(which: int) -> None:
        for i in range(rounds):
            report.region(f"{which}.{i}", kind="Block", key=str(i))
            report.compiled(f"{which}.{i}", str(i), 0.1)
            report.eager(f"shared.{i}", "same reason")  # every writer says it, one entry results
            report.call(0.1)

    def read() -> None:
        while not stop.is_set():
            mark = report.mark()
            first, second = report.since(mark), report.since(mark)
            for data in (first, second):
                if data["artefacts_compiled"] != len(data["artefacts"]):
                    errors.append("torn counts")
            if second["artefacts"][: len(first["artefacts"])] != first["artefacts"]:
                errors.append("history changed")

    reader = threading.Thread(target=read)
    reader.start()
    start = report.mark()
    threads = [threading.Thread(target=write, args=(which,)) for which in range(writers)]
    for thread in threads:
        thread.start()
    marks = [report.mark() for _ in range(50)]
    for thread in threads:
        thread.join()
    stop.set()
    reader.join()

    assert not errors
    whole = report.since(start)
    assert whole["calls"] == whole["artefacts_compiled"] == len(whole["regions"]) == rounds * writers
    assert len(whole["eager"]) == rounds
    assert whole["seconds_calls"] == rounds * writers / 10  # exact: sums are kept in whole nanoseconds
    for mark in marks:
        data = report.since(mark)
        assert mark.calls + data["calls"] == rounds * writers
        assert whole["artefacts"][len(whole["artefacts"]) - len(data["artefacts"]) :] == data["artefacts"]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))])
def test_a_copy_goes_its_own_way(duplicate):
    report = _filled()
    other = duplicate(report)
    assert other.as_dict() == report.as_dict()
    other.call(1.0)
    other.note("only here")
    assert report.as_dict() == _filled().as_dict()
    with pytest.raises(ValueError, match="another report"):
        other.since(report.mark())


def test_the_cache_directory_can_come_later(tmp_path):
    report = Report()
    report.cache_dir = tmp_path
    assert report.cache_dir == report.as_dict()["cache_dir"] == str(tmp_path)


def test_text_is_readable():
    text = str(_filled())
    assert text.splitlines() == [
        "Nexfort max-autotune:quant: 2 regions of 1 kind, 1 call",
        "  artefacts: 1 loaded in 0.2 s, 1 compiled in 1.5 s",
        "  cache: /cache",
        "  variant: blocks.0: batch of one",
        "  eager: blocks.1: a block replacement is installed",
        "  not active: quant: no weight is quantised",
        "  note: the cache is read-only",
    ]
    assert str(Report()).startswith("Nexfort: 0 regions of 0 kinds, 0 calls")
    assert repr(_filled()) == "<Report regions=2 loaded=1 compiled=1 eager=1 calls=1>"


def test_reasons_of_a_region_are_not_kept_without_end():
    report = Report()
    for size in range(1000):
        report.eager("blocks.0", f"size {size} where 8 was captured")
        report.variant("blocks.0", f"size {size}")
    report.eager("blocks.1", "a hook is installed")
    for name in ("eager", "variants"):
        reasons = [row["reason"] for row in report.as_dict()[name] if row["region"] == "blocks.0"]
        assert len(reasons) == MOST_REASONS + 1 and reasons[-1] == MORE_REASONS
    assert report.as_dict()["eager"][-1] == {"region": "blocks.1", "reason": "a hook is installed"}
    mark = report.mark()
    report.eager("blocks.0", "size 2000")
    report.eager("blocks.0", "size 3 where 8 was captured")
    assert not report.since(mark)["eager"]
