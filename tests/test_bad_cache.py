# SPDX-License-Identifier: Apache-2.0
"""A cache directory that cannot be written, that two processes fill at once, or that is damaged: nothing is lost.

Compiled code is real here, from a block that takes seconds to lower; how the store itself takes damage is in
cache/test_store_damage.py.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small_net
import torch
from small_net import ROOT, TOLERANCE, Small, assert_runs_eager, distance, given, run, sentence

import nexfort_engine
from nexfort_engine.cache import publish, root_dir
from nexfort_engine.cache import store as store_module
from nexfort_engine.cache.store import Store
from nexfort_engine.lowering import inductor

pytestmark = pytest.mark.usefixtures("threads", "artefact_cache")
# fixtures
cache, forgetful, lines = small_net.cache, small_net.forgetful, small_net.lines
filled, filled_once = small_net.filled, small_net.filled_once


# ---- a cache directory that cannot be written ------------------------------------------------------------------


def _file_in_its_place(folder: Path, _patch: pytest.MonkeyPatch) -> None:
    folder.write_text("somebody's notes")


def _below_a_file(folder: Path, patch: pytest.MonkeyPatch) -> None:
    folder.write_text("somebody's notes")
    patch.setenv("NEXFORT_CACHE_DIR", str(folder / "nexfort"))


def _no_permission(folder: Path, _patch: pytest.MonkeyPatch) -> None:
    if os.name != "posix" or os.geteuid() == 0:
        pytest.skip("permissions do not bind this user")
    folder.mkdir(mode=0o500)


def _refuse(patch: pytest.MonkeyPatch, number: int, times_before: int = 0) -> None:
    """A disk that takes `times_before` files of the store more and then fails."""
    left = [times_before]
    write_new = publish.write_new

    def write(path: Path, content: bytes, **more: Any) -> None:
        if left[0] == 0:
            raise OSError(number, os.strerror(number), str(path))
        left[0] -= 1
        write_new(path, content, **more)

    for module in (root_dir, publish, store_module):
        patch.setattr(module, "write_new", write)


def _read_only(_folder: Path, patch: pytest.MonkeyPatch) -> None:
    _refuse(patch, errno.EROFS)


def _full(_folder: Path, patch: pytest.MonkeyPatch) -> None:
    _refuse(patch, errno.ENOSPC)


def _full_at_the_end(_folder: Path, patch: pytest.MonkeyPatch) -> None:
    _refuse(patch, errno.ENOSPC, times_before=1)


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (_file_in_its_place, "expected a directory"),
        (_below_a_file, "directory"),
        (_no_permission, os.strerror(errno.EACCES)),
        (_read_only, os.strerror(errno.EROFS)),
        (_full, os.strerror(errno.ENOSPC)),
        (_full_at_the_end, os.strerror(errno.ENOSPC)),
    ],
)
def test_an_unwritable_cache_costs_persistence_only(
    spoil: Callable[[Path, pytest.MonkeyPatch], None],
    found: str,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    lines: Callable[[], list[str]],
) -> None:
    spoil(cache, monkeypatch)
    compiled = nexfort_engine.compile(Small())
    for _ in range(2):
        assert distance(run(compiled), run(Small())) < TOLERANCE
    report = compiled.report.as_dict()
    assert report["artefacts_compiled"] == 1 and not report["eager"]
    (note,) = report["notes"]
    sentence(note, "artefacts last only as long as this process", str(cache), found, "Make room or give access")
    sentence(note, "NEXFORT_CACHE_DIR")
    (line,) = lines()
    sentence(line, str(cache), found)
    if cache.is_file():
        assert cache.read_text() == "somebody's notes"


def test_what_is_compiled_once_there_is_room_again_is_saved_and_no_longer_said_not_to_be(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(root_dir, "RETRY_AFTER", 0.0)
    compiled = nexfort_engine.compile(Small())
    with monkeypatch.context() as full:
        _refuse(full, errno.ENOSPC)
        run(compiled)
        sentence(compiled.report.as_dict()["unsaved"], os.strerror(errno.ENOSPC))
    with torch.inference_mode():
        compiled(given()[0])  # of another rank, so that it is compiled for itself
    report = compiled.report.as_dict()
    assert report["artefacts_compiled"] == 2 and report["unsaved"] is None
    assert len(Store(cache).entries()) == 1


def test_a_cache_that_is_read_only_now_is_still_read(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _refuse(monkeypatch, errno.EROFS)
    compiled = nexfort_engine.compile(Small())
    assert distance(run(compiled), run(Small())) < TOLERANCE
    report = compiled.report.as_dict()
    assert (report["artefacts_loaded"], report["artefacts_compiled"], report["eager"]) == (1, 0, [])


def test_a_disk_that_fills_up_while_lowering_leaves_the_eager_result(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(inductor, "lower", fill)
    compiled = nexfort_engine.compile(Small())
    for _ in range(2):
        assert_runs_eager(compiled, "lowering it failed", os.strerror(errno.ENOSPC), "NEXFORT_CACHE_DIR")
    assert not list((cache / "staging").iterdir()) and not Store(cache).entries()


# ---- two processes with one cache -------------------------------------------------------------------------------

_ONE_OF_TWO = """
import json, pathlib, sys, time, torch
sys.path[:0] = sys.argv[2:]
torch.set_num_threads(1)
import nexfort_engine
import torch._inductor.compile_fx
from small_net import Small, digest, run
compiled = nexfort_engine.compile(Small())
folder = pathlib.Path(sys.argv[1])
(folder / f"ready-{time.monotonic_ns()}").touch()
while len(list(folder.glob("ready-*"))) < 2:
    time.sleep(0.02)
