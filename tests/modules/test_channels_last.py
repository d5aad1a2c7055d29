# SPDX-License-Identifier: Apache-2.0
"""Images lie with channels innermost in regions and between them; nobody outside sees it, and code that cannot bear it
gets them as eager code leaves them.

Captured graphs run as they are here (subjects.py), which leaves out Inductor and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import images_anywhere
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from images_anywhere import INNERMOST, compiled
from large_rows import few
from pretended_graph import Graph, pretend
from probe import Probe, block_of
from torch import nn
from torch.nn import functional

from nexfort_engine.api import wrap_methods
from nexfort_engine.cache.store import Store
from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.cudagraphs import channels_last_cat
from nexfort_engine.engine import Engine
from nexfort_engine.modules import channels_last
from nexfort_engine.runtime.shared_state import Known

pytestmark = pytest.mark.usefixtures("threads")
_graphs = images_anywhere.graphs  # a fixture
AS_IT_IS = "images lie between blocks as eager code leaves them"


class Residual(nn.Module):
    """A block of images whose own result eager code leaves with channels outermost."""

    def __init__(self, look: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3, padding=1)
        self.look = look

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.conv(functional.silu(self.norm(x)))
        if self.look is not None:
            h = self.look(h)
        return (x + h).contiguous()


class Net(nn.Module):
    """between: what the network's own code does with an image between two blocks."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor] = lambda h: h, **block: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)
        self.blocks = nn.ModuleList([Residual(**block) for _ in range(3)])
        self.between = between
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = skip = self.first(x)
        for block in self.blocks:
            h = block(h)
            self.seen.append(h)
            h = self.between(h)
        return self.last(torch.cat([h, skip], 1))


def merged(h: torch.Tensor) -> torch.Tensor:
    """Looks at the memory of all rows' channels as one list, which only channels that are outermost allow."""
    return h.view(h.shape[0] * h.shape[1], -1).relu().view(h.shape)


def agree(net: Any, ours: Any, sizes: tuple[int, ...] = (2, 3, 8, 12)) -> list[torch.Tensor]:
    """What the blocks gave; and the result is eager's and lies as eager's does."""
    x = torch.randn(sizes)
    wanted = net(x)
    net.seen.clear()
    result = ours(x)
    assert result.stride() == wanted.stride()
    assert torch.allclose(result, wanted, rtol=1e-4, atol=1e-4)
    return list(net.seen)


def test_blocks_hand_on_images_with_channels_innermost_and_the_result_lies_as_eager_s(tmp_path: Path) -> None:
    net = Net()
    ours, engine = compiled(net, tmp_path)
    for sizes in ((2, 3, 8, 12), (1, 3, 6, 6), (3, 3, 5, 7)):
        seen = agree(net, ours, sizes)[-3:]
        assert all(h.is_contiguous(memory_format=INNERMOST) and not h.is_contiguous() for h in seen)
    report = engine.report.as_dict()
    assert not report["eager"] and not report["variants"] and not report["notes"]
    assert all(weight.is_contiguous() for weight in net.parameters()), "the model's own weights are left alone"


def test_a_step_that_is_captured_concatenates_its_skip_as_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    joined, join = [], channels_last_cat._joined

    def noted(*args: Any, **kwargs: Any) -> Any:
        joined.append(join(*args, **kwargs))
        return joined[-1]

    monkeypatch.setattr(channels_last_cat, "_joined", noted)
    net = Net()
    ours, _ = compiled(net, tmp_path)
    for _ in range(4):
        agree(net, ours)
    assert len(Graph.made) == 1 and joined and all(one is not None for one in joined)
    Graph.made.clear()


@pytest.mark.parametrize("options", [{"memory_format": "contiguous_format"}, {"disable": True}])
def test_with_channels_outermost_everything_lies_as_eager_code_leaves_it(options: Any, tmp_path: Path) -> None:
    net = Net(merged)
    ours, engine = compiled(net, tmp_path, options)
    assert all(h.is_contiguous() for h in agree(net, ours))
    assert not engine.report.as_dict()["eager"] and not engine.report.as_dict()["notes"]


