# SPDX-License-Identifier: Apache-2.0
"""A block that cannot be captured is split: what can be compiled below it is, and the picture is eager's.

Captured graphs run as they are here (subjects.py), which leaves out Inductor and nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from subjects import graphs_as_they_are
from torch import nn

from nexfort_engine.api import wrap_methods
from nexfort_engine.cache.store import Store
from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.dispatch.compiled_share import WHOLE
from nexfort_engine.engine import Engine
from nexfort_engine.runtime.engine_state import HostHooks

pytestmark = pytest.mark.usefixtures("threads")
T = torch.Tensor
WIDTH = 16
HANDED = "is neither data nor a plain value"
BRANCHES = "branches on the value of a tensor"
NOTE = "is not compiled as a whole where it cannot be captured"
GAIN = 1.0  # a number that code reaches by name


@pytest.fixture(autouse=True)
def _graphs() -> Iterator[None]:
    with graphs_as_they_are():
        yield


class Memo:
    """What blocks keep what they computed in, for each other: it is called, so no artefact can be given one."""

    def __init__(self) -> None:
        self.kept: dict[str, T] = {}

    def __call__(self, name: str, make: Callable[[], T]) -> T:
        if name not in self.kept:
            self.kept[name] = make()
        return self.kept[name]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, h: T) -> T:
        return self.narrow(torch.relu(self.wide(h))) * GAIN


class Handed(nn.Module):
    """It is given an object."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, h: T, memo: Memo) -> T:
        return h + self.mlp(self.norm(h)) * memo("mean", h.mean)


class Branching(nn.Module):
    """What it does depends on numbers of its input, which its capture finds out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, h: T) -> T:
        return h + self.mlp(self.norm(h)) if bool(h.sum() > 0) else h - self.mlp(h)


class Deep(nn.Module):
    """The object goes on to what lies below."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.mlp = Handed(), Mlp()

    def forward(self, h: T, memo: Memo) -> T:
        return self.mlp(self.inner(h, memo))


class Listed(nn.Module):
    """Sends rows to the one of its experts that they ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Mlp() for _ in range(3)])

    def forward(self, h: T) -> T:
        to, result = (h.sum(-1) > 0).long(), torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            at = (to == number).nonzero()
            if at.numel():
                result[at[:, 0], at[:, 1]] = expert(h[at[:, 0], at[:, 1]])
        return result


class Holding(nn.Module):
    """It holds one submodule that can be compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()


class Naming(Holding):
    """Exchanges what its submodule reaches by name, between two calls of it."""

    def forward(self, h: T, memo: Memo) -> T:
        global GAIN
        first = self.mlp(h)
        GAIN = 3.0
        second = self.mlp(h)
        GAIN = 1.0
        return first - second


class Option(Holding):
    """It cannot be captured with one option, and can be without."""

    def forward(self, h: T, options: dict[str, Any]) -> T:
        if options.get("asks") and bool(h.sum() > 1e9):
            return h
        return self.mlp(h) + h


class Leaves(nn.Module):
    """It holds single layers only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: T, memo: Memo) -> T:
        return self.linear(h)


class Net(nn.Module):
    def __init__(self, kind: type[nn.Module], count: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([kind() for _ in range(count)])

    def forward(self, h: T) -> T:
        memo, h = Memo(), self.first(h)
        for block in self.blocks:
            h = block(h) if isinstance(block, (Branching, Listed)) else block(h, memo)
        return h


class Alone(nn.Module):
    """A network without a list of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = Mlp(), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: T, memo: Any = None) -> T:
        return self.last(self.body(h) if bool(h.sum() > 0) else h)


class Optional(Net):
    def forward(self, h: T, options: dict[str, Any]) -> T:  # type: ignore[override]
        for block in self.blocks:
            h = block(h, options)
        return h


def compiled(net: nn.Module, folder: Path, **options: Any) -> Any:
    net = net.eval().requires_grad_(False)
    engine = Engine(net, CompileConfig.parse(options or None), Store(folder))
    return wrap_methods(net, engine, ("forward",))


def told(ours: Any) -> dict[str, Any]:
    return dict(ours.report.as_dict())


def used(ours: Any) -> set[str]:
    """The regions of which an artefact is in use."""
    return {region.path for region in ours._nexfort_engine.regions if region.bindings} - {"first"}


