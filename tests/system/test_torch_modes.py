# SPDX-License-Identifier: Apache-2.0
"""Modes of torch: each is followed by lowered code or makes a call eager with its reason, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from large_rows import few
from subjects import MOVES, TOLERANCE, distance
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import nexfort_engine
from nexfort_engine.system import torch_modes

pytestmark = pytest.mark.usefixtures("threads", "artefact_cache")


class Block(nn.Module):
    """Attention, a sum of a new tensor, and a scatter: what modes act on."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).movedim(2, 0).transpose(2, 3)
        y = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        wide = torch.full((x.shape[-1],), 0.1)
        return x + (y * wide).to(x.dtype) * (3 if wide.dtype == torch.float64 else 1)


class Net(nn.Module):
    """Two blocks, and one under a mode of the network's own where it is asked for."""

    def __init__(self, inner: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.__dict__["inner"] = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        with self.__dict__["inner"]():
            return self.blocks[1](x)


def _pair(**given: Any) -> tuple[Net, Any]:
    torch.manual_seed(0)
    net = Net(**given).eval().requires_grad_(False)
    return net, nexfort_engine.compile(net)


def _x() -> torch.Tensor:
    return torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float32)


@contextlib.contextmanager
def _default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def _precision() -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


@contextlib.contextmanager
def _hook_for_all() -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(lambda m, a, r: r * 0.5 if type(m) is nn.Linear else None)
    try:
        yield
    finally:
        handle.remove()


class _Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is F.linear else result


class _Halving(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 0.5 if func is torch.ops.aten.addmm.default else result


FOLLOWED = {
    "attention by math": lambda: sdpa_kernel(SDPBackend.MATH),
    "deterministic algorithms": _deterministic,
    "a default dtype": _default_dtype,
    "precision of products": _precision,
    "a default device": lambda: torch.device("cpu"),
}
LOOSER = {"precision of products": 2**-8}  # products of bfloat16
EAGER = {
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), "torch.autocast is on for cpu"),
    "a torch function mode": (_Doubling, "a torch function mode is active (_Doubling)"),
    "a dispatch mode": (_Halving, "a torch dispatch mode is active (_Halving)"),
    "a forward hook for all modules": (_hook_for_all, "a forward hook for all modules"),
}


@pytest.mark.parametrize("name", few(list(FOLLOWED), 2))
def test_a_mode_that_shapes_code_has_artefacts_of_its_own(name: str) -> None:
    net, compiled = _pair()
    with torch.no_grad():
        plain = compiled(_x())
        for _ in range(2):
            with FOLLOWED[name]():
                wanted, found = net(_x()), compiled(_x())
            assert found.dtype == wanted.dtype and distance([found], [wanted]) < LOOSER.get(name, TOLERANCE)
            assert torch.equal(compiled(_x()), plain)
        told = compiled.report.as_dict()
        assert not told["eager"] and len(told["artefacts"]) == 2
        with FOLLOWED[name]():
            mark = compiled.report.mark()
            compiled(_x())
            assert not compiled.report.since(mark)["artefacts"], "it has its artefacts"


def test_the_default_dtype_changes_the_result() -> None:
    net, _ = _pair()
    with torch.no_grad():
        plain = net(_x())
        with _default_dtype():
            assert distance([net(_x())], [plain]) > MOVES


@pytest.mark.parametrize("name", EAGER)
def test_a_mode_that_no_artefact_follows_runs_eager(name: str) -> None:
    net, compiled = _pair()
    scope, reason = EAGER[name]
    with torch.no_grad():
        plain, wanted = compiled(_x()), net(_x())
        for _ in range(2):
            with scope():
                changed = net(_x())
                assert not torch.equal(changed, wanted), "the mode does not matter"
                assert torch.equal(compiled(_x()), changed)
            assert torch.equal(compiled(_x()), plain)
        assert reason in compiled.report.as_dict()["eager"][0]["reason"]


@pytest.mark.parametrize("first", ["autocast", "a default dtype", "attention by math"])
def test_a_mode_that_is_on_at_the_first_call_stays_with_it(first: str) -> None:
    net, compiled = _pair()
    scope = FOLLOWED[first] if first in FOLLOWED else EAGER[first][0]
    with torch.no_grad():
        with scope():
            wanted, found = net(_x()), compiled(_x())
        assert found.dtype == wanted.dtype and distance([found], [wanted]) < TOLERANCE
        assert distance([compiled(_x())], [net(_x())]) < TOLERANCE and compiled(_x()).dtype == torch.float32


@pytest.mark.parametrize("name", [*FOLLOWED, "autocast"])
def test_a_mode_of_the_network_s_own_around_one_block(name: str) -> None:
    scope = FOLLOWED[name] if name in FOLLOWED else EAGER[name][0]
    net, compiled = _pair(inner=scope)
    with torch.no_grad():
        wanted = net(_x())
        for _ in range(2):
            found = compiled(_x())
            assert found.dtype == wanted.dtype and distance([found], [wanted]) < LOOSER.get(name, TOLERANCE)
    eager = {row["region"] for row in compiled.report.as_dict()["eager"]}
    assert eager == (set() if name in FOLLOWED else {"blocks.1"})


