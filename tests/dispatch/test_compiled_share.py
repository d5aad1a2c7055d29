# SPDX-License-Identifier: Apache-2.0
"""Where nothing of a network pays the engine steps aside, after a few captures at most and with one line about it.

Captured graphs run as they are here (subjects.py), which leaves out Inductor and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from subjects import graphs_as_they_are
from torch import nn

import nexfort_engine
from nexfort_engine.api import wrap_methods
from nexfort_engine.cache.store import Store
from nexfort_engine.compilation import builder
from nexfort_engine.compilation import planner as planning
from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.dispatch import forward_shim
from nexfort_engine.dispatch.compiled_share import WHOLE
from nexfort_engine.engine import Engine

pytestmark = pytest.mark.usefixtures("threads")
T = torch.Tensor
CHANGES = "it changes a list or an object that it is given"


@pytest.fixture(autouse=True)
def _graphs() -> Iterator[None]:
    with graphs_as_they_are():
        yield


class Work:
    """What the engine does besides running the network's own code."""

    def __init__(self) -> None:
        self.captures: list[str] = []
        self.plans = self.shims = 0


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    found, capture, observe, stand_in = Work(), builder.capture, planning.Planner._observe, forward_shim.stand_in

    def captured(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found.captures.append(type(module).__name__)
        return capture(module, *args, **kwargs)

    def observed(*args: Any) -> Any:
        found.plans += 1
        return observe(*args)

    def stood(module: nn.Module, own: Any) -> bool:
        found.shims += 1
        return stand_in(module, own)

    monkeypatch.setattr(builder, "capture", captured)
    monkeypatch.setattr(planning.Planner, "_observe", observed)
    monkeypatch.setattr("nexfort_engine.engine.stand_in", stood)
    return found


class Cache:
    """What is kept of frames."""

    def __init__(self) -> None:
        for at in range(6):
            setattr(self, f"at_{at}", None)


class Chunk(nn.Module):
    """Keeps what its next call needs on its caller's object."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, h: T, cache: Cache | None = None, at: int = 0) -> T:
        if cache is not None:
            name = f"at_{at}"
            before = getattr(cache, name)
            h = h if before is None else h + before
            setattr(cache, name, h)
        return torch.tanh(self.linear(h))


class Video(nn.Module):
    """Frames one after another through blocks; one frame alone needs no cache."""

    def __init__(self, last: int = 8, kind: type[nn.Module] = Chunk) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([kind(64) for _ in range(6)])
        self.last = nn.Linear(64, last)

    def forward(self, x: T) -> T:
        cache = Cache() if x.shape[1] > 1 else None
        found = []
        for h in x.unbind(1):
            for at, block in enumerate(self.blocks):
                h = block(h, cache, at) if cache is not None else block(h)
            found.append(self.last(h))
        return torch.stack(found, 1)


def compiled(net: nn.Module, folder: Path, **options: Any) -> Any:
    net = net.eval().requires_grad_(False)
    engine = Engine(net, CompileConfig.parse(options or None), Store(folder))
    return wrap_methods(net, engine, ("forward",))


def test_what_only_ends_of_which_compile_runs_as_without_the_engine(tmp_path: Path, work: Work) -> None:
    net = Video()
    ours, x = compiled(net, tmp_path), torch.randn(1, 4, 64)
    with torch.no_grad():
        wanted = net(x)
        assert torch.equal(ours(x), wanted)
        assert not work.captures and work.plans >= 1 and work.shims
        (row,) = ours.report.as_dict()["eager"]
        assert row["region"] == WHOLE and CHANGES in row["reason"] and "98%" in row["reason"]
        before = vars(work).copy()
        for _ in range(3):
            assert torch.equal(ours(x), wanted)
        assert torch.equal(ours(torch.cat([x, x], 1)), net(torch.cat([x, x], 1)))
    assert vars(work) == before and ours.report.as_dict()["eager"] == [row]


def test_it_is_not_run_to_its_end_to_find_that_out(tmp_path: Path, work: Work) -> None:
    ran: list[int] = []
    note = ran.append  # what code puts into a list by its name is taken out after a plan

    class Counted(Chunk):
        def forward(self, h: T, cache: Cache | None = None, at: int = 0) -> T:
            note(at)
            return super().forward(h, cache, at)

    net = Video(kind=Counted)
    ours, x = compiled(net, tmp_path), torch.randn(1, 4, 64)
    with torch.no_grad():
        ours(x)
    assert ran.count(5) == 4 and len(ran) == 4 * 6 + 2, "two blocks of a class show what the others do"
    assert not work.captures and work.plans == 1


def test_another_kind_of_call_is_tried_for_itself(tmp_path: Path, work: Work) -> None:
    net = Video()
    ours, x = compiled(net, tmp_path), torch.randn(1, 4, 64)
    with torch.no_grad():
        ours(x)
        assert not work.captures
        assert torch.equal(ours(x[:, :1]), net(x[:, :1]))
        assert work.captures == ["Chunk", "Linear"] and ours.report.as_dict()["artefacts_compiled"] == 2
        stood = work.shims
        ours(x)
        assert work.shims == stood
        ours(x[:, :1])
        assert work.shims > stood


def test_a_network_half_of_which_compiles_stays_compiled(tmp_path: Path, work: Work) -> None:
    net = Video(last=512)
    ours, x = compiled(net, tmp_path), torch.randn(1, 4, 64)
    with torch.no_grad():
        for _ in range(2):
            assert torch.allclose(ours(x), net(x), atol=1e-6)
    assert work.captures == ["Linear"]
    report = ours.report.as_dict()
    assert report["artefacts_compiled"] == 1 and {row["reason"] for row in report["eager"]} == {CHANGES}


class Pictures(nn.Module):
    """Blocks that change their caller's cache, and one at the end that is given an image."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Chunk(64) for _ in range(6)])
        self.last = nn.Conv2d(4, last, 3, padding=1)

    def forward(self, x: T) -> T:
        cache = Cache()
        for at, block in enumerate(self.blocks):
            x = block(x, cache, at)
        return self.last(x)


@pytest.mark.parametrize("last", [4, 4096])
def test_a_plan_copies_no_image_where_little_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    monkeypatch.setattr("nexfort_engine.modules.channels_last.MEASURED", ("cpu", "cuda"))
    copied, own = [], planning.as_taken
    monkeypatch.setattr(planning, "as_taken", lambda tensor: copied.append(tensor.shape) or own(tensor))
    ours, x = compiled(Pictures(last), tmp_path), torch.randn(1, 4, 64, 64)
    with torch.no_grad():
        ours(x)
    assert bool(copied) == (last > 4)


@pytest.mark.parametrize("again", ["attached", "converted"])
def test_it_is_tried_again(tmp_path: Path, work: Work, again: str) -> None:
    net = Video()
    ours, x = compiled(net, tmp_path), torch.randn(1, 4, 64)
    with torch.no_grad():
        ours(x)
        ours(x)
        stood = work.shims
        ours(x)
        assert work.shims == stood
        if again == "attached":
            ours._nexfort_engine.prepare(torch.device("cpu"))
        else:
            net.double()
            x = x.double()
        ours(x)
        assert work.shims > stood and not work.captures


class Drawing(nn.Module):
    """Draws random numbers: refused by a capture alone. Each has a width of its own, so that none is another's twin."""

    widths = iter(range(1, 10**6))

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.more = nn.Linear(width, width), nn.Linear(width, next(self.widths))

    def forward(self, h: T, cache: Any = None, at: int = 0) -> T:
        return self.linear(h) + torch.rand_like(self.more(h)).mean()


@pytest.mark.parametrize("plans", [True, False])
def test_blocks_refused_for_one_reason_are_not_all_captured(
    tmp_path: Path, work: Work, monkeypatch: pytest.MonkeyPatch, plans: bool
) -> None:
    if not plans:
        monkeypatch.setattr(planning.Planner, "calls", lambda planner, session: [])
    ours, x = compiled(Video(kind=Drawing), tmp_path), torch.randn(2, 1, 64)
    with torch.no_grad():
        ours(x)
        assert work.captures.count("Drawing") == 3
        stood = work.shims
        ours(x)
    assert work.captures.count("Drawing") == 3 and work.shims == stood
    reasons = [row["reason"] for row in ours.report.as_dict()["eager"] if row["region"] == WHOLE]
    assert len(reasons) == 1 and "random numbers" in reasons[0]


class Asked(nn.Module):
    """Cannot be captured with one option, and can without."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, h: T, options: dict[str, Any]) -> T:
        h = self.linear(h)
        return h + torch.rand_like(h) * 0 if options.get("noise") else h


class Optional(nn.Module):
    def __init__(self, kind: type[nn.Module] = Asked) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([kind(8) for _ in range(2)])

    def forward(self, h: T, options: dict[str, Any]) -> T:
        for block in self.blocks:
            h = block(h, options)
        return h


def test_what_an_option_made_impossible_is_compiled_without_it(tmp_path: Path, work: Work) -> None:
    net = Optional()
    ours, x = compiled(net, tmp_path), torch.randn(2, 8)
    with torch.no_grad():
        for _ in range(2):
            assert torch.allclose(ours(x, {"noise": True}), net(x, {"noise": True}))
        assert any(row["region"] == WHOLE for row in ours.report.as_dict()["eager"])
        assert torch.allclose(ours(x, {}), net(x, {}), atol=1e-6)
    assert ours.report.as_dict()["artefacts_compiled"] == 1


class Sized(nn.Module):
    """Each value of an option is another artefact."""

    ran = 0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, h: T, options: dict[str, Any]) -> T:
        type(self).ran += 1
        return self.linear(h) * len(options["size"])


def test_what_has_too_many_variants_still_serves_those_it_has(tmp_path: Path, work: Work) -> None:
    net = Optional(Sized)
    ours, x = compiled(net, tmp_path), torch.randn(2, 8)
    with torch.no_grad():
        for size in range(1, builder.MOST_VARIANTS + 4):
            ours(x, {"size": "x" * size})
        Sized.ran = 0
        ours(x, {"size": "x" * (builder.MOST_VARIANTS + 2)})
        assert Sized.ran == 2, "there is no end to variants"
        ours(x, {"size": "x"})
    assert Sized.ran == 2 and not any(row["region"] == WHOLE for row in ours.report.as_dict()["eager"])


def test_what_may_pass_is_no_reason(tmp_path: Path, work: Work) -> None:
    net = Optional()
    ours, x = compiled(net, tmp_path), torch.randn(2, 8)
    for block in net.blocks:
        block.linear._compiled_call_impl = block.linear._call_impl  # as `compile()` leaves it
    with torch.no_grad():
        ours(x, {})
        assert {row["region"] for row in ours.report.as_dict()["eager"]} == {"blocks.0", "blocks.1"}
        for block in net.blocks:
            block.linear._compiled_call_impl = None
        ours(x, {})
    assert ours.report.as_dict()["artefacts_compiled"] == 1


def test_a_verification_that_was_asked_for_is_made(tmp_path: Path, work: Work) -> None:
    ours, x = compiled(Video(), tmp_path), torch.randn(1, 4, 64)
    with torch.no_grad():
        ours(x)
        ours.verify_next()
        ours(x)
        stood = work.shims
        ours(x)
    assert len(ours.report.as_dict()["verifications"]) == 1 and work.shims == stood


class _CallsParts(nn.Module):
    """Its blocks are called by their parts, but for `whole`."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.whole = whole
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(_Parts() for _ in range(3))

    def forward(self, x: T) -> T:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if self.whole else block.part(x)
        return x


class _Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def part(self, x: T) -> T:
        return x + self.linear(x)

    def forward(self, x: T) -> T:
        return self.part(x)


@pytest.mark.parametrize("whole", [False, True])
def test_blocks_that_are_called_by_their_parts_have_a_line(whole: bool, tmp_path: Path) -> None:
    net = _CallsParts(whole).eval().requires_grad_(False)
    compiled = nexfort_engine.compile(net)
    for _ in range(2):
        with torch.no_grad():
            assert torch.allclose(compiled(x := torch.randn(2, 5, 8)), net(x), atol=1e-5)
    told = [note for note in compiled.report.as_dict()["notes"] if "not called as modules" in note]
    assert len(told) == (not whole), told
    assert whole or ("blocks.0 to blocks.2" in told[0])
