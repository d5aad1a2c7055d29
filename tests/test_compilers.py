# SPDX-License-Identifier: Apache-2.0
"""Compilers that torch and Triton start: one that hangs is ended and not asked again, all else is as it was."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nexfort_engine import compilers, processes
from nexfort_engine.compilers import CompilerHangs, bounded

pytestmark = pytest.mark.skipif(os.name != "posix", reason="compilers are shell scripts here")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "STOPPED", 0.5)
    for name in ("ASKED", "SILENT"):
        monkeypatch.setattr(compilers, name, 1.0)
    monkeypatch.setattr(compilers, "LOOK", 0.1)
    monkeypatch.setattr(processes, "LOOK", 0.1)
    monkeypatch.setattr(processes, "WORK", 0.05)
    monkeypatch.setattr(compilers, "hung", {})


def _compiler(folder: Path, *code: str) -> str:
    file = folder / "c++"
    file.write_text("\n".join(["#!/bin/sh", *code]))
    file.chmod(0o755)
    return str(file)


HANGS = {
    "it sleeps": "exec sleep 600",
    "what it started sleeps": "sleep 600; true",
    "somebody stopped it": "kill -STOP $$",
}


@pytest.mark.parametrize("how", HANGS)
@pytest.mark.parametrize("arguments", [["--version"], ["-c", "x.cpp", "-o", "x.o"]], ids=["asked", "compiling"])
def test_one_that_hangs_is_ended_with_what_it_started(how: str, arguments: list[str], tmp_path: Path) -> None:
    run = [_compiler(tmp_path, f"echo $$ > {tmp_path}/number", HANGS[how]), *arguments]
    with pytest.raises(CompilerHangs, match="hangs"):
        compilers.run(run, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    number = int((tmp_path / "number").read_text())
    assert not processes.below(number, processes.running())
    began = time.monotonic()
    with pytest.raises(CompilerHangs, match="not asked again"):
        compilers.check_output(run)
    assert time.monotonic() - began < 0.5, "it was asked again"


def test_one_that_is_slow_is_waited_for(tmp_path: Path) -> None:
    """It computes for three times as long as it may do nothing."""
    loop = f"{sys.executable} -c 'import time; end = time.monotonic() + 3\nwhile time.monotonic() < end: pass'"
    run = [_compiler(tmp_path, loop, "echo done"), "-c"]
    assert compilers.check_output(run, text=True) == "done\n" and not compilers.hung


def test_what_stops_the_step_ends_the_compiler(tmp_path: Path) -> None:
    class Stopped(Exception):
        pass

    def stop() -> None:
        raise Stopped

    run = [_compiler(tmp_path, f"echo $$ > {tmp_path}/number", "sleep 600; true"), "-c"]
    token = compilers.cancel.set(stop)
    try:
        with pytest.raises(Stopped):
            compilers.run(run)
    finally:
        compilers.cancel.reset(token)
    assert not processes.below(int((tmp_path / "number").read_text()), processes.running())
    assert not compilers.hung


def test_all_that_start_compilers_are_bounded_inside_alone() -> None:
    import torch._inductor.compile_fx  # noqa: F401

    started = {
        name: module
        for name, module in sys.modules.items()
        if name.startswith(("torch._inductor.", "triton.")) and hasattr(module, "subprocess")
    }
    assert {"torch._inductor.cpp_builder", "torch._inductor.codecache", "torch._inductor.cpu_vec_isa"} <= {*started}
    with bounded(), bounded():
        with bounded():
            pass
        assert all(module.subprocess.run is compilers.run for module in started.values())
        assert subprocess.run is not compilers.run
    assert all(module.subprocess is subprocess for module in started.values())


def test_what_they_give_and_raise_is_what_subprocess_does(tmp_path: Path) -> None:
    fails, writes = ["sh", "-c", "echo a; echo b >&2; exit 3"], ["sh", "-c", "echo a"]
    for both in ((subprocess.run, compilers.run), (subprocess.check_output, compilers.check_output)):
        own, other = (call(writes, text=True, cwd=tmp_path) for call in both)
        assert getattr(own, "stdout", own) == getattr(other, "stdout", other)
    done = compilers.run(fails, capture_output=True)
    assert (done.stdout, done.stderr, done.returncode) == (b"a\n", b"b\n", 3)
    for call in (compilers.check_call, compilers.check_output):
        with pytest.raises(subprocess.CalledProcessError):
            call(fails, stderr=subprocess.DEVNULL)
    with pytest.raises(FileNotFoundError):
        compilers.run([str(tmp_path / "none")])


@pytest.mark.skipif(sys.version_info < (3, 11), reason="no process is started in the group of another there")
def test_what_sees_to_compilers_is_there_as_long_as_they_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(processes.WORKS_FOR, raising=False)
    own = [sys.executable, "-c", "import os; print(os.getpgrp())"]
    with bounded():
        assert compilers._keeper is None
        group = int(compilers.check_output(own))
        kept = compilers._keeper
        assert kept is not None and group == kept.pid != os.getpgrp()
        kept.kill()
        kept.wait()
        assert int(compilers.check_output(own)) == compilers._keeper.pid != group, "one that was killed is replaced"
        kept = compilers._keeper
    assert kept.poll() is not None and compilers._keeper is None
    assert int(compilers.check_output(own)) == os.getpgrp(), "outside nobody ends it"
    monkeypatch.setenv(processes.WORKS_FOR, f"{os.getpid()} 1")
    with bounded():
        assert int(compilers.check_output(own)) == os.getpgrp(), "a worker's are in its own group"
