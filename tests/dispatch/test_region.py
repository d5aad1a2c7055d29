# SPDX-License-Identifier: Apache-2.0
"""Dispatch: a call runs an artefact that fits it, gets one of its own, or runs eager and the report says why.

Captured graphs run as they are here (subjects.py), which leaves out Inductor and nothing else.
"""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from subjects import graphs_as_they_are  # noqa: E402
from torch import nn  # noqa: E402

import nexfort_engine  # noqa: E402
from nexfort_engine.api import wrap_methods  # noqa: E402
from nexfort_engine.cache.store import Store  # noqa: E402
from nexfort_engine.compilation import builder as build  # noqa: E402
from nexfort_engine.compilation import lookup as finding  # noqa: E402
from nexfort_engine.config.compile_config import CompileConfig  # noqa: E402
from nexfort_engine.dispatch import forward_shim  # noqa: E402
from nexfort_engine.engine import Engine  # noqa: E402

T = torch.Tensor
Change = Callable[["Net"], Any]


class Part(nn.Module):
    """A block that has a weight and takes anything that `Net` hands on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.gain = 1.0

    def forward(self, h: T, *more: Any, **named: Any) -> T:
        h = h + self.linear(self.norm(h)) * self.gain
        for value in more:
            h = h * value
        options = named.get("options")
        if options is not None and "shift" in options:
            h = h + options["shift"]
        if options is not None and "patch" in options:
            h = options["patch"](h)
        return h


class Net(nn.Module):
    """Two equal blocks and a head; what is called besides the input goes to the blocks."""

    def __init__(self, width: int = 8, part: Callable[[int], nn.Module] = Part) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([part(width) for _ in range(2)])
        self.head = nn.Linear(width, 4)
        self.fails = False

    def forward(self, h: T, *more: Any, **named: Any) -> T:
        for block in self.blocks:
            h = block(h, *more, **named)
        if self.fails:
            raise ValueError("between two regions")
        return self.head(h)


class Pair:
    """A network and its compiled self, with an empty cache."""

    def __init__(self, net: nn.Module, folder: Path, options: Any = None, **of_engine: Any) -> None:
        torch.manual_seed(0)
        for weight in net.parameters():
            weight.data.normal_(0, 0.3)
        self.net = net.eval().requires_grad_(False)
        self.engine = Engine(net, CompileConfig.parse(options), Store(folder), **of_engine)
        self.compiled = wrap_methods(net, self.engine, ("forward",))
        self.report = self.engine.report

    def agrees(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """What the report gained by one call, whose result and changed arguments are the network's own."""
        theirs, ours = copy.deepcopy((args, kwargs)), copy.deepcopy((args, kwargs))
        mark = self.report.mark()
        with torch.no_grad():
            wanted = self.net(*theirs[0], **theirs[1])
            found = self.compiled(*ours[0], **ours[1])
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5), float((found - wanted).abs().max())
        for a, b in zip(ours[0], theirs[0], strict=True):
            assert not isinstance(a, T) or torch.allclose(a, b, atol=1e-5), "an argument was changed otherwise"
        return self.report.since(mark)

    def reasons(self) -> str:
        return "; ".join(row["reason"] for row in self.report.as_dict()["eager"])


@pytest.fixture(autouse=True)
def unlowered() -> Iterator[None]:
    """Captured graphs run as they are."""
    with graphs_as_they_are():
        yield


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """A network whose first call has been made."""
    made = Pair(Net(), tmp_path)
    assert made.agrees(x())["artefacts_compiled"] == 2
    return made


def x(batch: int = 2, length: int = 6, seed: int = 1) -> T:
    return torch.randn(batch, length, 8, generator=torch.Generator().manual_seed(seed))


# ---- one artefact for all that fits ---------------------------------------------------------------------------------


def test_the_first_call_makes_what_every_later_one_uses(pair: Pair) -> None:
    for batch, length in ((2, 6), (1, 6), (3, 9), (2, 64), (1, 2)):
        new = pair.agrees(x(batch, length))
        assert not new["artefacts"] and not new["variants"] and not new["eager"]
    data = pair.report.as_dict()
    assert {row["name"] for row in data["regions"]} == {"blocks.0", "blocks.1", "head"}
    assert len({row["key"] for row in data["regions"]}) == 2
    assert data["calls"] == 6 and not data["variants"] and not data["eager"] and not data["notes"]


