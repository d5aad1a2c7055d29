# SPDX-License-Identifier: Apache-2.0
"""While one thread traces, another one runs modules as ever, and is not told that it compiles."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import _ops, nn
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, PythonKeyTracer, get_proxy_mode
from torch.fx.graph import Graph
from torch.utils._python_dispatch import _disable_current_modes

from nexfort_engine.capture.exporter import capture
from nexfort_engine.capture.types import Example
from nexfort_engine.cudagraphs.host_constants import unwatched
from nexfort_engine.guards.call_spec import Flat, flatten_call
from nexfort_engine.modules.memory_format import normalised
from nexfort_engine.system import torch_modes
from nexfort_engine.system.process_settings import inductor_scope
from nexfort_engine.system.traced_thread import Here, kept_to_its_thread, own_pre_dispatch_modes


class Meets(nn.Module):
    """A block whose trace comes through another one's code."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Loud(nn.Module):
    """A module that cannot be written out, and notes what its calls go through."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def __repr__(self) -> str:
        raise AssertionError("a trace writes out the modules of others")


def captured(block: nn.Module) -> Any:
    flat = Flat()
    spec = flatten_call((torch.randn(3, 4),), {}, flat)
    return capture(block, Example.of(spec, flat, normalised))


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """A trace in another thread, which stands still in the middle; what is given lets it come to its end."""
    seen: list[Any] = []
    block, traces, looked = Meets(), threading.Event(), threading.Event()
    create_node = Graph.create_node

    def meeting(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args[:1] != ("call_function",) or traces.is_set() or not torch.compiler.is_compiling():
            return create_node(self, *args, **kwargs)
        seen.append(bool(torch.compiler.is_compiling()))
        traces.set()
        looked.wait(30)
        return create_node(self, *args, **kwargs)

    monkeypatch.setattr(Graph, "create_node", meeting)
    problems: list[BaseException] = []

    def trace() -> None:
        try:
            captured(block)
        except BaseException as error:
            problems.append(error)
        finally:
            traces.set()

    def end() -> None:
        looked.set()
        thread.join(60)

    thread = threading.Thread(target=trace)
    thread.start()
    try:
        assert traces.wait(60) and seen == [True], "it traces"
        yield end
    finally:
        end()
    assert not problems


def test_modules_of_another_thread_run_as_ever(beside: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    assert not torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    assert torch.equal(Loud()(torch.ones(2)), torch.full((2,), 2.0))
    through = [name for name in ("__call__", "__getattr__") if "either" in repr(getattr(nn.Module, name).__code__)]
    assert len(through) == 2, "the trace stands there"
    assert torch_modes.unsupported(set) is None, "nobody else replaced the call of all modules"
    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "__call__", lambda self, *args: self.forward(*args))
        assert "was replaced" in str(torch_modes.unsupported(set))
    beside()
    assert torch.compiler.is_compiling() is False and torch.compiler.is_exporting() is False
    assert "either" not in repr(nn.Module.__call__.__code__) and "either" not in repr(nn.Module.__getattr__.__code__)


def test_another_thread_does_not_take_its_modes_away(beside: Callable[[], None]) -> None:
    """Printing a tensor takes away the modes that are on, and so does torch.compile."""
    modes = _ops.mode_stack_state_for_pre_dispatch()
    with _disable_current_modes() as taken:
        beside()
    assert not taken
    after = _ops.mode_stack_state_for_pre_dispatch()
    assert after is not modes and not after.count()
    captured(Meets())


def test_a_trace_leaves_those_of_another_thread_alone() -> None:
    started, ended = threading.Event(), threading.Event()
    graphs: list[Any] = []

    class Waits(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            started.set()
            ended.wait(60)
            return x + 1

    thread = threading.Thread(target=lambda: graphs.append(torch.export.export(Waits(), (torch.ones(3),))))
    with unwatched():
        thread.start()
        assert started.wait(60)
        with unwatched(), own_pre_dispatch_modes(), _disable_current_modes() as taken:
            pass
    ended.set()
    thread.join(60)
    assert not taken and len(graphs) == 1 and not _ops.mode_stack_state_for_pre_dispatch().count()


def test_modes_that_a_trace_leaves_behind_are_gone() -> None:
    with own_pre_dispatch_modes():
        mode = ProxyTorchDispatchMode(PythonKeyTracer(), "symbolic", pre_dispatch=True)
        _ops._set_mode_pre_dispatch(mode)
        with own_pre_dispatch_modes():
            assert not _ops.mode_stack_state_for_pre_dispatch().count()
        assert get_proxy_mode() is mode
        _ops.unset_mode_pre_dispatch(torch._C._TorchDispatchModeKey.PROXY)
        _ops.mode_stack_state_for_pre_dispatch().set(0, mode)
    assert get_proxy_mode() is None


def test_a_flag_holds_in_the_thread_that_made_it() -> None:
    flag, told = Here(False), []
    thread = threading.Thread(target=lambda: told.append((bool(flag), bool(Here(False)))))
    thread.start()
    thread.join()
    assert bool(flag) and told == [(False, True)]
    outer, inner = list[bool](), Here(True)
    thread = threading.Thread(target=lambda: outer.append(bool(inner)))
    thread.start()
    thread.join()
    assert outer == [True], "it was said before"


def test_modules_run_as_ever_while_another_thread_lowers(tmp_path: Path) -> None:
    started, ended = threading.Event(), threading.Event()

    def identity(x: Any) -> Any:
        started.set()
        ended.wait(60)
        return x

    def lower() -> None:
        with inductor_scope(tmp_path):
            torch.fx.symbolic_trace(identity)  # as torch._inductor.loop_body does

    thread = threading.Thread(target=lower)
    thread.start()
    try:
        assert started.wait(60)
        with kept_to_its_thread():
            pass  # another one that ends meanwhile
        assert torch.equal(Loud()(torch.ones(2)), torch.full((2,), 2.0))
        assert torch_modes.unsupported(set) is None
    finally:
        ended.set()
        thread.join(60)


def test_what_is_exchanged_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.export._trace
    import torch.fx._symbolic_trace

    before = torch.fx._symbolic_trace._Patcher.patch_method, torch.export._trace._compiling_state_context
    with pytest.raises(ZeroDivisionError), kept_to_its_thread():
        assert torch.fx._symbolic_trace._Patcher.patch_method is not before[0]
        raise ZeroDivisionError
    assert before == (torch.fx._symbolic_trace._Patcher.patch_method, torch.export._trace._compiling_state_context)
    monkeypatch.delattr(torch.export._trace, "_compiling_state_context")
    with kept_to_its_thread():
        assert not hasattr(torch.export._trace, "_compiling_state_context"), "of another torch"
