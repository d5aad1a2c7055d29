# SPDX-License-Identifier: Apache-2.0
"""Which vector instructions compiled code uses: what a refused probe says of them, and code that was made for others.

Code for one width that is built for another reads and writes past the end of its tensors.
"""

from __future__ import annotations

import errno
import gc
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import cpu_vec_isa
from torch._inductor.cpp_builder import CppBuilder

import nexfort_engine
from nexfort_engine import api
from nexfort_engine.cache.store import Store
from nexfort_engine.compilation import lookup
from nexfort_engine.lowering import vec_isa_cache
from nexfort_engine.system import compiler_processes

pytestmark = [
    pytest.mark.usefixtures("threads"),
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the instructions of one processor"),
]
ROOT = Path(nexfort_engine.__file__).resolve().parent.parent


def no_room(*_: Any, **__: Any) -> None:
    raise RuntimeError("C++ compile error: /usr/bin/ld: final link failed: " + os.strerror(errno.ENOSPC))


def no_process(*_: Any, **__: Any) -> None:
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def ended(*_: Any, **__: Any) -> None:
    raise subprocess.CalledProcessError(-9, "c++")


def unknown(*_: Any, **__: Any) -> None:
    raise RuntimeError("C++ compile error: unrecognized command-line option '-mavx2'")


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Whether a processor has certain instructions, asked anew each time, as a new process with a cache asks it."""
    monkeypatch.setattr(vec_isa_cache, "_folder", tmp_path / "cache")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    for starts in ("check_call", "run"):  # to load what was built; which of them torch takes depends on its version
        monkeypatch.setattr(compiler_processes._BOUNDED, starts, lambda *_, **__: 0)

    def asked() -> bool:
        with vec_isa_cache.remembered_probes():
            return cpu_vec_isa.VecAVX2().check_build(cpu_vec_isa.VecISA._avx_code)

    return asked


@pytest.mark.parametrize("refuse", [no_room, no_process, ended])
def test_a_probe_that_the_system_refuses_is_no_answer(
    probe: Callable[[], bool], monkeypatch: pytest.MonkeyPatch, refuse: Callable[..., None]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(CppBuilder, "build", refuse)
        with pytest.raises(OSError, match=r"No space|unavailable|ended"):
            probe()
    monkeypatch.setattr(CppBuilder, "build", lambda _: None)
    assert probe(), "it is asked again"


def test_nor_is_one_whose_library_the_system_does_not_let_load(
    probe: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CppBuilder, "build", lambda _: None)
    with monkeypatch.context() as patch:
        for starts in ("check_call", "run"):
            patch.setattr(compiler_processes._BOUNDED, starts, ended)
        with pytest.raises(OSError, match="ended"):
            probe()
    assert probe(), "it is asked again"


def test_one_that_the_compiler_cannot_build_is_an_answer(
    probe: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CppBuilder, "build", unknown)
    assert not probe()
    monkeypatch.setattr(CppBuilder, "build", lambda _: None)
    assert not probe(), "it is remembered"


LIBRARIES = {
    "plain": ("int answer() { return 42; }", True),
    "of torch's": ("namespace c10 { int GetCPUAllocator(); } int answer() { return c10::GetCPUAllocator(); }", True),
    "of nobody's": ("int nobody_has_this(); int answer() { return nobody_has_this(); }", False),
}


@pytest.mark.skipif(sys.platform != "linux", reason="torch loads it in its own way elsewhere")
@pytest.mark.parametrize("kind", LIBRARIES)
def test_a_library_is_loaded_without_the_import_of_torch(kind: str, tmp_path: Path) -> None:
    code, loads = LIBRARIES[kind]
    (tmp_path / "one.cpp").write_text(code, encoding="utf-8")
    subprocess.run(["c++", "-shared", "-fPIC", "-o", "one.so", "one.cpp"], cwd=tmp_path, check=True, timeout=60)
    text = vec_isa_cache._LOAD.replace("__lib_path__", str(tmp_path / "one.so"))
    command = [sys.executable, "-c", text + "\nimport sys\nassert 'torch' not in sys.modules"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode == 0) == loads, done.stderr
    if not loads:
        assert "nobody_has_this" in done.stderr


def test_torch_s_own_text_is_back_after_the_probes() -> None:
    own = cpu_vec_isa.VecISA._avx_py_load
    with vec_isa_cache.remembered_probes():
        assert cpu_vec_isa.VecISA._avx_py_load == vec_isa_cache._LOAD
    assert cpu_vec_isa.VecISA._avx_py_load == own


@pytest.mark.large  # a minute: torch imports itself once for each
def test_the_answers_are_those_of_torch_s_own_way(tmp_path: Path) -> None:
    ask = "from torch._inductor import cpu_vec_isa as isa; print([str(one) for one in isa.valid_vec_isa_list()])"
    ours = f"from nexfort_engine.lowering.vec_isa_cache import remembered_probes\nwith remembered_probes():\n {ask}"
    said = []
    for number, code in enumerate((ask, ours)):
        given = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / str(number)), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=given)
        assert done.returncode == 0, done.stderr[-2000:]
        said.append(done.stdout)
    assert said[0] == said[1] and "avx" in said[0]


class Net(nn.Module):
    """Rows of no vector's width, and sums along them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(23)
        self.eval().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(x)) * x.sum(-1, keepdim=True)


def report_of_a_step() -> dict[str, Any]:
    """Compared with eager, by an engine that has nothing but the store."""
    api._stores.clear()
    gc.collect()
    lookup._loaded.clear()
    net, x = Net(), torch.randn(3, 5, 23, generator=torch.Generator().manual_seed(0))
    module = nexfort_engine.compile(net)
    with torch.inference_mode():
        found, wanted = module(x), net(x)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5
    return dict(module.report.as_dict())


def test_code_for_other_instructions_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path))
    assert report_of_a_step()["artefacts_compiled"] == 1
    assert report_of_a_step()["artefacts_loaded"] == 1, "for the same"
    monkeypatch.setattr(vec_isa_cache, "_instructions", lambda: "others")
    again = report_of_a_step()
    assert again["artefacts_compiled"] == 1 and not again["artefacts_loaded"] and not again["eager"], again
    assert "vector instructions" in str(again["notes"])


AGAIN = """
import sys
sys.path[:0] = sys.argv[1:]
from test_vec_isa_cache import report_of_a_step
report = report_of_a_step()
print(report["artefacts_loaded"], report["artefacts_compiled"], report["eager"])
"""


@pytest.mark.large  # above is one process
def test_processes_with_other_limits_share_a_cache(tmp_path: Path) -> None:
    """torch's own variable limits what its code and compiled code may use."""

    def told(limit: str) -> str:
        environment = {**os.environ, "NEXFORT_CACHE_DIR": str(tmp_path), "ATEN_CPU_CAPABILITY": limit}
        command = [sys.executable, "-c", AGAIN, str(ROOT), str(Path(__file__).parent)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.strip()

    assert [told(limit) for limit in ("avx2", "default", "avx2")] == ["0 1 []", "0 1 []", "1 0 []"]
    assert len(Store(tmp_path).entries()) == 2