def test_another_structure_dtype_or_rank_gets_an_artefact_of_its_own(pair: Pair) -> None:
    assert pair.agrees(x(), 2.5)["artefacts_compiled"] == 1
    assert pair.agrees(x(), 3.5)["artefacts_compiled"] == 1, "a float is part of the structure"
    assert pair.agrees(x(), torch.tensor(0.5))["artefacts_compiled"] == 1
    assert pair.agrees(x()[0])["artefacts_compiled"] == 2
    pair.net.double()
    assert pair.agrees(x().double())["artefacts_compiled"] == 2
    pair.net.float()
    assert not pair.agrees(x())["artefacts"] and not pair.reasons()


def test_numbers_that_only_look_equal_are_not_taken_for_each_other(pair: Pair) -> None:
    whole = torch.ones(2, 6, 8)
    for scale in (1, True, 1.0, 2, 2.0):
        pair.agrees(whole, scale)

    class Divides(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width))

        def forward(self, h: T, by: Any) -> T:
            counts = torch.arange(8) * by  # whole numbers, unless `by` is a float
            return h * self.weight + (counts / 3 if counts.is_floating_point() else counts // 3)

    other = Pair(Net(part=Divides), pair.engine.store.root / "other")
    for by in (1, 1.0, True, 2, 2.0):
        other.agrees(x(), by)


@pytest.mark.parametrize(
    "view",
    [
        lambda: x(8, 6).transpose(0, 1)[:2],
        lambda: x(4, 6)[::2],
        lambda: torch.randn(2, 8, 6).transpose(1, 2),
        lambda: torch.randn(2, 1, 8).expand(2, 6, 8),
        lambda: torch.randn(3, 6, 8)[1:],
    ],
)
def test_any_layout_of_the_input_runs_the_same_artefact(pair: Pair, view: Callable[[], T]) -> None:
    assert not pair.agrees(view())["artefacts"]


def test_channels_last_is_kept_apart_and_kept(tmp_path: Path) -> None:
    class Convolution(nn.Conv2d):
        def __init__(self, width: int) -> None:
            super().__init__(width, width, 3, padding=1)

    pair = Pair(nn.Sequential(nn.ModuleList([nn.Identity()]), *[Convolution(8) for _ in range(2)])[1:], tmp_path)
    image = torch.randn(2, 8, 6, 6)
    pair.agrees(image)
    pair.agrees(image.to(memory_format=torch.channels_last))
    assert not pair.reasons()
    assert not pair.agrees(torch.randn(3, 8, 4, 9).to(memory_format=torch.channels_last))["artefacts"]


def test_fixed_sizes_get_an_artefact_each(tmp_path: Path) -> None:
    pair = Pair(Net(), tmp_path, {"dynamic": False})
    assert pair.agrees(x())["artefacts_compiled"] == 2
    assert not pair.agrees(x(seed=2))["artefacts"]
    new = pair.agrees(x(3))
    assert new["artefacts_compiled"] == 2 and new["variants"]


def test_a_network_without_blocks_is_one_region(tmp_path: Path) -> None:
    pair = Pair(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)), tmp_path)
    assert pair.agrees(x(1))["artefacts_compiled"] == 1
    assert not pair.agrees(x(3, 9))["artefacts"]
    assert [row["name"] for row in pair.report.as_dict()["regions"]] == ["(whole module)"]


# ---- arguments that are changed -------------------------------------------------------------------------------------


class InPlace(Part):
    """A block that adds to what it is given, as Flux's do, and reads a second tensor afterwards."""

    def forward(self, h: T, *more: Any, **named: Any) -> T:
        h += self.linear(h)
        return h * 2 + (more[0] if more else 0)


def test_changes_to_an_argument_reach_the_caller(tmp_path: Path) -> None:
    pair = Pair(Net(part=InPlace), tmp_path)
    pair.agrees(x(), x(seed=2))
    pair.agrees(x(3, 5), x(3, 5, seed=2))
    pair.agrees(torch.randn(2, 8, 6).transpose(1, 2), x(seed=2))
    assert not pair.reasons()


class HandsBack(nn.Module):
    """A block that gives its caller what it was given, changed or not."""

    def __init__(self, change: bool) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(8, 8), change

    def forward(self, h: T) -> Any:
        return h.add_(self.linear(h)) if self.change else (self.linear(h), h)


