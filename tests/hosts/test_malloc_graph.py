# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's allocation graph: pauses inside pauses, whoever asks; with stand-ins of its two forms."""

from __future__ import annotations

import sys
import threading
import types
from typing import Any

import pytest

from nexfort_engine.hosts.comfy.malloc_graph import count_pauses, paused, unknown


class Record:
    """comfy_aimdo's record of one thread: a pause is a flag."""

    def __init__(self) -> None:
        self.paused = False
        self.begun = 0


@pytest.fixture
def prefetch(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """`comfy.model_prefetch` as far as it pauses and begins records."""
    module = types.ModuleType("comfy.model_prefetch")
    records: dict[int, Record] = {}
    module.fails = False  # type: ignore[attr-defined]

    def record() -> Record:
        return records.setdefault(threading.get_ident(), Record())

    class Pause:
        def __init__(self, sync: bool = False) -> None:
            self.sync = sync

        def __enter__(self) -> None:
            if module.fails:
                raise RuntimeError("memory compile error")
            record().paused = True

        def __exit__(self, *error: object) -> None:
            record().paused = False

    def begin(device: str) -> None:
        if module.malloc_graph_enabled(device):
            record().begun += 1

    given: dict[str, Any] = {
        "record": record,
        "pause_malloc_graph": lambda sync=False: Pause(sync),
        "malloc_graph_enabled": lambda device: device == "cuda",
        "malloc_graph_begin": begin,
    }
    for name, value in given.items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "comfy.model_prefetch", module)
    return module


def test_a_pause_of_ours_inside_one_of_the_host_s_does_not_end_it(prefetch: Any) -> None:
    count_pauses()
    with prefetch.pause_malloc_graph(sync=True):
        with paused(), paused():
            assert prefetch.record().paused
        assert prefetch.record().paused
    assert not prefetch.record().paused


def test_a_pause_of_the_host_s_inside_one_of_ours_does_not_end_it(prefetch: Any) -> None:
    with paused():
        kept = prefetch.pause_malloc_graph()
        for _ in range(2):  # comfy_kitchen enters one object again and again
            with kept:
                assert prefetch.record().paused
            assert prefetch.record().paused
    assert not prefetch.record().paused


def test_no_record_begins_inside_a_pause_of_ours(prefetch: Any) -> None:
    with paused():
        prefetch.malloc_graph_begin("cuda")
        assert prefetch.record().begun == 0
    with prefetch.pause_malloc_graph():
        prefetch.malloc_graph_begin("cuda")
    prefetch.malloc_graph_begin("cpu")
    assert prefetch.record().begun == 1 and unknown() is None


def test_each_thread_has_its_own(prefetch: Any) -> None:
    seen: list[bool] = []

    def other() -> None:
        prefetch.malloc_graph_begin("cuda")
        with prefetch.pause_malloc_graph():
            pass
        seen.extend((prefetch.record().paused, prefetch.record().begun == 1))

    with paused():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert prefetch.record().paused
    assert seen == [False, True]


def test_what_replaces_the_host_s_function_later_is_counted_as_well(prefetch: Any) -> None:
    count_pauses()
    original = prefetch.pause_malloc_graph
    prefetch.pause_malloc_graph = lambda sync=False: original(sync)
    with prefetch.pause_malloc_graph(), paused():
        pass
    with paused():
        with prefetch.pause_malloc_graph():
            pass
        assert prefetch.record().paused


def test_errors_inside_end_a_pause_and_one_that_fails_is_none(prefetch: Any, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyError), paused():
        raise KeyError
    assert not prefetch.record().paused
    prefetch.fails = True
    with paused():
        prefetch.malloc_graph_begin("cuda")
    assert prefetch.record().begun == 0 and "could not be paused" in caplog.text
    prefetch.malloc_graph_begin("cuda")
    assert prefetch.record().begun == 1


@pytest.mark.parametrize("missing", ["pause_malloc_graph", "malloc_graph_enabled", None])
def test_a_host_that_lacks_it(prefetch: Any, missing: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing is None:
        monkeypatch.delitem(sys.modules, "comfy.model_prefetch")
    else:
        delattr(prefetch, missing)
    with paused():
        pass


# ---- the older form: a record of each module ------------------------------------------------------------------------


class ModuleRecord(Record):
    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """`comfy.model_prefetch` as it was before there was `pause_malloc_graph`."""
    module = types.ModuleType("comfy.model_prefetch")
    module.on = True  # type: ignore[attr-defined]
    active: dict[int, ModuleRecord] = {}

    def begin(module: Any, device: str) -> None:
        if sys.modules["comfy.model_prefetch"].malloc_graph_enabled(device):
            record = module.__dict__.setdefault("_comfy_malloc_graph", ModuleRecord())
            record.begun += 1
            active[threading.get_ident()] = record

    given: dict[str, Any] = {
        "ACTIVE_MALLOC_GRAPHS": active,
        "malloc_graph_enabled": lambda device: module.on and device == "cuda",
        "malloc_graph_begin": begin,
        "malloc_graph_end": lambda: active.pop(threading.get_ident(), None),
    }
    for name, value in given.items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "comfy.model_prefetch", module)
    return module


