# SPDX-License-Identifier: Apache-2.0
"""What Inductor finds out about a CPU by compiling, remembered from process to process.

Inductor asks which vector instructions work by building a small library for each and loading it in a new Python, which
imports torch: 44 seconds of a processor on a CPU with AMX, of which loading takes 28. Here the new Python loads torch's
libraries without the import, and only if the small one needs them. The answers depend on the CPU, the compiler and
torch alone, so they are kept in one JSON file beside the artefacts. Nothing else about the machine is stored, and a
lost or foreign file costs the probe.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ..cache.key import cpu_facts
from ..cache.os_errors import refusal
from ..cache.sidecar import recall, remember
from ..system.compiler_processes import bounded
from ..system.process_settings import replaced

_FILE = "cpu_probes.json"
_INSTRUCTIONS = "instructions.txt"
_ENDED = (-signal.SIGTERM, -getattr(signal, "SIGKILL", signal.SIGTERM))
# What the new Python runs. The ways are tried in turn, so that "no" is still torch's own answer.
_LOAD = f"""
from ctypes import CDLL, RTLD_GLOBAL, cdll
def plain():
    pass
def libraries():
    for name in ("libc10.so", "libtorch_cpu.so"):
        CDLL({str(Path(torch.__file__).parent / "lib")!r} + "/" + name, RTLD_GLOBAL)
def whole():
    import torch
for prepare in (plain, libraries, whole):
    try:
        prepare()
        cdll.LoadLibrary("__lib_path__")
        break
    except OSError:
        if prepare is whole:
            raise
"""
_folder: Path | None = None


class OtherInstructionsError(Exception):
    """Code was made for other vector instructions than torch finds here now."""


def remember_in(folder: Path) -> None:
    """Keep the answers in `folder` from now on; without it they last as long as the process."""
    global _folder
    _folder = folder


@contextlib.contextmanager
def remembered_probes() -> Iterator[None]:
    """Answer Inductor's vector-instruction probe from memory inside the block; new answers are stored at its end.

    Replaces one method of Inductor's for the length of the block; to be used inside flags.inductor_scope, whose lock
    keeps it to one thread.
    """
    from torch._inductor.cpu_vec_isa import VecISA

    original = VecISA.check_build
    answers = _read()
    known = len(answers)

    def check_build(self: Any, code: str) -> bool:
        key = _key(self, code)
        if key not in answers:
            with bounded(), _failures() as failures:
                answers[key] = bool(original(self, code))
            if not answers[key] and (found := _refused(failures)) is not None:
                del answers[key]
                raise found
        return answers[key]

    VecISA.check_build = check_build  # type: ignore[method-assign]
    try:
        with _loading_fast(VecISA):
            yield
    except BaseException:  # a full disk or no process: a "no" then says nothing of the processor
        answers = {key: answer for key, answer in answers.items() if answer}
        raise
    finally:
        VecISA.check_build = original  # type: ignore[method-assign]
        if len(answers) > known:
            remember(_folder, _FILE, answers)


def _loading_fast(probes: Any) -> contextlib.AbstractContextManager[Any]:
    """Have libraries loaded by `_LOAD` inside the block, where torch loads them by a text of that form."""
    own = getattr(probes, "_avx_py_load", "")
    if sys.platform == "linux" and "import torch" in own and "__lib_path__" in own:
        return replaced(probes, "_avx_py_load", _LOAD)
    return contextlib.nullcontext()


@contextlib.contextmanager
def _failures() -> Iterator[list[Exception]]:
    """What a probe fails with inside, which torch takes for the answer that the processor lacks the instructions."""
    from torch._inductor import cpu_vec_isa
    from torch._inductor.cpp_builder import CppBuilder

    found: list[Exception] = []

    def noted(call: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*given: Any, **more: Any) -> Any:
            try:
                return call(*given, **more)
            except Exception as error:
                found.append(error)
                raise

        return noting

    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(CppBuilder, "build", noted(CppBuilder.build)))
        asked = getattr(cpu_vec_isa, "subprocess", None)  # of `bounded`; another torch may load it in other ways
        if asked is not None:
            starts = {name: noted(getattr(asked, name)) for name in ("check_call", "run")}  # torch 2.14 and newer: run
            loading = SimpleNamespace(**{**vars(subprocess), **starts})
            stack.enter_context(replaced(cpu_vec_isa, "subprocess", loading))
        yield found


def _refused(failures: list[Exception]) -> Exception | None:
    """Why a probe says nothing of the processor: the system refused it something, or ended what it had started."""
    from torch._inductor.codecache import cache_dir

    for error in failures:
        if isinstance(error, subprocess.CalledProcessError) and error.returncode in _ENDED:
            return OSError(errno.ENOMEM, "what tries vector instructions was ended by the system")
        if isinstance(error, (OSError, subprocess.TimeoutExpired)):
            return error
        if (found := refusal(error, (), Path(cache_dir()))) is not None:
            return found
    return None


def note_instructions(payload: Path) -> None:
    """Write down beside code for a CPU which vector instructions it was made for; inside `remembered_probes`.

    Its numbers go through memory in steps of their width. The same code, built for another width by who loads it,
    writes past the end of its results.
    """
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    asked = getattr(valid_vec_isa_list, "cache_info", None)
    if (asked is None or asked().currsize) and any(payload.rglob("*.cpp")):
        (payload / _INSTRUCTIONS).write_text(_instructions(), encoding="utf-8")


def check_instructions(payload: Path) -> None:
    """Raises OtherInstructionsError where code was made for others than torch finds now; inside `remembered_probes`."""
    file = payload / _INSTRUCTIONS
    if file.exists() and (made_for := file.read_text(encoding="utf-8")) != (found := _instructions()):
        raise OtherInstructionsError(f"it was made for the vector instructions {made_for!r}, and {found!r} are found")


def _instructions() -> str:
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    picked = pick_vec_isa()
    return f"{picked} {picked.build_arch_flags()}".strip()


def _key(isa: Any, code: str) -> str:
    parts = [torch.__version__, *cpu_facts(), *cpp_compiler(), type(isa).__name__, isa._arch_flags, code]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def cpp_compiler() -> tuple[str, float]:
    """Path and time of the C++ compiler that Inductor uses; it raises what Inductor raises where there is none."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    with bounded():
        path = shutil.which(get_cpp_compiler()) or ""
    return path, os.stat(path).st_mtime if path else 0.0


def _read() -> dict[str, bool]:
    found = recall(_folder, _FILE)
    return {k: v for k, v in found.items() if isinstance(v, bool)} if isinstance(found, dict) else {}
