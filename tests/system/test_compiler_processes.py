# SPDX-License-Identifier: Apache-2.0
"""Compilers that torch and Triton start: one that hangs is ended and not asked again, all else is as it was."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nexfort_engine.system import compiler_processes, process_activity
from nexfort_engine.system.compiler_processes import CompilerHangs, bounded

pytestmark = pytest.mark.skipif(os.name != "posix", reason="compilers are shell scripts here")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_processes, "STOPPED", 0.5)
    for name in ("ASKED", "SILENT"):
        monkeypatch.setattr(compiler_processes, name, 1.0)
    monkeypatch.setattr(compiler_processes, "LOOK", 0.1)
    monkeypatch.setattr(process_activity, "LOOK", 0.1)
    monkeypatch.setattr(process_activity, "WORK", 0.05)
    monkeypatch.setattr(compiler_processes, "hung", {})


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
        compiler_processes.run(run, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    number = int((tmp_path / "number").read_text())
    assert not process_activity.below(number, process_activity.running())
    began = time.monotonic()
    with pytest.raises(CompilerHangs, match="not asked again"):
        compiler_processes.check_output(run)
    assert time.monotonic() - began < 0.5, "it was asked again"


def test_one_that_is_slow_is_waited_for(tmp_path: Path) -> None:
    """It computes for three times as long as it may do nothing."""
    loop = f"{sys.executable} -c 'import time; end = time.monotonic() + 3\nwhile time.monotonic() < end: pass'"
    run = [_compiler(tmp_path, loop, "echo done"), "-c"]
    assert compiler_processes.check_output(run, text=True) == "done\n" and not compiler_processes.hung


def test_what_stops_the_step_ends_the_compiler(tmp_path: Path) -> None:
    class Stopped(Exception):
        pass

    def stop() -> None:
        raise Stopped

    run = [_compiler(tmp_path, f"echo $$ > {tmp_path}/number", "sleep 600; true"), "-c"]
    token = compiler_processes.cancel.set(stop)
    try:
        with pytest.raises(Stopped):
            compiler_processes.run(run)
    finally:
        compiler_processes.cancel.reset(token)
    assert not process_activity.below(int((tmp_path / "number").read_text()), process_activity.running())
    assert not compiler_processes.hung


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
        assert all(module.subprocess.run is compiler_processes.run for module in started.values())
        assert subprocess.run is not compiler_processes.run
    assert all(module.subprocess is subprocess for module in started.values())


def test_what_they_give_and_raise_is_what_subprocess_does(tmp_path: Path) -> None:
    fails, writes = ["sh", "-c", "echo a; echo b >&2; exit 3"], ["sh", "-c", "echo a"]
    for both in ((subprocess.run, compiler_processes.run), (subprocess.check_output, compiler_processes.check_output)):
        own, other = (call(writes, text=True, cwd=tmp_path) for call in both)
        assert getattr(own, "stdout", own) == getattr(other, "stdout", other)
    done = compiler_processes.run(fails, capture_output=True)
    assert (done.stdout, done.stderr, done.returncode) == (b"a\n", b"b\n", 3)
    for call in (compiler_processes.check_call, compiler_processes.check_output):
        with pytest.raises(subprocess.CalledProcessError):
            call(fails, stderr=subprocess.DEVNULL)
    with pytest.raises(FileNotFoundError):
        compiler_processes.run([str(tmp_path / "none")])


@pytest.mark.skipif(sys.version_info < (3, 11), reason="no process is started in the group of another there")
def test_what_sees_to_compilers_is_there_as_long_as_they_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(process_activity.WORKS_FOR, raising=False)
    own = [sys.executable, "-c", "import os; print(os.getpgrp())"]
    with bounded():
        assert compiler_processes._keeper is None
        group = int(compiler_processes.check_output(own))
        kept = compiler_processes._keeper
        assert kept is not None and group == kept.pid != os.getpgrp()
        kept.kill()
        kept.wait()
        assert int(compiler_processes.check_output(own)) == compiler_processes._keeper.pid != group, (
            "one that was killed is replaced"
        )
        kept = compiler_processes._keeper
    assert kept.poll() is not None and compiler_processes._keeper is None
    assert int(compiler_processes.check_output(own)) == os.getpgrp(), "outside nobody ends it"
    monkeypatch.setenv(process_activity.WORKS_FOR, f"{os.getpid()} 1")
    with bounded():
        assert int(compiler_processes.check_output(own)) == os.getpgrp(), "a worker's are in its own group"