def test_the_record_of_the_module_that_runs_is_paused(older: Any) -> None:
    block, other = types.SimpleNamespace(), types.SimpleNamespace()
    for one in (other, block):
        older.malloc_graph_begin(one, "cuda")
    record = block._comfy_malloc_graph
    with paused():
        with paused():
            assert record.paused and not other._comfy_malloc_graph.paused
        assert record.paused, "only the end of the outermost pause ends it"
    assert not record.paused and unknown() is None


def test_no_module_s_record_begins_inside_a_pause_of_ours(older: Any) -> None:
    block = types.SimpleNamespace()
    with paused():
        older.malloc_graph_begin(block, "cuda")
    assert not hasattr(block, "_comfy_malloc_graph") and not older.ACTIVE_MALLOC_GRAPHS
    older.malloc_graph_begin(block, "cuda")
    assert block._comfy_malloc_graph.begun == 1


def test_where_the_compiler_is_switched_off_nothing_is_paused(older: Any) -> None:
    """By --disable-comfy-compiler, in either form."""
    older.on, block = False, types.SimpleNamespace()
    older.malloc_graph_begin(block, "cuda")
    with paused():
        assert not older.ACTIVE_MALLOC_GRAPHS
    assert not hasattr(block, "_comfy_malloc_graph") and unknown() is None


def test_a_module_s_record_that_ended_inside_a_pause_stays_as_it_is(older: Any) -> None:
    block = types.SimpleNamespace()
    older.malloc_graph_begin(block, "cuda")
    with paused():
        older.malloc_graph_end()
    assert block._comfy_malloc_graph.paused
    older.malloc_graph_begin(block, "cuda")
    seen: list[bool] = []

    def other() -> None:
        with paused():
            seen.append(block._comfy_malloc_graph.paused)

    block._comfy_malloc_graph.resume()
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [False], "it is another thread's"


# ---- no known form ---------------------------------------------------------------------------------------------------


def _neither(older: Any, form: str) -> None:
    """Take from the stand-in what makes it a known form."""
    if form == "arguments":
        older.malloc_graph_begin = lambda stream, names, device: pytest.fail("it is called")
    elif form == "active":
        del older.ACTIVE_MALLOC_GRAPHS
    else:
        older.malloc_graph_begin, older.pause_malloc_graph = max, lambda stream: pytest.fail("it is called")


@pytest.mark.parametrize("form", ["arguments", "active", "pause"])
def test_of_another_form_nothing_is_called_and_the_reason_is_told(older: Any, form: str) -> None:
    assert unknown() is None
    _neither(older, form)
    with paused(), paused():
        pass
    told = unknown()
    assert told is not None and "malloc_graph_begin" in told and "--disable-comfy-compiler" in told
    assert form != "arguments" or "(stream, names, device)" in told


@pytest.mark.comfy
@pytest.mark.usefixtures("comfyui", "artefact_cache")
@pytest.mark.parametrize("form", ["arguments", ""])
def test_the_report_says_it_once(older: Any, form: str) -> None:
    from backbones import make
    from patchers import CONFIG, patcher_around

    from nexfort_engine.hosts.comfy import model as host

    if form:
        _neither(older, form)
    patcher = patcher_around(make("comfy_flux").module, family="Flux")
    compiled = [host.attach(patcher, CONFIG) for _ in range(2)]
    notes = host.report_of(compiled[-1]).as_dict()["notes"]  # type: ignore[union-attr]
    assert sum("allocation graph" in note for note in notes) == bool(form)


@pytest.mark.comfy
@pytest.mark.usefixtures("comfyui", "artefact_cache")
def test_the_host_s_pauses_count_before_the_first_of_ours(prefetch: Any) -> None:
    """An engine may compile for the first time inside a block that ComfyUI has paused."""
    from backbones import make
    from patchers import CONFIG, patcher_around

    from nexfort_engine.hosts.comfy import model as host

    host.attach(patcher_around(make("comfy_flux").module, family="Flux"), CONFIG)
    with prefetch.pause_malloc_graph():
        with paused():
            pass
        assert prefetch.record().paused
    assert not prefetch.record().paused