first = digest(run(compiled))
again = nexfort_engine.compile(Small())
print(json.dumps({"digests": [first, digest(run(again))], "report": compiled.report.as_dict()}))
"""


@pytest.mark.large  # cache/test_store_races.py has two on one store, without a compiler
@pytest.mark.slow
def test_two_processes_start_on_one_cache_at_once(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "meet").mkdir()
    support = Path(__file__).with_name("support")
    command = [sys.executable, "-c", _ONE_OF_TWO, str(tmp_path / "meet"), str(ROOT), str(support)]
    environment = {**os.environ, "NEXFORT_CACHE_DIR": str(cache)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    both = [subprocess.Popen(command, **pipes) for _ in range(2)]
    try:
        ended = [process.communicate(timeout=300) for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], ended[0][1][-2000:] + ended[1][1][-2000:]
    answers = [json.loads(out.splitlines()[-1]) for out, _ in ended]
    for answer in answers:
        assert answer["report"]["artefacts_loaded"] + answer["report"]["artefacts_compiled"] == 1
        assert not answer["report"]["eager"] and not answer["report"]["notes"]
    assert len({one for answer in answers for one in answer["digests"]}) == 1
    store = Store(cache)
    (entry,) = store.entries()
    assert entry.verify() is None and [row["id"] for row in store.rows()] == [entry.id]
    assert not list((cache / "staging").iterdir()) and not list((cache / "broken").iterdir())
    compiled = nexfort_engine.compile(Small())
    assert distance(run(compiled), run(Small())) < TOLERANCE
    assert compiled.report.as_dict()["artefacts_compiled"] == 0


# ---- a damaged cache ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["{", '{"schema": 1, "entries": 7}', "[]", "\0\0\0", '{"schema": 99}'])
def test_a_corrupt_index_is_rebuilt_and_costs_nothing(text: str, filled: Path) -> None:
    rows = Store(filled).rows()
    (filled / "index.json").write_text(text)
    compiled = nexfort_engine.compile(Small())
    assert distance(run(compiled), run(Small())) < TOLERANCE
    report = compiled.report.as_dict()
    assert (report["artefacts_loaded"], report["artefacts_compiled"]) == (1, 0)
    again = Store(filled).rows()
    assert [row["id"] for row in again] == [row["id"] for row in rows]
    assert json.loads((filled / "index.json").read_text())["entries"]


def _truncated(payload: Path) -> None:
    file = max((p for p in payload.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _foreign(payload: Path) -> None:
    for file in payload.rglob("*.so"):
        file.write_bytes(bytes(file.stat().st_size))


def _missing(payload: Path) -> None:
    shutil.rmtree(payload / "aotautograd")


def _no_manifest(payload: Path) -> None:
    payload.with_name("manifest.json").write_text("{")


def _a_link_out(payload: Path) -> None:
    (payload / "more").symlink_to("/etc")


@pytest.mark.parametrize("damage", [_truncated, _foreign, _missing, _no_manifest, _a_link_out])
def test_a_damaged_payload_is_set_aside_and_rebuilt(
    damage: Callable[[Path], None], filled: Path, lines: Callable[[], list[str]]
) -> None:
    (filled / "notes.txt").write_text("the user's own")
    store = Store(filled)
    with store.stage() as staged:
        (staged / "payload" / "code").write_text("another model's")
        other = store.commit("0123456789abcdef", staged, {})
    (entry,) = [one for one in store.entries() if one.id != other.id]
    damage(entry.payload)
    compiled = nexfort_engine.compile(Small())
    for _ in range(2):
        assert distance(run(compiled), run(Small())) < TOLERANCE
    report = compiled.report.as_dict()
    assert (report["artefacts_compiled"], report["eager"]) == (1, [])
    (line,) = lines()
    sentence(line, entry.id, "set aside")
    (reason,) = (filled / "broken").glob("*.reason.txt")
    assert entry.id in reason.name and reason.with_name(reason.name.removesuffix(".reason.txt")).is_dir()
    assert other.verify() is None and (filled / "notes.txt").read_text() == "the user's own"
    assert {one.id for one in Store(filled).entries()} == {entry.id, other.id}


def test_code_that_is_whole_and_does_not_load_is_rebuilt(
    filled: Path, monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]
) -> None:
    load = inductor.load

    def load_rebuilt(*args: Any) -> Any:
        if not any((filled / "broken").iterdir()):  # loading ahead meets it too, and leaves it to the step
            raise RuntimeError("undefined symbol: made by another build of torch")
        return load(*args)

    monkeypatch.setattr(inductor, "load", load_rebuilt)
    compiled = nexfort_engine.compile(Small())
    assert distance(run(compiled), run(Small())) < TOLERANCE
    assert compiled.report.as_dict()["artefacts_compiled"] == 1
    (line,) = lines()
    sentence(line, "set aside", "undefined symbol")
