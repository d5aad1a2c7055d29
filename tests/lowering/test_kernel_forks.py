# SPDX-License-Identifier: Apache-2.0
"""Kernels that are compiled beside each other: one process for each, as many at once as there are tokens."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest

from nexfort_engine.lowering.kernel_forks import Tokens, _Forks, kernels_handed_to, kernels_in_forks

if not hasattr(os, "fork"):
    pytest.skip("needs a system that forks", allow_module_level=True)


@pytest.fixture
def tokens() -> Tokens:
    return Tokens(2)


def _free(tokens: Tokens) -> int:
    count = 0
    while tokens.take():
        count += 1
    for _ in range(count):
        tokens.give_back()
    return count


def _where(number: int) -> tuple[int, int]:
    return number, os.getpid()


def test_each_is_done_in_a_process_of_its_own(tokens: Tokens, tmp_path: Path) -> None:
    forks = _Forks(tokens, tmp_path)
    results = []
    for number in range(2):
        assert forks.ready()
        results.append(forks.submit(_where, number))
    found = [result.result() for result in results]
    assert [number for number, _ in found] == [0, 1] and len({os.getpid(), *(pid for _, pid in found)}) == 3
    forks.end()
    assert _free(tokens) == 2


def test_no_more_at_once_than_there_are_tokens_and_one_that_was_kept_comes_back(tokens: Tokens, tmp_path: Path) -> None:
    forks, others = _Forks(tokens, tmp_path), _Forks(tokens, tmp_path)
    assert forks.ready() and forks.ready() and others.ready(), "asked twice before one is given, it takes one token"
    assert not _Forks(tokens, tmp_path).ready()
    others.end()
    assert _free(tokens) == 1
    forks.submit(_where, 0)
    forks.end()
    assert _free(tokens) == 2


def test_one_that_another_has_begun_with_is_found_where_it_is_asked_for(tokens: Tokens, tmp_path: Path) -> None:
    """By who asks, without a process or a token."""
    shared, places = tmp_path / "shared", [tmp_path / "1", tmp_path / "2"]
    for place in (shared, *places):
        place.mkdir()
    first, second = (_Forks(tokens, place, shared) for place in places)
    assert first.ready() and second.ready()
    assert first.submit(_where, 1).result()[1] != os.getpid()
    found = second.submit(_where, 1)
    assert _free(tokens) == 1
    assert found.result() == (1, os.getpid()) and _free(tokens) == 2, "who compiles it here keeps no token"
    assert second.ready() and second.submit(_where, 2).result()[1] != os.getpid(), "another kernel"
    for forks in (first, second):
        forks.end()
    assert _free(tokens) == 2


def test_where_nobody_can_say_what_is_begun_with_each_has_its_own(tokens: Tokens, tmp_path: Path) -> None:
    for number in range(2):
        forks = _Forks(tokens, tmp_path, tmp_path / "gone")
        assert forks.ready() and forks.submit(_where, number).result()[1] != os.getpid()
        forks.end()


def _end_unless(here: int) -> int:
    if os.getpid() != here:
        os.kill(os.getpid(), signal.SIGKILL)
    return here


def test_what_a_process_took_with_it_is_done_here(tokens: Tokens, tmp_path: Path) -> None:
    forks = _Forks(tokens, tmp_path)
    assert forks.ready()
    assert forks.submit(_end_unless, os.getpid()).result() == os.getpid()
    assert _free(tokens) == 2, "a process that was ended gave no token back"


def _fail() -> None:
    raise ValueError("no such kernel")


def test_a_failure_is_raised_where_it_is_asked_for(tokens: Tokens, tmp_path: Path) -> None:
    forks = _Forks(tokens, tmp_path)
    assert forks.ready()
    result = forks.submit(_fail)
    with pytest.raises(ValueError, match="no such kernel"):
        result.result()
    assert _free(tokens) == 2


def test_where_no_process_can_be_forked_the_work_is_done_here(
    tokens: Tokens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> int:
        raise BlockingIOError("no more processes")

    forks = _Forks(tokens, tmp_path)
    assert forks.ready()
    monkeypatch.setattr(os, "fork", refuse)
    assert forks.submit(_where, 3).result() == (3, os.getpid())
    forks.end()
    assert _free(tokens) == 2


def test_who_waits_keeps_no_token(tokens: Tokens, tmp_path: Path) -> None:
    """Inductor asks whether there is room for one more before it looks whether it has the kernel."""
    forks = _Forks(tokens, tmp_path)
    assert forks.ready()
    result = forks.submit(_where, 0)
    assert forks.ready()
    result.result()
    assert _free(tokens) == 2


def test_inductor_has_its_own_pool_again_afterwards(tokens: Tokens, tmp_path: Path) -> None:
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile

    before = dict(vars(AsyncCompile)), config.compile_threads
    with kernels_in_forks(tokens, tmp_path):
        assert isinstance(AsyncCompile.process_pool(), _Forks) and config.compile_threads > 1
        assert AsyncCompile.use_process_pool() and AsyncCompile().use_process_pool()
        threads = threading.active_count()
        assert AsyncCompile.submit(os.getpid).result() == os.getpid() and threading.active_count() == threads
    assert (dict(vars(AsyncCompile)), config.compile_threads) == before
    assert _free(tokens) == 2


class _Pool:
    def __init__(self) -> None:
        self.free, self.given = True, 0

    def ready(self) -> bool:
        return self.free

    def submit(self, *_: object) -> Future[None]:
        self.given += 1
        return Future()


@pytest.mark.parametrize("free", [True, False])
def test_a_kernel_of_others_is_handed_on_when_it_is_written_and_once(free: bool) -> None:
    """Its text in the code of the graph is that which is asked for when the code runs."""
    pytest.importorskip("triton")
    from torch._inductor.async_compile import AsyncCompile, CompiledTritonKernels
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    pool, lines = _Pool(), []
    pool.free = free
    source = f"\nimport triton  # \\ and 'a' {free}\n"
    body = f"async_compile.triton('a_kernel', '''{source.replace(chr(92), chr(92) * 2)}''', device_str='cuda')"
    with kernels_handed_to(pool):
        PythonWrapperCodegen.define_kernel(SimpleNamespace(writeline=lines.append), "a_kernel", body)
        assert pool.given == (1 if free else 0)
        if free:
            AsyncCompile().triton("a_kernel", source, device_str="cuda")
            assert pool.given == 1
            CompiledTritonKernels.remove_future(source)
    assert len(lines) == 1 and lines[0].kernel_body == body
