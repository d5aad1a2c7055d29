# SPDX-License-Identifier: Apache-2.0
"""The source files of what a capture walked through, and what is noticed when they change."""

from __future__ import annotations

import gc
import sys
import types
from pathlib import Path
from typing import Any

import probe as probe_module
import pytest
import torch
from probe import Probe, block_of, x

from nexfort_engine.capture import source_hashes
from nexfort_engine.capture.source_hashes import hash_source, sources_changed, walked

# a filter of torch's log, a hook of the garbage collector and one of the import system run in between
RUNNER = ("conftest", "hypothesis", "_pytest", "pluggy")


def test_sources_are_those_of_the_code_that_was_walked() -> None:
    probe = Probe(block_of(lambda b, h: b.linear(h)), x())
    found = {k: v for k, v in probe.captured.sources.items() if k.partition(".")[0] not in RUNNER}
    assert found == {__name__: hash_source(__file__), "probe": hash_source(probe_module.__file__)}
    assert sources_changed(probe.captured.sources) is None


def test_a_profiler_of_others_goes_on() -> None:
    seen: list[str] = []

    def profiler(_frame: Any, event: str, _arg: Any) -> None:
        seen.append(event)

    before = sys.getprofile()
    sys.setprofile(profiler)
    try:
        with walked() as codes:
            x()
        after = sys.getprofile()
    finally:
        sys.setprofile(before)
    assert after is profiler and seen
    assert probe_module.__file__ in {code.co_filename for code in codes}


def test_operators_of_others_are_walked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch calls by itself is not counted; what says which shapes an operator of the host gives is its code."""
    lines = (
        "import torch",
        "@torch.library.custom_op('nexfort_test_sources::triple', mutates_args=())",
        "def triple(x: torch.Tensor) -> torch.Tensor:",
        "    return x * 3",
        "@triple.register_fake",
        "def _(x):",
        "    return torch.empty_like(x)",
    )
    (tmp_path / "some_operators.py").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import some_operators  # type: ignore[import-not-found]

    probe = Probe(block_of(lambda b, h: torch.ops.nexfort_test_sources.triple(b.linear(h))), x())
    assert some_operators.__name__ in probe.captured.sources


def test_no_garbage_is_collected_meanwhile() -> None:
    """The finalizers of what others left behind would count as code of the block."""
    seen: set[bool] = set()
    note = seen.add  # what code puts into a set by its name is taken out after a trace

    def looks(block: Any, h: torch.Tensor) -> torch.Tensor:
        note(gc.isenabled())
        return block.linear(h)

    assert gc.isenabled()
    Probe(block_of(looks), x())
    assert False in seen and gc.isenabled()


def test_a_changed_or_missing_source_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "some_host.py"
    file.write_text("def double(x):\n    return x * 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import some_host  # type: ignore[import-not-found]

    probe = Probe(block_of(lambda b, h: some_host.double(b.linear(h))), x())
    found = {k for k in probe.captured.sources if k.partition(".")[0] not in RUNNER}
    assert found == {__name__, "probe", "some_host"}
    file.write_text("def double(x):\n    return x + x\n")
    assert sources_changed(probe.captured.sources) == "some_host"
    assert sources_changed({"never_imported": "0"}) == "never_imported"
    monkeypatch.delitem(sys.modules, "some_host")
    assert sources_changed(probe.captured.sources) == "some_host"


def test_modules_are_looked_through_once_for_files_that_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []

    class Counted(types.ModuleType):
        @property
        def __file__(self) -> str:  # type: ignore[override]
            looked.append(1)
            return str(tmp_path / "counted.py")

    monkeypatch.setitem(sys.modules, "counted_module", Counted("counted_module"))
    for name in ("one.py", "other.py", "one.py"):
        code = compile("1", str(tmp_path / name), "exec")
        assert source_hashes.module_of_code(code) is None
    assert len(looked) <= 1
    late = types.ModuleType("late_module")
    late.__file__ = str(tmp_path / "one.py")
    monkeypatch.setitem(sys.modules, "late_module", late)
    assert source_hashes.module_of_code(compile("1", late.__file__, "exec")) is late
    monkeypatch.delitem(sys.modules, "late_module")
    assert source_hashes.module_of_code(compile("1", late.__file__, "exec")) is None


def test_a_module_that_another_thread_imports_meanwhile_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that loads an artefact imports modules while a step asks which module some code is part of."""

    class Growing(dict[str, Any]):
        def __reversed__(self) -> Any:
            seen = super().__reversed__()
            self[f"new{len(self)}"] = None
            return seen

    assert source_hashes.last_key({}) is None and source_hashes.last_key({"a": 1, "b": 2}) == "b"
    assert source_hashes.last_key(Growing(a=1)) is None
    monkeypatch.setattr(source_hashes.sys, "modules", Growing(sys.modules))
    assert source_hashes.module_of_code(probe_module.block_of.__code__) is probe_module


def test_nor_does_one_while_the_table_of_modules_is_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []

    def imports(phase: str, info: dict[str, int]) -> None:  # as a thread may that gets the processor here
        imported.append(f"nexfort_imported_{len(imported)}")
        sys.modules[imported[-1]] = types.ModuleType(imported[-1])

    monkeypatch.setattr(source_hashes, "_looked_through", ((0, None), {}))
    thresholds = gc.get_threshold()
    gc.callbacks.append(imports)
    gc.set_threshold(1)
    try:
        assert source_hashes._module_of(__file__) == __name__
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(imports)
        for name in imported:
            del sys.modules[name]
    assert imported