class Reuses(nn.Module):
    """Changes what its blocks give back, and reads what they were given."""

    def __init__(self, change: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([HandsBack(change) for _ in range(2)])

    def forward(self, h: T) -> T:
        for block in self.blocks:
            same = h.transpose(1, 2).contiguous().transpose(1, 2)  # not contiguous
            result = block(same)
            own = result[-1] if isinstance(result, tuple) else result
            own.mul_(2)
            h = same + (result[0] if isinstance(result, tuple) else 0)
        return h


@pytest.mark.parametrize("change", [False, True])
def test_what_a_block_gives_back_is_what_it_was_given(tmp_path: Path, change: bool) -> None:
    """Also where the artefact was given a copy, because it is made for another layout."""
    pair = Pair(Reuses(change), tmp_path)
    for seed in range(3):
        pair.agrees(x(3, 7, seed=seed))
    assert not pair.reasons()


@pytest.mark.parametrize(
    "alias",
    [lambda h: (h, h), lambda h: (h, h.view(2, 6, 8)), lambda h: (h[:, :3], h[:, 3:]), lambda h: (h[:, :4], h[:, 2:])],
    ids=["the same", "a view", "two halves", "an overlap"],
)
def test_arguments_that_share_memory_are_changed_as_in_eager(tmp_path: Path, alias: Callable[[T], Any]) -> None:
    pair = Pair(Net(part=InPlace), tmp_path)
    pair.agrees(x(), x(seed=2))
    results = []
    for module in (pair.net, pair.compiled):
        base = x()
        with torch.no_grad():
            results.append((module(*alias(base)), base))
    assert torch.allclose(results[0][0], results[1][0], atol=1e-5)
    assert torch.allclose(results[0][1], results[1][1], atol=1e-5)


class Root(Net):
    """A network that changes its own input, draws random numbers between blocks and counts its calls."""

    calls = 0

    def forward(self, h: T, *more: Any, **named: Any) -> T:
        self.calls += 1
        h += 1
        for block in self.blocks:
            h = block(h) + torch.rand(1)
        return self.head(h)


@pytest.mark.parametrize("batch", [1, 2])
def test_planning_leaves_no_trace(tmp_path: Path, batch: int) -> None:
    pair = Pair(Root(), tmp_path)
    results = []
    for module in (pair.net, pair.compiled):
        given, pair.net.calls = x(batch), 0
        torch.manual_seed(3)
        with torch.no_grad():
            result = module(given)
        results.append((result, given, torch.get_rng_state(), pair.net.calls))
    (wanted, theirs, state, calls), (found, ours, same_state, _) = results
    assert torch.allclose(found, wanted, atol=1e-5) and torch.equal(ours, theirs) and torch.equal(state, same_state)
    assert calls == 1


class Remembers(Net):
    """A network that goes on from what its last call left in `kind` of place."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.list, self.dict, self.once = kind, [], {}, torch.ones(8)
        self.register_buffer("buffer", torch.zeros(1, 1, 8))

    def forward(self, h: T, *more: Any, **named: Any) -> T:
        last, self.buffer = self.buffer, h[:1, :1] * 2
        self.list.append(h[0, 0])
        kept = self.dict.get("first", h[0, 0] * 0).sum()
        once, self.once = self.once, None
        given = {"a buffer": last, "a list": torch.stack(self.list).sum(0), "a dict": kept}
        given["what is used once"] = h[0, 0] * 0 if once is None else once
        found = super().forward(h + given[self.kind], *more, **named)
        self.dict.setdefault("first", found[0, 0])
        return found


@pytest.mark.parametrize("kind", ["a buffer", "a list", "a dict", "what is used once"])
def test_planning_leaves_a_network_s_memory_as_it_was(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        pair = Pair(Remembers(kind), tmp_path / str(compiled))
        with torch.no_grad():
            results.append([(pair.compiled if compiled else pair.net)(x(1) * step) for step in (1, 2, 3)])
    for wanted, found in zip(*results, strict=True):
        assert torch.allclose(found, wanted, atol=1e-5)


class Chunks(Part):
    """A block that keeps the last rows that it was given for its next call."""

    last: Any = None

    def forward(self, h: T, *more: Any, **named: Any) -> T:
        before, self.last = self.last, h.clone()
        return super().forward(h) if before is None else super().forward(h) + before


def test_a_block_with_a_memory_gives_eagers_results_call_by_call(tmp_path: Path) -> None:
    pair = Pair(Net(part=Chunks), tmp_path)
    results: list[list[T]] = []
    for module in (pair.net, pair.compiled):
        for block in pair.net.blocks:
            block.last = None
        with torch.no_grad():
            results.append([module(x(2) * step) for step in (1, 2, 3)])
    assert not torch.allclose(results[0][1], pair.net.head(results[0][0].new_zeros(8)))
    for wanted, found in zip(*results, strict=True):
        assert torch.allclose(found, wanted, atol=1e-5)
    assert "keeps a tensor that it made of its inputs" in pair.reasons()


class Rows(Net):
    """A network whose batch shows in another way: `kind` says how. Before it comes a time for each row."""

    def forward(self, time: T, h: Any, kind: str, more: Any) -> T:  # type: ignore[override]
        if kind == "a list":
            h, more = torch.stack(h), torch.stack(more)
        elif kind == "a mask for all rows":
            if more.shape[0] != 1:
                raise RuntimeError("it takes one mask")
            more = more.repeat(h.shape[0], 1, 1)
        elif kind == "frames":
            more = more.view(h.shape[0], 3, 6, 8).sum(1)
        else:
            more = torch.stack([torch.full((6, 8), float(row[0])) for row in more])
            if len(more) != len(h):
                raise RuntimeError("it takes one number for each row")
        return super().forward(h, more + time[:, None, None])


@pytest.mark.parametrize("kind", ["a list", "a mask for all rows", "frames", "numbers"])
def test_whatever_shows_the_batch_a_first_call_of_one_serves_more(tmp_path: Path, kind: str) -> None:
    pair = Pair(Rows(), tmp_path)

    def given(batch: int) -> tuple[Any, str, Any]:
        rows = torch.randn(batch, 6, 8)
        more = {
            "a list": list(torch.randn(batch, 6, 8)),
            "a mask for all rows": torch.randn(1, 6, 8),
            "frames": torch.randn(3 * batch, 6, 8),
            "numbers": [[i + 0.5] for i in range(batch)],
        }
        return torch.rand(batch), (list(rows) if kind == "a list" else rows), kind, more[kind]

    assert pair.agrees(*given(1))["artefacts_compiled"]
    for batch in (3, 1, 2):
        new = pair.agrees(*given(batch))
        assert not new["artefacts"] and not new["eager"]
    assert not pair.report.as_dict()["notes"]


# ---- eager, with a reason -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (torch.sin, "builtin_function_or_method"),
        (nn.Linear(2, 2), "Linear"),
        (torch.Generator(), "Generator"),
        (torch.ones(2).to_sparse(), "sparse"),
    ],
    ids=["a function", "a module", "a generator", "a sparse tensor"],
)
def test_an_argument_that_is_no_data_runs_eager(pair: Pair, value: Any, reason: str) -> None:
    wanted = pair.net(x(), named=value)
    with torch.no_grad():
        assert torch.allclose(pair.compiled(x(), named=value), wanted, atol=1e-5)
    assert reason in pair.reasons()
    assert not pair.agrees(x())["eager"]


def test_code_among_the_options_runs_eager_and_the_rest_does_not(pair: Pair) -> None:
    pair.agrees(x(), options={})
    for patch in (torch.sin, torch.cos):
        new = pair.agrees(x(), options={"patch": patch})
        assert new["artefacts_compiled"] == 0
    assert "options['patch']" in pair.reasons()
    assert {row["region"] for row in pair.report.as_dict()["eager"]} == {"blocks.0", "blocks.1"}
    new = pair.agrees(x(), options={})
    assert not new["artefacts"] and not new["eager"]


def test_a_tensor_among_the_options_is_data(pair: Pair) -> None:
    pair.agrees(x(), options={})
    assert pair.agrees(x(), options={"shift": torch.ones(8)})["artefacts_compiled"] == 1
    assert not pair.agrees(x(), options={"shift": torch.full((8,), 3.0)})["artefacts"]
    assert not pair.agrees(x(), options={})["artefacts"] and not pair.reasons()


def test_options_that_never_stop_changing_end_in_eager(tmp_path: Path) -> None:
    pair = Pair(Net(), tmp_path)
    for number in range(build.MOST_VARIANTS + 3):
        pair.agrees(x(), options={"shift": float(number)})
    assert len(pair.report.as_dict()["artefacts"]) <= build.MOST_VARIANTS + 1
    assert "keeps changing" in pair.reasons()
    assert not pair.agrees(x(), options={"shift": 0.0})["artefacts"], "the first are still in use"
    finding._loaded.clear()
    later = Pair(Net(), tmp_path)
    new = later.agrees(x(), options={"shift": 100.0})
    assert new["artefacts_compiled"] > 0 and not new["eager"], "earlier sessions leave room for others"
    assert later.agrees(x(), options={"shift": 0.0})["artefacts_compiled"] == 0


def test_gradients_and_disabling_run_eager(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    given = x().requires_grad_(True)
    pair.compiled(given).sum().backward()
    assert given.grad is not None and "gradients are on" in pair.reasons()
    calls = pair.report.as_dict()["calls"]
    monkeypatch.setenv("NEXFORT_DISABLE", "1")
    assert not pair.agrees(x())["eager"]
    assert pair.report.as_dict()["calls"] == calls
    monkeypatch.delenv("NEXFORT_DISABLE")
    pair.agrees(x())
    assert pair.report.as_dict()["calls"] == calls + 1


def test_a_block_that_cannot_be_captured_runs_eager_and_is_not_tried_again(tmp_path: Path) -> None:
    class Stubborn(Part):
        tries = 0

        def forward(self, h: T, *more: Any, **named: Any) -> T:
            type(self).tries += 1
            return super().forward(h) if float(h.sum()) > -1e9 else h

    pair = Pair(Net(part=Stubborn), tmp_path)
    new = pair.agrees(x())
    assert {row["region"] for row in new["eager"]} == {"blocks.0", "blocks.1"} and new["artefacts_compiled"] == 1
    Stubborn.tries = 0
    assert not pair.agrees(x())["eager"]
    assert Stubborn.tries == 4, "two in eager, two in the compiled network"


def test_too_little_memory_is_the_host_s_business(pair: Pair) -> None:
    def full(_inputs: Any) -> Any:
        raise torch.OutOfMemoryError("no memory left")

    binding = pair.engine.regions[0].bindings[0]
    code, binding.code = binding.code, full
    with pytest.raises(torch.OutOfMemoryError), torch.no_grad():
        pair.compiled(x())
    binding.code = code
    assert not pair.agrees(x())["eager"] and not pair.reasons()


# ---- a module that changes ------------------------------------------------------------------------------------------

CHANGES: dict[str, Change] = {
    "an attribute": lambda n: setattr(n.blocks[0], "gain", 3.0),
    "a block's submodule": lambda n: setattr(n.blocks[0], "norm", nn.Identity()),
    "a submodule of the same structure": lambda n: setattr(n.blocks[0], "norm", nn.LayerNorm(8, eps=2.0)),
    "a wider layer": lambda n: setattr(n, "head", nn.Linear(8, 6)),
    "a forward hook": lambda n: n.blocks[0].register_forward_hook(lambda m, a, out: out * 2),
    "a pre-hook below": lambda n: n.blocks[1].norm.register_forward_pre_hook(lambda m, a: (a[0] * 2,)),
    "a replaced forward": lambda n: setattr(n.blocks[0], "forward", lambda h, *a, **k: h * 2),
    "a replaced forward below": lambda n: setattr(n.blocks[0].linear, "forward", lambda h: h * 2),
    "a weight": lambda n: setattr(n.blocks[0].linear, "weight", nn.Parameter(torch.eye(8))),
    "a weight that goes": lambda n: setattr(n.head, "bias", None),
    "a weight in another dtype and back": lambda n: (n.head.double(), n.head.float(), n.head.weight.zero_()),
    "a block of the list": lambda n: n.blocks.__setitem__(0, Part(8)),
    "one block more": lambda n: n.blocks.append(Part(8)),
    "training": lambda n: n.train(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_the_module_is_honoured(pair: Pair, change: Change) -> None:
    with torch.no_grad():
        before = pair.net(x())
        change(pair.net)
        pair.net.requires_grad_(False)
        now = pair.net(x())
    assert now.shape != before.shape or not torch.allclose(now, before) or pair.net.training
    pair.agrees(x())
    pair.agrees(x(3, 9))


def test_a_weight_at_the_address_of_one_that_is_gone_is_another(tmp_path: Path) -> None:
    """As a LoRA that reshapes a layer and is taken off leaves them: each time the host makes a parameter anew."""
    net = Net()
    net.head = nn.Linear(8, 4, bias=False)
    pair = Pair(net, tmp_path)
    pair.agrees(x())
    address, others = id(net.head.weight), []
    del net.head._parameters["weight"]
    gc.collect()
    while not others or id(others[-1]) != address:
        assert len(others) < 100_000, "no parameter came to lie there, so that this says nothing"
        others.append(nn.Parameter(torch.randn(6, 8), requires_grad=False))
    net.head._parameters["weight"] = others[-1]
    assert [row["region"] for row in pair.agrees(x())["artefacts"]] == ["head"]


def _linear(factor: float) -> nn.Module:
    layer = nn.Linear(8, 8)
    nn.init.constant_(layer.weight, factor)
    return layer.requires_grad_(False)


EXCHANGED: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "with other weights": ("linear", lambda: _linear(0.5)),
    "with another attribute": ("norm", lambda: nn.LayerNorm(8, eps=2.0).requires_grad_(False)),
    "of another structure": ("linear", lambda: nn.Sequential(_linear(0.5))),
}


@pytest.mark.parametrize(("name", "make"), EXCHANGED.values(), ids=EXCHANGED)
def test_a_submodule_that_is_exchanged_and_put_back(pair: Pair, name: str, make: Callable[[], nn.Module]) -> None:
    """As patches of objects do it: every time the weights are those of the one that is there."""
    block, own = pair.net.blocks[0], getattr(pair.net.blocks[0], name)
    before, others, gone = pair.net(x()), make(), []
    for time in range(3):
        setattr(block, name, others)
        assert not torch.allclose(pair.net(x()), before)
        new = pair.agrees(x())
        assert not new["eager"] and (not new["artefacts"] or not time)
        setattr(block, name, own)
        assert not pair.agrees(x())["artefacts"]
        gone.append(weakref.ref(others))
        others = make()
    del others
    gc.collect()
    assert not [one for one in gone if one() is not None], "what was taken out is kept"


def test_hooks_run_eager_with_a_reason_until_they_are_gone(pair: Pair) -> None:
    handle = pair.net.blocks[0].linear.register_forward_hook(lambda m, a, out: out * 2)
    assert [row["region"] for row in pair.agrees(x())["eager"]] == ["blocks.0"]
    assert "forward hook" in pair.reasons()
    handle.remove()
    new = pair.agrees(x())
    assert not new["eager"] and not new["artefacts"]


@pytest.mark.parametrize("path", ["blocks.0", "blocks.0.linear"])
def test_a_replaced_forward_runs_eager_with_a_reason_until_it_is_put_back(pair: Pair, path: str) -> None:
    module = pair.net.get_submodule(path)
    original = module.forward
    module.forward = lambda *a, **k: original(*a, **k) * 2  # type: ignore[method-assign]
    assert [row["region"] for row in pair.agrees(x())["eager"]] == ["blocks.0"]
    assert "replaced forward" in pair.reasons()
    module.forward = original  # type: ignore[method-assign]
    new = pair.agrees(x())
    assert not new["eager"] and not new["artefacts"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair.report, "eager", None)  # it keeps a reason once, so that since() would not show it
        pair.agrees(x())


def test_the_original_and_the_compiled_one_are_one_module(pair: Pair) -> None:
    compiled = pair.compiled
    assert isinstance(compiled, Net) and compiled.state_dict().keys() == pair.net.state_dict().keys()
    assert compiled.head is pair.net.head and compiled.uncompiled() is pair.net
    compiled.blocks[0].gain = 2.0
    assert pair.net.blocks[0].gain == 2.0
    compiled.load_state_dict({key: torch.ones_like(value) for key, value in pair.net.state_dict().items()})
    assert float(pair.net.head.weight.sum()) == 32.0
    pair.agrees(x())


def test_copies_are_networks_of_their_own(pair: Pair) -> None:
    for other in (copy.deepcopy(pair.compiled), pickle.loads(pickle.dumps(pair.compiled))):
        assert isinstance(other, Net) and other.uncompiled() is not pair.net
        other.head.weight.data.zero_()
        other.head.bias.data.zero_()
        with torch.no_grad():
            assert not other(x()).any()
        pair.agrees(x())


# ---- errors and threads ---------------------------------------------------------------------------------------------


def test_an_error_between_regions_leaves_the_module_plain(pair: Pair) -> None:
    pair.net.fails = True
    with pytest.raises(ValueError, match="between two regions"), torch.no_grad():
        pair.compiled(x())
    assert not forward_shim._installed and not any("forward" in vars(sub) for sub in pair.net.modules())
    pair.net.fails = False
    new = pair.agrees(x())
    assert not new["artefacts"] and not new["eager"]


def test_a_network_inside_a_network_keeps_to_its_own_engine(tmp_path: Path) -> None:
    inner = Pair(Net(), tmp_path / "inner")

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Part(8), Part(8)])

        def forward(self, h: T) -> T:
            given = h
            for block in self.blocks:
                h = block(h)
            return inner.compiled(given).sum(-1, keepdim=True) + h

    outer = Pair(Outer(), tmp_path / "outer")
    outer.agrees(x())
    assert outer.report.as_dict()["artefacts_compiled"] == 1
    assert inner.report.as_dict()["artefacts_compiled"] == 2
    assert not outer.reasons() and not inner.reasons()


def test_two_engines_share_a_module(pair: Pair, tmp_path: Path) -> None:
    other = Pair(pair.net, tmp_path / "other", {"mode": "jit:disable-runtime-fusion"})
    other.agrees(x())
    pair.agrees(x())
    assert not forward_shim._installed
    assert other.report.as_dict()["artefacts_compiled"] == pair.report.as_dict()["artefacts_compiled"] == 2


def test_threads_that_start_together_make_each_artefact_once(tmp_path: Path) -> None:
    pair = Pair(Net(), tmp_path)
    with torch.no_grad():
        wanted = pair.net(x())
    problems: list[Any] = []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait(30)
        try:
            with torch.no_grad():
                if not torch.allclose(pair.compiled(x()), wanted, atol=1e-5):
                    problems.append("another result")
        except Exception as error:  # shown by the assertion below
            problems.append(error)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    data = pair.report.as_dict()
    assert not problems and not data["eager"]
    assert data["artefacts_compiled"] == 2 and data["calls"] == 4
    assert not forward_shim._installed


def test_a_step_beside_an_export_in_another_thread_runs_compiled(tmp_path: Path) -> None:
    """Torch says for the whole process that something is exported; in the thread that does it the block is plain."""
    pair, inside, seen = Pair(Net(), tmp_path), threading.Event(), threading.Event()
    pair.agrees(x())
    before = pair.report.as_dict()["calls"]

    class Waits(nn.Module):
        def forward(self, h: T) -> T:
            found = pair.compiled(h)
            inside.set()
            assert seen.wait(60)
            return found

    def export() -> None:
        with torch.no_grad():
            torch.export.export(Waits(), (x(),), strict=False)

    beside = threading.Thread(target=export)
    beside.start()
    assert inside.wait(60)
    traced = pair.report.as_dict()["eager"]
    assert [row["reason"] for row in traced] == ["it is being traced by torch.compile or torch.export"]
    pair.agrees(x(3))
    seen.set()
    beside.join(60)
    data = pair.report.as_dict()
    assert data["eager"] == traced and data["calls"] == before + 1


def test_an_engine_starts_from_what_another_one_stored(pair: Pair) -> None:
    again = Pair(pair.net, pair.engine.store.root)
    new = again.agrees(x(3, 9))
    assert new["artefacts_compiled"] == 0 and new["artefacts_loaded"] == 2
    assert again.agrees(x(), 2.5)["artefacts_compiled"] == 1


# ---- bad input ------------------------------------------------------------------------------------------------------


def test_what_is_no_module_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"got a function, expected a torch\.nn\.Module"):
        nexfort_engine.compile(lambda h: h)


def test_a_module_without_weights_runs_as_it_is(tmp_path: Path) -> None:
    pair = Pair(nn.Sequential(nn.GELU(), nn.Identity()), tmp_path)
    pair.agrees(x())
    assert "holds no weights" in pair.report.as_dict()["notes"][0]


def test_weights_that_are_not_loaded_are_left_to_torch(tmp_path: Path) -> None:
    pair = Pair(Net(), tmp_path)
    pair.net.to("meta")
    with torch.no_grad():
        assert pair.compiled(x().to("meta")).device.type == "meta"
    assert "meta" in pair.reasons() or "not loaded" in pair.reasons()
