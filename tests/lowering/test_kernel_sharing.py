# SPDX-License-Identifier: Apache-2.0
"""A kernel that several artefacts call is compiled once, and each has all of it."""

from __future__ import annotations

import json
import os
import queue
from pathlib import Path
from typing import Any

import gpu_blocks
import pytest
import torch

from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.lowering import worker_pool
from nexfort_engine.lowering.kernel_sharing import compiled_once
from nexfort_engine.system.process_settings import scoped_env

triton = pytest.importorskip("triton", reason="the kernels are Triton's")


def _in_gluon(programs: int) -> Any:
    from triton.experimental.gluon._runtime import GluonASTSource

    from nexfort_engine.kernels.conv3x3.gluon_kernel import convolve_in_groups as kernel

    constants = {"BIASED": False, "SIDE": 3, "N": 128, "R": 0, "STAGES": 6, "PROGRAMS": programs, "scratch": None}
    kinds = dict.fromkeys(("images", "height", "width", "channels", "columns"), "i32")
    kinds |= dict.fromkeys(constants, "constexpr")
    return GluonASTSource(kernel, {name: kinds.get(name, "*fp16") for name in kernel.arg_names}, constants)


def _in_triton(block: int) -> Any:
    from triton.compiler.compiler import ASTSource

    from nexfort_engine.kernels.channels_last_weight.triton_kernel import lay_innermost as kernel

    constants = {"PLACES": 9, "WIDE": 16, "BLOCK": block}
    kinds = {"weight": "*fp16", "laid": "*fp16", "channels": "i32"} | dict.fromkeys(constants, "constexpr")
    return ASTSource(kernel, kinds, constants)


SOURCES = {"gluon": (_in_gluon, 132, 100), "triton": (_in_triton, 128, 64)}  # a source, and two forms of it


def _compile(place: Path, seen: Path, kind: str = "gluon", other: bool = False) -> None:
    """Compile a kernel for an artefact that is made at `place`; what was not found is noted in a file."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget

    def look(*, cache_hit: bool, **_: object) -> None:
        with seen.open("a") as file:
            file.write("" if cache_hit else "compiled\n")

    source_of, *forms = SOURCES[kind]
    source = source_of(forms[other])
    knobs.compilation.listener, before = look, knobs.compilation.listener
    try:
        with scoped_env(TRITON_CACHE_DIR=str(place)):
            made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
            assert made.asm["cubin"]
    finally:
        knobs.compilation.listener = before


@pytest.mark.parametrize("kind", SOURCES)
def test_processes_that_want_one_at_once_compile_it_once(kind: str, tmp_path: Path) -> None:
    shared, seen = tmp_path / "shared", tmp_path / "seen"
    shared.mkdir()
    places = [tmp_path / str(number) for number in range(3)]
    children = []
    with compiled_once(shared):
        for place in places:
            child = os.fork()
            if not child:
                try:
                    _compile(place, seen, kind)
                    os._exit(0)
                finally:
                    os._exit(1)
            children.append(child)
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * 3
        assert seen.read_text() == "compiled\n"
        _compile(tmp_path / "other", seen, kind, other=True)
        assert seen.read_text() == "compiled\n" * 2, "another form of it"
    for place in places:
        (cubin,) = place.rglob("*.cubin")
        (group,) = place.rglob("__grp__*")
        files = json.loads(group.read_text())["child_paths"].values()
        assert str(cubin) in files and all(Path(file).is_relative_to(place) for file in files), "nothing lies elsewhere"
    assert len({next(place.rglob("*.cubin")).read_bytes() for place in places}) == 1


@pytest.mark.parametrize("gone", [True, False])
def test_where_nothing_can_be_shared_each_compiles_its_own(gone: bool, tmp_path: Path) -> None:
    """The folder is gone, or is none."""
    shared, seen = tmp_path / "shared", tmp_path / "seen"
    if not gone:
        shared.write_text("")
    with compiled_once(shared):
        _compile(tmp_path / "own", seen)
    assert seen.read_text() == "compiled\n" and next((tmp_path / "own").rglob("*.cubin")).exists()


def test_outside_of_it_triton_compiles_as_it_does(tmp_path: Path) -> None:
    before = triton.compile
    with compiled_once(tmp_path):
        assert triton.compile is not before
    assert triton.compile is before


@pytest.mark.skipif(torch.version.cuda is None or torch.cuda.is_available(), reason="a torch for CUDA, without a GPU")
def test_artefacts_of_a_batch_share_what_they_have_in_common(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two blocks that convolve; the directory that they share goes with the process that forks the workers."""
    monkeypatch.setattr(worker_pool._Forker, "_current", None)
    monkeypatch.setenv("PYTHONPATH", str(Path(gpu_blocks.__file__).parent))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    options = CompileConfig.parse("O2").lowering_options("cuda")
    answers: queue.Queue[str | None] = queue.Queue()
    with worker_pool.Pool(1, "cuda", None) as workers:
        forker = workers._forker
        assert forker is not None
        shared = Path(forker.kernels)
        for number in range(2):
            (tmp_path / str(number)).mkdir()
            one = gpu_blocks.captured("widened")
            given = (one, tmp_path / str(number), ["pretended_worker", *one.modules], options, "cuda:0")
            workers.submit(*given, answers.put, lambda: "the worker did not do it")
        assert [answers.get(timeout=300) for _ in range(2)] == [None, None]
        assert len(list(shared.rglob("convolve_in_groups.cubin"))) == 2, "two forms, for both"
        assert len(list(shared.rglob("moments_of_chunks_0.cubin"))) == 1, "one for both"
    with worker_pool._Forker._lock:
        forker._end()
    assert not shared.exists()