KINDS = {
    Handed: (HANDED, {"mlp"}),
    Branching: (BRANCHES, {"mlp"}),
    Deep: (HANDED, {"mlp", "inner.mlp"}),
    Listed: (BRANCHES, {"experts.0", "experts.1"}),
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@torch.no_grad()
def test_what_lies_below_is_compiled_in_the_first_step_and_used_in_the_next(tmp_path: Path, kind: type) -> None:
    reason, parts = KINDS[kind]
    net = Net(kind)
    ours = compiled(net, tmp_path)
    x = torch.randn(2, 3, WIDTH)
    assert torch.equal(ours(x), net(x))
    made = told(ours)["artefacts_compiled"]
    assert made > 0
    for sign in (1, -1):
        assert torch.allclose(ours(sign * x), net(sign * x), atol=1e-6)
    parts = {f"blocks.{n}.{part}" for n in range(4) for part in parts}
    assert used(ours) == parts if kind is not Listed else used(ours) < parts | {"blocks.0.experts.2"} and used(ours)
    report = told(ours)
    assert report["artefacts_compiled"] == made, "nothing is missing after the first step"
    assert {row["region"] for row in report["eager"] if reason in row["reason"]} >= {f"blocks.{n}" for n in range(4)}
    assert any(NOTE in note for note in report["notes"]) and WHOLE not in {row["region"] for row in report["eager"]}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@torch.no_grad()
def test_another_engine_compiles_nothing(tmp_path: Path, kind: type) -> None:
    net, x = Net(kind), torch.randn(2, 3, WIDTH)
    compiled(net, tmp_path)(x)
    again = compiled(net, tmp_path)
    for _ in range(2):
        assert torch.allclose(again(x), net(x), atol=1e-6)
    assert told(again)["artefacts_compiled"] == 0 and told(again)["artefacts_loaded"] > 0 and used(again)


@torch.no_grad()
def test_other_sizes_need_nothing_new(tmp_path: Path) -> None:
    net = Net(Handed)
    ours = compiled(net, tmp_path)
    ours(torch.randn(2, 3, WIDTH))
    made = told(ours)["artefacts_compiled"]
    for shape in ((1, 3, WIDTH), (2, 7, WIDTH), (4, 5, WIDTH)):
        x = torch.randn(shape)
        assert torch.allclose(ours(x), net(x), atol=1e-6)
    assert told(ours)["artefacts_compiled"] == made


@torch.no_grad()
def test_one_by_one_without_a_plan_and_beside_the_steps(tmp_path: Path) -> None:
    net, x = Net(Branching), torch.randn(2, 3, WIDTH)
    for place, more in enumerate(({"dynamic": False}, {"options": {"compile.background": True}})):
        ours = compiled(net, tmp_path / str(place), **more)
        for _ in range(12):
            assert torch.allclose(ours(x), net(x), atol=1e-6)
            background = ours._nexfort_engine.builder.background
            if background is not None:
                assert background.join(60)
        assert used(ours) == {f"blocks.{n}.mlp" for n in range(4)}, more


@torch.no_grad()
def test_what_code_of_the_block_exchanges_by_name_is_seen_below_it(tmp_path: Path) -> None:
    net = Net(Naming)
    ours = compiled(net, tmp_path)
    for _ in range(3):
        x = torch.randn(2, 3, WIDTH)
        assert torch.allclose(ours(x), net(x), atol=1e-6)
    assert sys.modules[__name__].GAIN == 1.0


@torch.no_grad()
def test_a_block_that_can_be_captured_without_an_option_is_one_artefact(tmp_path: Path) -> None:
    net = Optional(Option)
    ours, x = compiled(net, tmp_path), torch.randn(2, 3, WIDTH)
    for _ in range(2):
        assert torch.allclose(ours(x, {"asks": True}), net(x, {"asks": True}), atol=1e-6)
    assert used(ours) == {f"blocks.{n}.mlp" for n in range(4)}
    assert torch.allclose(ours(x, {}), net(x, {}), atol=1e-6)
    assert used(ours) == {f"blocks.{n}{part}" for n in range(4) for part in ("", ".mlp")}
    made = told(ours)["artefacts_compiled"]
    for options in ({"asks": True}, {}):
        assert torch.allclose(ours(x, options), net(x, options), atol=1e-6)
    assert told(ours)["artefacts_compiled"] == made


@torch.no_grad()
def test_a_network_that_is_one_region_is_not_split(tmp_path: Path) -> None:
    net = Alone()
    ours, x = compiled(net, tmp_path), torch.randn(2, 3, WIDTH).abs()
    for _ in range(3):
        assert torch.equal(ours(x), net(x))
    assert not used(ours) and told(ours)["artefacts_compiled"] == 0


@torch.no_grad()
def test_single_layers_are_not_compiled_one_by_one(tmp_path: Path) -> None:
    net = Net(Leaves, 12)
    ours, x = compiled(net, tmp_path), torch.randn(2, 3, WIDTH)
    for _ in range(2):
        assert torch.equal(ours(x), net(x))
    report = told(ours)
    assert report["artefacts_compiled"] == 0 and not used(ours)
    assert WHOLE in {row["region"] for row in report["eager"]} and not any(NOTE in note for note in report["notes"])


@torch.no_grad()
def test_what_failed_once_it_was_compiled_is_not_split(tmp_path: Path) -> None:
    net, x = Optional(Option), torch.randn(2, 3, WIDTH)
    ours = compiled(net, tmp_path)
    ours(x, {})
    for region in ours._nexfort_engine.regions:
        region.latch("its compiled code failed")
    for _ in range(2):
        assert torch.equal(ours(x, {}), net(x, {}))
    assert all(region.path.count(".") <= 1 for region in ours._nexfort_engine.regions)


class Gain:
    """What a block is given and calls: it counts its calls, and exchanges what code below reaches by name."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> float:
        global GAIN
        self.calls += 1
        GAIN = float(self.calls % 3 + 1)
        return GAIN


class Calling(Holding):
    def forward(self, h: T, gain: Gain) -> T:
        return self.mlp(h) * gain() + self.mlp(h)


class Given(nn.Module):
    """A network whose caller hands over the object."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Calling() for _ in range(4)])
        self.last = Mlp()

    def forward(self, h: T, gain: Gain) -> T:
        h = self.first(h)
        for block in self.blocks:
            h = block(h, gain)
        return self.last(h)


@torch.no_grad()
def test_an_object_of_the_caller_is_called_as_often_and_what_it_changes_is_seen(tmp_path: Path) -> None:
    net, gains = Given(), (Gain(), Gain())
    ours, x = compiled(net, tmp_path), torch.randn(2, 3, WIDTH)
    try:
        for step in range(5):
            results = []
            for network, gain in zip((ours, net), gains, strict=True):
                sys.modules[__name__].GAIN = 1.0  # type: ignore[attr-defined]
                results.append(network(x, gain))
            assert torch.allclose(*results, atol=1e-6) and gains[0].calls == gains[1].calls, step
        assert {f"blocks.{n}.mlp" for n in range(4)} <= used(ours)
    finally:
        sys.modules[__name__].GAIN = 1.0  # type: ignore[attr-defined]


class Walking(Holding):
    """It calls the layers of its submodule, not the submodule."""

    def forward(self, h: T, memo: Memo) -> T:
        return self.mlp.narrow(torch.relu(self.mlp.wide(h)))


@torch.no_grad()
def test_where_nothing_below_is_called_the_engine_steps_aside(tmp_path: Path) -> None:
    net = Net(Walking, 12)
    ours, x = compiled(net, tmp_path), torch.randn(2, 3, WIDTH)
    for _ in range(3):
        assert torch.equal(ours(x), net(x))
    assert WHOLE in {row["region"] for row in told(ours)["eager"]}


@torch.no_grad()
def test_withdrawn_artefacts_split_no_twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nexfort_engine.dispatch.region.differs", lambda *args: (args[1], "its first result differs"))
    net = Optional(Option)
    ours, x = compiled(net, tmp_path), torch.randn(2, 3, WIDTH)
    for _ in range(3):
        assert torch.allclose(ours(x, {}), net(x, {}), atol=1e-6)
    assert not ours._nexfort_engine.state.known.split


@torch.no_grad()
def test_a_verification_compares_what_lies_below_once(tmp_path: Path) -> None:
    net = Net(Handed)
    ours, x = compiled(net, tmp_path), torch.randn(2, 3, WIDTH)
    for _ in range(2):
        ours(x)
    ours.verify_next()
    assert torch.allclose(ours(x), net(x), atol=1e-6)
    rows = {row["region"]: row for row in told(ours)["verifications"][-1]["regions"]}
    assert {f"blocks.{n}.mlp" for n in range(4)} <= set(rows) and all(row["calls"] == 1 for row in rows.values())


class Patched(Net):
    """It is handed options, and its blocks an object of its own. Most of its weights are in what can be compiled."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__(kind)
        self.first = nn.Sequential(nn.Linear(WIDTH, 1024), nn.Linear(1024, WIDTH))  # type: ignore[assignment]

    def forward(self, h: T, options: dict[str, Any]) -> T:  # type: ignore[override]
        memo, h = Memo(), self.first(h)
        for block in self.blocks:
            h = block(h, memo)
        return h


@torch.no_grad()
def test_what_code_of_others_put_off_is_done_without_it(tmp_path: Path) -> None:
    net = Patched(Handed).eval().requires_grad_(False)
    hooks = HostHooks(others_code=lambda options: "a patch is there" if options.get("patch") else None)
    ours = wrap_methods(net, Engine(net, CompileConfig.parse(None), Store(tmp_path), hooks=hooks), ("forward",))
    x = torch.randn(2, 3, WIDTH)
    for options in ({"patch": 1}, {"patch": 1}, {}, {}, {}):
        assert torch.allclose(ours(x, options), net(x, options), atol=1e-6)
    assert used(ours) == {f"blocks.{n}.mlp" for n in range(4)}
