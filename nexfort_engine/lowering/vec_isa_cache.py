# SPDX-License-Identifier: Apache-2.0
"""What Inductor finds out about a CPU by compiling, remembered from process to process.

Inductor asks which vector instructions work by building a small library for each and loading it in a new Python: 11 of
the 13 seconds of a first load. The answers depend on the CPU, the compiler and torch alone, so they are kept in one
JSON file beside the artefacts. Nothing else about the machine is stored, and a lost or foreign file costs the probe.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..cache.key import cpu_facts
from ..cache.sidecar import recall, remember
from ..system.compiler_processes import bounded

_FILE = "cpu_probes.json"
_folder: Path | None = None


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
            with bounded():
                answers[key] = bool(original(self, code))
        return answers[key]

    VecISA.check_build = check_build  # type: ignore[method-assign]
    try:
        yield
    except BaseException:  # a full disk or no process: a "no" then says nothing of the processor
        answers = {key: answer for key, answer in answers.items() if answer}
        raise
    finally:
        VecISA.check_build = original  # type: ignore[method-assign]
        if len(answers) > known:
            remember(_folder, _FILE, answers)


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
