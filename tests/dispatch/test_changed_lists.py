# SPDX-License-Identifier: Apache-2.0
"""Blocks that keep something for their next call in a list of their caller's: chunk after chunk, as eager leaves it.

Captured graphs run as they are here (subjects.py), which leaves out Inductor and nothing else.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import net_pairs  # noqa: E402
from net_pairs import Pair  # noqa: E402
from probe import same, shared  # noqa: E402
from torch import nn  # noqa: E402

from nexfort_engine.dispatch.region import Region  # noqa: E402
from nexfort_engine.guards.option_recorder import ReadSet, Recording  # noqa: E402

T = torch.Tensor
unlowered = net_pairs.unlowered  # a fixture


class Causal(nn.Module):
    """A block that goes on from the last frames of the chunk before, and leaves its own in the list."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3)
        self.fails = False

    def forward(self, h: T, kept: list[Any], place: list[int]) -> T:
        at = place[0]
        before = kept[at]
        kept[at] = None
        last = h[:, :, -2:]
        missing = 2 if before is None else max(0, 2 - before.shape[2])
        zeros = h.new_zeros(h.shape[0], h.shape[1], missing)
        if self.fails:
            raise ValueError("in the middle of a block")
        found = h + self.conv(torch.cat([zeros, h] if before is None else [zeros, before, h], 2))
        kept[at] = last
        place[0] += 1
        return found


class Doubles(nn.Module):
    """A block whose first call only leaves a word, as the upsampling of frames does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 1)

    def forward(self, h: T, kept: list[Any], place: list[int]) -> T:
        at = place[0]
        h = self.conv(h)
        if kept[at] is None:
            kept[at] = "Rep"
        elif kept[at] == "Rep":
            kept[at] = h[:, :, -1:]
            h = h.repeat_interleave(2, 2)
        else:
            h = (h + kept[at]).repeat_interleave(2, 2)
            kept[at] = h[:, :, -1:]
        place[0] += 1
        return h


class Mixes(nn.Module):
    """A block that is given the list and has no use for it, as attention within frames has none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, h: T, kept: list[Any] | None = None, place: list[int] | None = None) -> T:
        return h + self.linear(h.transpose(1, 2)).transpose(1, 2)