def test_code_between_blocks_that_looks_at_memory_gets_it_as_eager_code_leaves_it(tmp_path: Path) -> None:
    """The plan finds out, before anything is compiled; later sizes and another network of the kind work as well."""
    net = Net(merged)
    ours, engine = compiled(net, tmp_path)
    for sizes in ((1, 3, 8, 12), (2, 3, 6, 10)):
        assert all(h.is_contiguous() for h in agree(net, ours, sizes))
    report = engine.report.as_dict()
    assert sum(AS_IT_IS in note for note in report["notes"]) == 1 and not report["eager"] and not report["variants"]
    again, other = compiled(net, tmp_path)
    agree(net, again)
    assert other.report.as_dict()["artefacts_compiled"] == 0 and not other.report.as_dict()["eager"]


def test_code_that_comes_later_and_looks_at_memory_costs_one_step_more_and_no_error(tmp_path: Path) -> None:
    """As a patch of users does that is put between blocks once the model is compiled."""
    net = Net()
    ours, engine = compiled(net, tmp_path)
    agree(net, ours)
    net.between = merged
    agree(net, ours)
    net.between = lambda h: h
    assert all(h.is_contiguous() for h in agree(net, ours)[-3:])
    report = engine.report.as_dict()
    assert sum(AS_IT_IS in note for note in report["notes"]) == 1 and not report["eager"]


def test_a_step_that_changed_what_it_was_given_is_not_run_again(tmp_path: Path) -> None:
    class Changing(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.mul_(2))

    net = Changing()
    ours, engine = compiled(net, tmp_path, {"dynamic": False})  # without a plan, which would find out before
    net.between = merged
    x = torch.randn(2, 3, 8, 12)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="view size"):
            ours(x.clone())
        assert torch.allclose(ours(x.clone()), net(x.clone()), rtol=1e-4, atol=1e-4), "the next one"
    assert sum(AS_IT_IS in note for note in engine.report.as_dict()["notes"]) == 1


def test_an_error_of_other_reasons_is_the_caller_s_and_changes_nothing(tmp_path: Path) -> None:
    def refuse(h: torch.Tensor) -> torch.Tensor:
        raise ValueError("this needs a contiguous range of steps")

    net = Net()
    ours, engine = compiled(net, tmp_path)
    agree(net, ours)
    net.between = refuse
    with pytest.raises(ValueError, match="contiguous range"):
        ours(torch.randn(2, 3, 8, 12))
    net.between = lambda h: h
    mark = engine.report.mark()
    assert all(h.is_contiguous(memory_format=INNERMOST) for h in agree(net, ours)[-3:])
    assert engine.state.images and not any(AS_IT_IS in note for note in engine.report.as_dict()["notes"])
    assert not [row for row in engine.report.since(mark)["artefacts"] if row["source"] == "compiled"]


def asserted(h: torch.Tensor) -> torch.Tensor:
    assert h.is_contiguous()
    return h


def half_of_rows(h: torch.Tensor) -> torch.Tensor:
    h.reshape(h.shape[0], -1)[:, :50].zero_()
    return h


def half_as_large(h: torch.Tensor) -> torch.Tensor:
    h.contiguous().mul_(0.5)
    return h


def without_negatives(h: torch.Tensor) -> torch.Tensor:
    functional.relu(h.flatten(1), inplace=True)
    return h


def half_of_a_part(h: torch.Tensor) -> torch.Tensor:
    h[0].reshape(-1)[:40].zero_()
    return h


