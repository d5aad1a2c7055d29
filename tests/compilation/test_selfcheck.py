# SPDX-License-Identifier: Apache-2.0
"""The self-check passes here, and says why where something on the way is broken; who asks for it, and how often."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from subjects import graphs_as_they_are

from nexfort_engine.capture import exporter
from nexfort_engine.capture.types import LOCK
from nexfort_engine.compilation import selfcheck, support
from nexfort_engine.lowering import inductor, preload
from nexfort_engine.system import compiler_processes
from nexfort_engine.system.process_settings import snapshot

pytestmark = pytest.mark.usefixtures("threads")


@pytest.fixture(autouse=True)
def fresh_support(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(support, "_passed", inspect.unwrap(support._passed))  # not what conftest.py found out
    support.reason_for.cache_clear()
    yield
    support.reason_for.cache_clear()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of device that the self-check was asked for; it says that all of them fail."""
    kinds: list[str] = []

    def run(device_type: str) -> str:
        kinds.append(device_type)
        return "a compiled block differs from the uncompiled one by 0.5"

    monkeypatch.setattr(selfcheck, "run", run)
    return kinds


@pytest.mark.slow
def test_it_passes_on_this_cpu_and_leaves_nothing_set() -> None:
    preload.wait_for_import()
    import torch._inductor.compile_fx  # importing it writes to the environment
    import torch.utils.cpp_extension  # and this imports setuptools, which extends sys.path in newer versions

    state, before = torch.get_rng_state(), snapshot()
    assert selfcheck.run("cpu") is None
    assert snapshot() == before
    assert torch.equal(torch.get_rng_state(), state)


def _raising(*_: Any) -> Any:
    raise RuntimeError("the back end is broken\nand says so at length")


def test_a_lowering_that_fails_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "lower", _raising)
    assert selfcheck.run("cpu") == "RuntimeError: the back end is broken"


def test_a_capture_that_fails_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "capture", _raising)
    assert selfcheck.run("cpu") == "RuntimeError: the back end is broken"
    assert exporter.capture is not _raising


def test_an_artefact_that_is_not_stored_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "lower", lambda captured, payload, options: payload.mkdir())
    assert selfcheck.run("cpu")


@pytest.mark.parametrize("spoil", [lambda t: t * 1.01, lambda t: t * float("nan"), lambda t: t[:1]])
def test_a_wrong_result_is_the_reason(
    spoil: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    with graphs_as_they_are(), pytest.MonkeyPatch.context() as patch:
        assert selfcheck.run("cpu") is None
        load = inductor.load

        def spoiled(*args: Any) -> Any:
            code = load(*args)
            return lambda inputs: [spoil(t) for t in code(inputs)]

        patch.setattr(inductor, "load", spoiled)
        assert "a compiled block differs from the uncompiled one by" in str(selfcheck.run("cpu"))


def test_an_artefact_for_one_size_only_is_the_reason() -> None:
    with graphs_as_they_are(), pytest.MonkeyPatch.context() as patch:
        load = inductor.load

        def narrow(*args: Any) -> Any:
            code = load(*args)

            def run(inputs: list[Any]) -> Any:
                assert inputs[-2].shape[0] == 2, "made for batch 2"
                return code(inputs)

            return run

        patch.setattr(inductor, "load", narrow)
        assert selfcheck.run("cpu") == "AssertionError: made for batch 2"


def test_a_device_that_is_not_there_is_the_reason() -> None:
    missing = next(kind for kind in ("mps", "xpu") if not getattr(torch, kind).is_available())
    assert selfcheck.run(missing)


def test_the_reference_torch_needs_none(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.11.0+cpu")
    assert support.reason_for("cpu") is None and not asked


@pytest.mark.parametrize("version", ["2.13.0", "2.15.0.dev20261101+cu130", "3.0.0"])
def test_a_newer_torch_is_decided_by_it_once(version: str, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    for _ in range(3):
        reason = support.reason_for("cpu")
    differs = "a compiled block differs from the uncompiled one by 0.5"
    assert reason == f"the self-check of torch {version} on cpu failed: {differs}"
    assert asked == ["cpu"]


def test_a_pass_is_remembered_and_a_failure_is_not(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answers: list[str | None] = ["it is broken", None, "it is broken again"]
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    monkeypatch.setattr(selfcheck, "run", lambda kind: asked.append(kind) or answers[len(asked) - 1])

    def in_a_new_process(folder: Path = tmp_path) -> str | None:
        support.reason_for.cache_clear()
        return support.reason_for("cpu", folder)

    assert "it is broken" in str(in_a_new_process())
    assert in_a_new_process() is None and asked == ["cpu"] * 2
    assert in_a_new_process() is None and asked == ["cpu"] * 2, "it was made again"
    (tmp_path / "selfchecks.json").write_bytes(b"[1, {")
    assert "broken again" in str(in_a_new_process()), "a damaged file is not believed"
    answers += [None, "another compiler"]
    assert in_a_new_process() is None
    monkeypatch.setattr(support, "cpp_compiler", lambda: ("/another/c++", 1.0))
    assert "another compiler" in str(in_a_new_process())


def test_threads_make_it_one_after_another_and_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Captures of two threads break each other, and so they do for the rest of the process."""
    made: list[int] = []

    def run(device_type: str) -> None:
        made.append(1)
        assert not elsewhere(LOCK.acquire, blocking=False), "another thread could capture"

    def elsewhere(call: Callable[..., Any], **given: Any) -> Any:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(call, **given).result()

    monkeypatch.setattr(torch, "__version__", "2.13.0")
    monkeypatch.setattr(selfcheck, "run", run)
    with ThreadPoolExecutor(4) as threads:
        with LOCK:
            asked = [threads.submit(support.reason_for, "cpu", tmp_path) for _ in range(4)]
            assert not wait(asked, 0.3).done and not made
        assert [one.result(60) for one in asked] == [None] * 4
    assert made == [1]


def test_a_host_may_cancel_while_another_thread_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    def asks() -> None:
        compiler_processes.cancel.set(stop)
        support.reason_for("cpu")

    monkeypatch.setattr(torch, "__version__", "2.13.0")
    with ThreadPoolExecutor(1) as thread, LOCK, pytest.raises(KeyboardInterrupt):
        thread.submit(asks).result(60)


@pytest.mark.parametrize("kind", ["xpu", "mps"])
def test_another_kind_of_device_is_decided_by_it(kind: str, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "_no_compiler", lambda device_type: None)
    assert f"on {kind} failed" in str(support.reason_for(kind))
    assert asked == [kind]


def test_rocm_is_decided_by_it(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "_no_compiler", lambda device_type: None)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert "on cuda failed" in str(support.reason_for("cuda")) and asked == ["cuda"]