class Video(nn.Module):
    """Chunks of one frame, then of two, through blocks that keep frames in one list. `seen` is what that held."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Causal(8), Causal(8), Doubles(8), Causal(8), Doubles(8), Causal(8)])
        self.seen: list[list[Any]] = []
        self.stops_at = -1

    def forward(self, x: T) -> T:
        kept: list[Any] = [None] * len(self.blocks)
        self.seen.append(kept)
        found = []
        for chunk in [x[:, :, :1], *(x[:, :, 1:].split(2, 2) if x.shape[2] > 1 else ())]:
            place = [0]
            for number, block in enumerate(self.blocks):
                if number == self.stops_at and len(found) == 1:
                    raise KeyError("between two blocks")
                chunk = block(chunk, kept, place)
            assert place == [sum(not isinstance(block, Mixes) for block in self.blocks)]
            found.append(chunk)
        return torch.cat(found, 2)


def video(frames: int, batch: int = 1, seed: int = 1) -> T:
    return torch.randn(batch, 8, frames, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(Video(), tmp_path)


def agrees(pair: Pair, x: T) -> dict[str, Any]:
    """As Pair.agrees, and what the list holds in the end."""
    new = pair.agrees(x)
    (theirs, *_, ours) = pair.net.seen  # type: ignore[union-attr]
    assert same(ours, theirs) and shared(ours) == shared(theirs)
    pair.net.seen.clear()  # type: ignore[operator,union-attr]
    return new


def test_a_video_of_several_chunks_is_compiled_and_leaves_what_eager_leaves(pair: Pair) -> None:
    new = agrees(pair, video(7))
    assert new["artefacts_compiled"] and not new["eager"] and not pair.report.as_dict()["notes"]
    for frames, batch in [(9, 1), (11, 2), (7, 3), (5, 1), (3, 2)]:
        new = agrees(pair, video(frames, batch))
        assert not new["artefacts"] and not new["eager"], (frames, batch)


def test_equal_blocks_at_other_places_of_the_list_share_their_artefacts(pair: Pair) -> None:
    agrees(pair, video(7))
    entries = {id(binding.artefact) for region in pair.engine.regions for binding in region.bindings}
    kinds = {region.kind for region in pair.engine.regions}
    assert len(pair.engine.regions) == 6 and kinds == {"Causal", "Doubles"}
    assert len(entries) == pair.report.as_dict()["artefacts_compiled"] <= 2 * 5


def test_what_others_put_into_a_list_is_no_input_of_a_block_without_use_for_it(tmp_path: Path) -> None:
    net = Video()
    net.blocks.insert(1, Mixes(8))
    net.blocks.insert(4, Mixes(8))
    pair = Pair(net, tmp_path)
    agrees(pair, video(7))
    made = {
        binding.artefact.id for region in pair.engine.regions if region.kind == "Mixes" for binding in region.bindings
    }
    assert len(made) <= 2  # of one frame, and of more
    assert not agrees(pair, video(9, 2))["artefacts"]


def test_a_plan_that_fails_lets_go_of_what_the_network_keeps(pair: Pair) -> None:
    pair.net.stops_at = 3  # type: ignore[assignment]
    for module in (pair.net, pair.compiled):
        with torch.no_grad(), pytest.raises(KeyError):
            module(video(5))
    assert not pair.engine.builder.planner._changed


def test_one_frame_at_the_end_gets_forms_of_its_own_and_no_more(pair: Pair) -> None:
    agrees(pair, video(7))
    for frames in (6, 2):  # after a chunk of two frames, and after one frame, with which `max` chooses otherwise
        assert not agrees(pair, video(frames))["eager"]
    for frames in (4, 8, 2, 6, 1):
        new = agrees(pair, video(frames))
        assert not new["artefacts"] and not new["eager"], frames


def test_another_process_finds_them_without_a_capture(pair: Pair, tmp_path: Path) -> None:
    agrees(pair, video(7))
    torch.manual_seed(0)
    again = Pair(Video(), tmp_path)
    new = agrees(again, video(7))
    assert not new["artefacts_compiled"] and not new["eager"] and new["artefacts"]


def test_a_step_that_fails_between_blocks_leaves_what_eager_leaves(pair: Pair) -> None:
    agrees(pair, video(5))
    pair.net.stops_at = 3  # type: ignore[assignment]
    for module in (pair.net, pair.compiled):
        with torch.no_grad(), pytest.raises(KeyError):
            module(video(5))
    theirs, ours = pair.net.seen  # type: ignore[misc]
    assert same(ours, theirs)


def test_a_block_that_fails_in_the_middle_leaves_what_eager_leaves(pair: Pair) -> None:
    agrees(pair, video(5))
    pair.net.blocks[3].fails = True  # type: ignore[index,union-attr]
    for module in (pair.net, pair.compiled):
        with torch.no_grad(), pytest.raises(ValueError, match="in the middle"):
            module(video(5))
    theirs, ours = pair.net.seen  # type: ignore[misc]
    assert same(ours, theirs) and ours[3] is None


@pytest.mark.parametrize("error", [RuntimeError("a kernel failed"), torch.OutOfMemoryError("no memory")])
def test_an_artefact_that_fails_leaves_nothing_half_written(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    agrees(pair, video(5))
    region = pair.engine.regions[3]
    before: list[Any] = []

    def fails(self: Region, binding: Any, weights: Any, flat: Any, *_: Any) -> Any:
        before.append(list(flat.mappings[0]))
        raise error

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(region, "_ran", fails.__get__(region))
        if isinstance(error, torch.OutOfMemoryError):
            with pytest.raises(torch.OutOfMemoryError):
                pair.compiled(video(5))
            (ours,) = pair.net.seen  # type: ignore[misc]
            assert all(a is b for a, b in zip(ours, before[0], strict=True))
            return
        found = pair.compiled(video(5))
        wanted = pair.net(video(5))
    ours, theirs = pair.net.seen  # type: ignore[misc]
    assert torch.allclose(found, wanted, atol=1e-5) and same(ours, theirs)
    assert "a kernel failed" in pair.reasons()


class Strange:
    """A cache of a class that nobody knows, with slots that are not named."""

    __slots__ = ("__held",)

    def __init__(self) -> None:
        self.__held: list[Any] = []

    def put(self, value: T) -> None:
        self.__held.append(value)

    def last(self) -> T | None:
        return self.__held[-1] if self.__held else None


class WithStrange(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, h: T, kept: Any) -> T:
        last = kept.last()
        kept.put(h)
        return self.linear(h if last is None else h + last)


class StrangeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([WithStrange(8) for _ in range(2)])
        self.tail = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)])

    def forward(self, h: T) -> T:
        kept = Strange()
        for block in self.blocks:
            h = block(h, kept)
        for block in self.tail:
            h = block(h)
        return h


def test_a_cache_of_an_unknown_class_runs_eager_with_the_reason(tmp_path: Path) -> None:
    pair = Pair(StrangeNet(), tmp_path)
    for batch in (2, 3):
        pair.agrees(torch.randn(batch, 8))
    found = pair.report.as_dict()
    assert {row["region"] for row in found["eager"]} == {"blocks.0", "blocks.1"} and found["artefacts_compiled"]
    assert "Strange, whose content cannot be listed" in pair.reasons()


class Asks(nn.Module):
    """A block that asks the device for a number, and keeps something."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, h: T, kept: list[Any], place: list[int]) -> T:
        kept[place[0]] = h
        place[0] += 1
        return self.linear(h) * float(h.max())