@pytest.mark.parametrize("name", [*FOLLOWED, *EAGER])
def test_a_mode_of_the_network_s_own_that_comes_later(name: str) -> None:
    if name == "precision of products":
        pytest.skip("products ask for it in each call")
    scope = FOLLOWED[name] if name in FOLLOWED else EAGER[name][0]
    net, compiled = _pair()
    with torch.no_grad():
        compiled(_x())
        net.__dict__["inner"] = scope
        wanted, found = net(_x()), compiled(_x())
        assert found.dtype == wanted.dtype and distance([found], [wanted]) < TOLERANCE
        net.__dict__["inner"] = contextlib.nullcontext
        assert distance([compiled(_x())], [net(_x())]) < TOLERANCE


def test_gradients_that_the_network_switches_on_are_computed() -> None:
    net, compiled = _pair(inner=torch.enable_grad)
    trained = net.blocks[1].out.bias.requires_grad_(True)
    grads = []
    for module in (net, compiled):
        trained.grad = None
        with torch.no_grad():
            result = module(_x())
        result.sum().backward()
        grads.append(trained.grad)
    assert float(grads[0].norm()) > 0 and torch.equal(grads[0], grads[1])


def test_transforms_of_torch_func_are_left_to_eager() -> None:
    net, compiled = _pair()
    with torch.no_grad():
        compiled(_x())
        wanted = torch.func.vmap(net)(_x().unsqueeze(1))
        assert distance([torch.func.vmap(compiled)(_x().unsqueeze(1))], [wanted]) < TOLERANCE
    assert "torch.func" in compiled.report.as_dict()["eager"][0]["reason"]


def test_forward_mode_gradients_are_left_to_eager() -> None:
    net, compiled = _pair()
    compiled(_x())
    with sdpa_kernel(SDPBackend.MATH):  # the other kernel has no forward-mode gradient
        wanted = torch.func.jvp(net, (_x(),), (torch.ones_like(_x()),))
        found = torch.func.jvp(compiled, (_x(),), (torch.ones_like(_x()),))
    assert distance(list(found), list(wanted)) < TOLERANCE and float(wanted[1].norm()) > 0


def _put_into_a_plain_attribute(net: Net) -> torch.Tensor:
    net.blocks[0].out.weight.requires_grad_(False)
    trained = torch.ones(16, requires_grad=True)
    for block in net.blocks:
        block.gain = trained
    return trained


def test_gradients_of_what_is_no_parameter_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Block.forward
    monkeypatch.setattr(Block, "forward", lambda self, x: own(self, x) * getattr(self, "gain", 1.0))
    net, compiled = _pair()
    with torch.no_grad():
        compiled(_x())
    trained = _put_into_a_plain_attribute(net)
    grads = []
    for module in (net, compiled):
        trained.grad = None
        module(_x()).sum().backward()
        grads.append(trained.grad)
    assert float(grads[0].norm()) > 0 and torch.equal(grads[0], grads[1])
    assert "gradients are on" in compiled.report.as_dict()["eager"][-1]["reason"]


def test_modes_are_put_back_in_a_worker() -> None:
    before = torch_modes.current()
    wanted = {**torch_modes.named(before.shaping), "flash": False, "default_dtype": "float64", "no_such_mode": 1}
    with torch_modes.applied(wanted):
        assert torch.get_default_dtype() == torch.float64 and not torch.backends.cuda.flash_sdp_enabled()
    assert torch_modes.current() == before


def test_modes_go_through_json() -> None:
    import json

    with _deterministic(), sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
        wanted, text = torch_modes.current(), json.dumps(torch_modes.named(torch_modes.current().shaping))
    assert torch_modes.current() != wanted
    with torch_modes.applied(json.loads(text)):
        assert torch_modes.current().shaping == wanted.shaping


def test_threads_that_need_other_modes_wait_for_each_other() -> None:
    """A capture beside a graph that is lowered in the same process: neither sees the other's, and all is put back."""
    inside, leave, seen = threading.Event(), threading.Event(), []

    def wide() -> None:
        with torch_modes.applied({"default_dtype": "float64"}):
            inside.set()
            leave.wait(20)
            seen.append(("wide", torch.get_default_dtype()))

    def one(name: str) -> None:
        with torch_modes.applied({"default_dtype": name}):
            seen.append((name, torch.get_default_dtype()))

    threads = [threading.Thread(target=wide)]
    threads[0].start()
    assert inside.wait(20)
    threads += [threading.Thread(target=one, args=(name,)) for name in ("float32", "float64")]
    for thread in threads[1:]:
        thread.start()
    threads[2].join(20)
    assert seen == [("float64", torch.float64)], "who needs the same does not wait"
    leave.set()
    for thread in threads:
        thread.join(20)
    assert sorted(seen[1:], key=str) == [("float32", torch.float32), ("wide", torch.float64)]
    assert seen[-1][0] == "float32" and torch.get_default_dtype() == torch.float32


def test_a_thread_may_ask_for_other_modes_inside() -> None:
    with torch_modes.applied({"default_dtype": "float64"}):
        with torch_modes.applied({"default_dtype": "float32"}):
            assert torch.get_default_dtype() == torch.float32
        assert torch.get_default_dtype() == torch.float64
    assert torch.get_default_dtype() == torch.float32