def with_noise(h: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    return h + torch.randn_like(h)


@pytest.mark.parametrize(
    "code", few([asserted, half_of_rows, half_as_large, without_negatives, half_of_a_part, with_noise], 3)
)
@pytest.mark.parametrize("within", [True, False], ids=["in blocks", "between blocks"])
def test_code_that_writes_through_a_look_at_an_image_is_noticed_by_the_plan(
    code: Callable[[torch.Tensor], torch.Tensor], within: bool, tmp_path: Path
) -> None:
    """Nothing would fail: the write would go to a copy."""
    net = Net(look=code) if within else Net(code)
    ours, engine = compiled(net, tmp_path)
    agree(net, ours)
    agree(net, ours, (3, 3, 6, 10))
    notes = engine.report.as_dict()["notes"]
    assert sum(AS_IT_IS in note for note in notes) == 1 and not engine.state.images


def test_what_an_engine_found_out_another_of_the_same_kind_knows(tmp_path: Path) -> None:
    known = Known()
    net = Net(merged).eval().requires_grad_(False)
    for found in (True, False):
        engine = Engine(net, CompileConfig.parse(None), Store(tmp_path), known=known)
        assert engine.state.images is found
        agree(net, wrap_methods(net, engine, ("forward",)))


def test_a_plan_that_finds_out_in_the_middle_of_a_step_does_not_fail_it(tmp_path: Path) -> None:
    """What ran before it in that step gave images with channels innermost."""
    first, _ = compiled(Net(), tmp_path)
    first(torch.randn(2, 3, 8, 12))
    skipped: list[torch.Tensor] = []

    class Other(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            skip = self.first(x)
            h = torch.cat([skip, skip], 1)
            for block in self.blocks:
                h = block(h)
            return self.last(torch.cat([h[:, :8], merged(skip)], 1))

    net = Other()
    net.blocks = nn.ModuleList([nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.GELU()) for _ in range(2)])
    ours, engine = compiled(net, tmp_path)
    x = torch.randn(2, 3, 8, 12)
    assert torch.allclose(ours(x), net(x), rtol=1e-4, atol=1e-4) and not skipped
    assert sum(AS_IT_IS in note for note in engine.report.as_dict()["notes"]) == 1


def test_a_network_whose_weights_lie_with_channels_innermost_gives_what_eager_gives(tmp_path: Path) -> None:
    net = Net().to(memory_format=INNERMOST)  # type: ignore[call-overload]
    ours, engine = compiled(net, tmp_path)
    agree(net, ours)
    assert not engine.report.as_dict()["eager"] and not engine.report.as_dict()["notes"]


def test_blocks_that_look_at_memory_get_it_as_eager_code_leaves_it(tmp_path: Path) -> None:
    net = Net(look=merged)
    ours, engine = compiled(net, tmp_path)
    assert all(h.is_contiguous() for h in agree(net, ours))
    report = engine.report.as_dict()
    assert sum(AS_IT_IS in note for note in report["notes"]) == 1 and not report["eager"]


def test_a_block_that_looks_at_memory_is_captured_with_its_weights_as_they_are() -> None:
    """Where what it is given allows the look; what it gives has channels innermost all the same."""

    def looking(b: Any, x: torch.Tensor) -> torch.Tensor:
        return merged(b.conv(x))

    block = block_of(looking, conv=nn.Conv2d(4, 4, 3).requires_grad_(False))
    probe = Probe(block, torch.randn(2, 4, 6, 8), images=True)
    probe.agrees(torch.randn(3, 4, 9, 7))
    results = probe.captured.graph(*probe.weights, torch.randn(2, 4, 6, 8))
    assert results[0].is_contiguous(memory_format=INNERMOST)


def test_a_block_that_runs_eager_is_eager_and_the_next_one_takes_what_it_gives(tmp_path: Path) -> None:
    net = Net()
    net.blocks[1].look = lambda h: h * float(h.mean())  # a number of a tensor, which no graph holds
    ours, engine = compiled(net, tmp_path)
    assert [h.is_contiguous() for h in agree(net, ours)[-3:]] == [False, True, False]
    report = engine.report.as_dict()
    assert [row["region"] for row in report["eager"]] == ["blocks.1"] and not report["variants"]


def test_a_network_that_is_one_region_gives_what_eager_gives(tmp_path: Path) -> None:
    net = Net().blocks[0]
    net.seen = []
    ours, engine = compiled(net, tmp_path)
    agree(net, ours, (2, 8, 6, 10))
    assert not engine.report.as_dict()["eager"]


# ---- what is laid out ----------------------------------------------------------------------------------------


def test_what_shares_memory_with_an_argument_is_handed_on_as_it_is() -> None:
    x = torch.randn(2, 4, 6, 8)
    results = [x, x[:, :2], x.relu(), [x.view(8, 6, 8), x.double().long()]]
    laid = channels_last.to_channels_last(results, [x])
    assert laid[0] is x and laid[1].data_ptr() == x.data_ptr() and laid[3][1] is results[3][1]
    assert laid[2].is_contiguous(memory_format=INNERMOST) and torch.equal(laid[2], x.relu())
    twice = x.relu()
    both = channels_last.to_channels_last((twice, twice), [x])
    assert both[0] is both[1]
    assert channels_last.to_channels_last(results[:2], [x]) == results[:2]


def test_results_that_share_memory_share_it_still() -> None:
    h = torch.randn(2, 4, 6, 8)
    assert channels_last.to_channels_last((h, h.flatten(2)), [])[0] is h
    assert channels_last.to_channels_last((h,), [h.flatten(2)])[0] is h, "somebody else has it"
    wide = torch.randn(1, 1, 6, 8).expand(2, 4, 6, 8)
    nested = torch.nested.as_nested_tensor([torch.randn(1, 4, 4), torch.randn(1, 2, 4)])
    assert channels_last.to_channels_last([wide, nested], []) == [wide, nested]
    assert channels_last.to_contiguous([nested])[0] is nested


@pytest.mark.parametrize("way", ["a result", "read as it lies"])
def test_a_convolution_s_weight_that_other_code_sees_is_seen_as_it_lies(way: str) -> None:
    def looking(b: Any, x: torch.Tensor) -> Any:
        if way == "a result":
            return b.conv(x), b.conv.weight
        return b.conv(x) * b.conv.weight.as_strided((4,), (1,)).sum()

    block = block_of(looking, conv=nn.Conv2d(4, 4, 3).requires_grad_(False))
    probe = Probe(block, torch.randn(2, 4, 6, 8), images=True)
    probe.agrees(torch.randn(3, 4, 9, 7))


def test_a_block_that_gives_its_argument_back_gives_the_very_tensor() -> None:
    def changed(b: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x.add_(b.conv.weight[0, 0, 0, 0])
        return x, b.conv(x), b.conv(x)[:, :1]

    block = block_of(changed, conv=nn.Conv2d(4, 4, 3).requires_grad_(False))
    probe = Probe(block, torch.randn(2, 4, 6, 8), images=True)
    probe.agrees(torch.randn(3, 4, 9, 7))


@settings(max_examples=30, deadline=None)
@given(sizes=st.tuples(*[st.integers(1, 4)] * 4), last=st.booleans(), floating=st.booleans())
def test_laying_out_and_back_keeps_every_number(sizes: tuple[int, ...], last: bool, floating: bool) -> None:
    x = torch.randn(sizes) if floating else torch.randint(9, sizes)
    x = x.to(memory_format=INNERMOST) if last else x
    laid = channels_last.to_channels_last({"a": [x]}, [])["a"][0]
    assert torch.equal(laid, x) and (not floating or laid.is_contiguous(memory_format=INNERMOST))
    back = channels_last.to_contiguous((laid, 3))[0]
    assert torch.equal(back, x) and (back.is_contiguous() or not floating)
    whole = channels_last.to_contiguous(value := {"a": [torch.randn(2, 3), 1]})
    assert whole is value


def test_which_modules_compute_with_images_is_told_by_their_layers() -> None:
    assert channels_last.holds_images(Residual()) and channels_last.holds_images(nn.Sequential(nn.GroupNorm(1, 4)))
    assert not channels_last.holds_images(nn.TransformerEncoderLayer(8, 2))
    assert not channels_last.holds_images(nn.Conv1d(4, 4, 3))


def test_where_nobody_measured_it_everything_lies_as_eager_code_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels_last, "MEASURED", ("cuda",))
    net = Net(half_as_large)
    ours, engine = compiled(net, tmp_path)
    assert all(h.is_contiguous() for h in agree(net, ours))
    assert not engine.report.as_dict()["eager"] and not engine.report.as_dict()["notes"]