def test_a_block_that_reads_the_host_runs_eager_with_the_reason(tmp_path: Path) -> None:
    net = Video()
    net.blocks[3] = Asks(5)
    net.blocks[3].linear = nn.Identity()
    net.blocks[3].weight = nn.Parameter(torch.zeros(1))
    pair = Pair(net, tmp_path)
    for _ in range(2):
        agrees(pair, video(7))
    assert {row["region"] for row in pair.report.as_dict()["eager"]} == {"blocks.3"}
    assert "value of a tensor" in pair.reasons()


def test_a_step_that_keeps_things_in_lists_is_no_cuda_graph(pair: Pair) -> None:
    agrees(pair, video(5))
    with pair.engine.active() as session, torch.no_grad():
        pair.net(video(5))
        assert session.trace.unrepeatable == "a block may change a list that it is given"


class OfThread(nn.Module):
    """A block that keeps its last frames on itself, for each thread, and is told when the video ends."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3)
        self.kept: dict[int, tuple[Any, bool]] = {}

    def forward(self, h: T) -> T:
        thread = threading.get_ident()
        before, ends = self.kept.get(thread, (None, False))
        before = h[:, :, :1].repeat(1, 1, 2) if before is None else before
        together = torch.cat([before, h], 2)
        self.kept[thread] = (None, True) if ends else (together[:, :, -2:], False)
        return h + self.conv(together)


class Threads(nn.Module):
    """As Video, with what is kept on the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([OfThread(8) for _ in range(3)])
        self.stops = False

    def forward(self, x: T) -> T:
        found, thread = [], threading.get_ident()
        chunks = x.split(2, 2)
        try:
            for number, chunk in enumerate(chunks):
                for block in self.blocks:
                    if number == len(chunks) - 1:
                        block.kept[thread] = (block.kept.get(thread, (None, False))[0], True)
                    chunk = block(chunk)
                if self.stops and number == 1:
                    raise KeyError("between two chunks")
                found.append(chunk)
        finally:
            self.left = [block.kept.pop(thread, None) for block in self.blocks]
        return torch.cat(found, 2)


def test_blocks_that_keep_frames_on_themselves_are_compiled(tmp_path: Path) -> None:
    pair = Pair(Threads(), tmp_path)
    assert pair.agrees(video(8))["artefacts_compiled"] and not pair.reasons()
    for frames, batch in [(12, 1), (8, 2), (10, 3), (6, 1)]:
        new = pair.agrees(video(frames, batch))
        assert not new["artefacts"] and not new["eager"], frames
    assert pair.net.left == [(None, True)] * 3
    assert all(not block.kept for block in pair.net.blocks)  # type: ignore[union-attr]


def test_another_thread_has_frames_of_its_own_and_the_same_artefacts(tmp_path: Path) -> None:
    pair = Pair(Threads(), tmp_path)
    pair.agrees(video(8))
    new: list[Any] = []
    thread = threading.Thread(target=lambda: new.append(pair.agrees(video(8, seed=2))))
    thread.start()
    thread.join()
    assert not new[0]["artefacts"] and not new[0]["eager"]


def test_another_process_finds_what_keeps_frames_on_blocks(tmp_path: Path) -> None:
    Pair(Threads(), tmp_path).agrees(video(8))
    again = Pair(Threads(), tmp_path)
    new = again.agrees(video(8))
    assert not new["artefacts_compiled"] and not new["eager"]


def test_a_video_that_ends_in_the_middle_leaves_nothing_for_the_next(tmp_path: Path) -> None:
    pair = Pair(Threads(), tmp_path)
    pair.agrees(video(8))
    left = []
    pair.net.stops = True  # type: ignore[assignment]
    for module in (pair.net, pair.compiled):
        with torch.no_grad(), pytest.raises(KeyError):
            module(video(8))
        left.append(pair.net.left)
    assert same(*left) and left[0][0] is not None
    pair.net.stops = False  # type: ignore[assignment]
    assert not pair.agrees(video(8))["eager"]


def test_a_step_with_kept_frames_can_be_verified(tmp_path: Path) -> None:
    for net in (Video(), Threads()):
        pair = Pair(net, tmp_path)
        pair.agrees(video(7))
        pair.compiled.verify_next()
        pair.agrees(video(7))
        (found,) = pair.report.as_dict()["verifications"]
        assert found["distance"] < 1e-5 and found["regions"] and not any(row["over"] for row in found["regions"])
        assert not pair.reasons()


def test_a_step_that_is_observed_asks_nothing_of_a_block_with_options(tmp_path: Path) -> None:
    """There its mapping notes what is read of it, and stands for no mapping that a block may change."""
    pair = Pair(net_pairs.Net(), tmp_path)
    recorded = {"options": Recording({"shift": torch.ones(8)}, (0,), ReadSet({}))}
    region = pair.engine.regions[0]
    with pair.engine.active() as session, torch.no_grad():
        found = region.call(pair.net.blocks[0].forward, (net_pairs.x(),), recorded, session)  # type: ignore[index]
    assert found.shape == net_pairs.x().shape and "is noted" not in pair.reasons()
