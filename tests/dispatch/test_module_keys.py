# SPDX-License-Identifier: Apache-2.0
"""Blocks that keep things in a mapping by modules of theirs: compiled, and the mapping is as eager leaves it.

Captured graphs run as they are here (subjects.py), but for what another process finds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import module_keyed  # noqa: E402
import net_pairs  # noqa: E402
from module_keyed import Block, Causal, Kept, Video, video  # noqa: E402
from net_pairs import Pair  # noqa: E402
from probe import same, shared  # noqa: E402
from torch import nn  # noqa: E402

from nexfort_engine.dispatch.region import Region  # noqa: E402
from nexfort_engine.modules.module_keys import Named, OfTree, places  # noqa: E402

T = torch.Tensor
ROOT = Path(__file__).parents[2]
unlowered = net_pairs.unlowered  # a fixture


def agrees(pair: Pair, x: T) -> dict[str, Any]:
    """As Pair.agrees, and what the mapping holds in the end, in order."""
    new = pair.agrees(x)
    (theirs, *_, ours) = pair.net.seen  # type: ignore[union-attr]
    assert list(ours) == list(theirs) and same(ours, theirs) and shared(ours) == shared(theirs)
    pair.net.seen.clear()  # type: ignore[operator,union-attr]
    return new


def served(pair: Pair) -> None:
    """One call makes artefacts, and later ones of other sizes need none."""
    assert agrees(pair, video(8))["artefacts_compiled"] and not pair.reasons()
    for frames, batch in [(2, 1), (6, 2), (12, 3), (4, 1)]:
        new = agrees(pair, video(frames, batch))
        assert not new["artefacts"] and not new["eager"], (frames, batch)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(Video(), tmp_path)


def test_a_mapping_by_modules_is_left_as_eager_leaves_it(pair: Pair) -> None:
    served(pair)
    artefacts = {id(binding.artefact) for region in pair.engine.regions for binding in region.bindings}
    assert len(pair.engine.regions) == 3 and len(artefacts) == 2  # the first chunk's and the others', for all blocks


@pytest.mark.large  # contracts.py has a second process for other blocks
def test_another_process_finds_the_artefacts_by_their_names(tmp_path: Path) -> None:
    runs = []
    for _ in range(2):
        command = [sys.executable, module_keyed.__file__, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=ROOT, env=_env())
        assert done.returncode == 0, done.stderr[-2000:]
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    first, second = runs
    assert first["compiled"] == 2 and first["exports"] and not first["eager"]
    assert not second["compiled"] and not second["exports"] and not second["lowerings"] and not second["eager"]
    assert first["result"] == second["result"]


def _env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])}


def test_a_block_that_fails_in_the_middle_leaves_what_eager_leaves(pair: Pair) -> None:
    agrees(pair, video(8))
    pair.net.blocks[1].fails = True  # type: ignore[index,union-attr]
    for module in (pair.net, pair.compiled):
        with torch.no_grad(), pytest.raises(ValueError, match="in the middle"):
            module(video(8))
    theirs, ours = pair.net.seen  # type: ignore[misc]
    assert list(ours) == list(theirs) and same(ours, theirs) and len(ours) == 3


@pytest.mark.parametrize("error", [RuntimeError("a kernel failed"), torch.OutOfMemoryError("no memory")])
def test_an_artefact_that_fails_leaves_nothing_half_written(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    agrees(pair, video(8))
    region = pair.engine.regions[1]
    before: list[Any] = []

    def fails(self: Region, binding: Any, weights: Any, flat: Any, *_: Any) -> Any:
        before.append(list(flat.mappings[0].items()))
        raise error

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(region, "_ran", fails.__get__(region))
        if isinstance(error, torch.OutOfMemoryError):
            with pytest.raises(torch.OutOfMemoryError):
                pair.compiled(video(8))
            (ours,) = pair.net.seen  # type: ignore[misc]
            assert list(map(id, chain(*ours.items()))) == list(map(id, chain(*before[0])))
            return
        found, wanted = pair.compiled(video(8)), pair.net(video(8))
    ours, theirs = pair.net.seen  # type: ignore[misc]
    assert torch.allclose(found, wanted, atol=1e-5) and same(ours, theirs)
    assert "a kernel failed" in pair.reasons()


class ByParts(Block):
    """Keys of a module and a word, in a mapping in the mapping."""

    def forward(self, h: T, kept: Kept) -> T:
        own = kept.setdefault(self, {})
        before = own.get((self.first, "frames"))
        own[self.first, "frames"] = h
        return h + self.second(h if before is None else h + before.mean(), kept)


class Holds(nn.Module):
    """A block that has the mapping itself, and numbers by its modules."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(width, width, 1), nn.Conv1d(width, width, 1)
        self.own: Kept = {}
        self.gains = {self.second: 2.0}

    def forward(self, h: T, kept: Kept) -> T:
        before = self.own.get(self.first)
        self.own[self.first] = h
        h = self.first(h if before is None else h + before.mean())
        return self.second(h) * self.gains.get(self.second, 1.0) * self.gains.get(self.first, 1.0)


def test_modules_may_be_a_part_of_a_key_and_mappings_lie_in_mappings(tmp_path: Path) -> None:
    served(Pair(Video(ByParts), tmp_path))


def test_a_mapping_of_the_block_s_own_counts_by_what_is_read_of_it(tmp_path: Path) -> None:
    pair = Pair(Video(Holds), tmp_path)
    blocks: Any = pair.net.blocks

    def both() -> dict[str, Any]:
        mark = pair.report.mark()
        found = []
        for module in (pair.net, pair.compiled):
            for block in blocks:
                block.own.clear()
            with torch.no_grad():
                found.append((module(video(8)), [dict(block.own) for block in blocks]))
        (wanted, theirs), (got, ours) = found
        assert torch.allclose(got, wanted, rtol=1e-4, atol=1e-5)
        assert all(list(a) == list(b) and same(a, b) for a, b in zip(ours, theirs, strict=True))
        return pair.report.since(mark)

    assert both()["artefacts_compiled"] and not pair.reasons()
    assert not both()["artefacts"]
    blocks[0].gains[blocks[0].second] = 3.0
    assert not both()["eager"]
    blocks[1].gains = {blocks[1].first: 2.0}  # another module of the same class
    assert not both()["eager"]
    assert not both()["artefacts"]


class Equal(Causal):
    """A module that says itself what it is equal to."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Causal)

    def __hash__(self) -> int:
        return 1


def _with(**parts: Callable[[Any], Any]) -> Callable[[int], nn.Module]:
    def made(width: int) -> nn.Module:
        block = Block(width)
        for name, part in parts.items():
            setattr(block, name, part(block))
        return block

    return made


class OfAnother(Block):
    """A block that keeps things by a module that is not its own."""

    others = (nn.Linear(1, 1),)

    def forward(self, h: T, kept: Kept) -> T:
        kept[self.others[0]] = h
        return super().forward(h, kept)


class Walks(Block):
    """A block that looks at all that others keep."""

    def forward(self, h: T, kept: Kept) -> T:
        for before in list(kept.values()):
            h = h + before.mean()
        return super().forward(h, kept)


BAD = {
    "of another tree": (OfAnother, "a Linear as a key that is none of its own modules"),
    "at two places": (_with(second=lambda block: block.first), "a Causal as a key that is one of its modules at two"),
    "with an equality": (_with(second=lambda _: Equal(8)), "a Equal as a key, which says itself what it is equal to"),
    "walked over": (Walks, "whose keys are modules"),
}


@pytest.mark.parametrize("name", BAD)
def test_other_keys_run_eager_with_the_reason_and_the_rest_compiled(name: str, tmp_path: Path) -> None:
    kind, reason = BAD[name]
    net = Video()
    net.blocks[1] = kind(8)
    pair = Pair(net, tmp_path)
    for frames in (8, 6, 8):
        agrees(pair, video(frames))
    told = pair.report.as_dict()
    assert {row["region"] for row in told["eager"]} == {"blocks.1"} and told["artefacts_compiled"]
    assert reason in pair.reasons()


def test_a_step_with_such_a_mapping_is_no_cuda_graph(pair: Pair) -> None:
    agrees(pair, video(8))
    with pair.engine.active() as session, torch.no_grad():
        pair.net(video(8))
        assert session.trace.unrepeatable == "a block may change a list that it is given"


def test_modules_are_named_by_where_they_are_once() -> None:
    block = Block(8)
    assert sorted(places(block).values()) == ["", "first", "second"]
    inner = nn.Sequential(nn.ReLU(), nn.ReLU())
    tree = nn.Sequential(inner, nn.Sequential(inner, nn.Tanh()))
    assert sorted(places(tree).values()) == ["", "1", "1.1"]
    tree[1].add_module("back", tree)
    assert not places(tree)
    other = nn.Linear(1, 1)
    mapping = {block.first: 1, other: {(block, 0): 2}, "text": 3}
    assert Named(block).within(mapping) == {OfTree("first"): 1, other: {(OfTree(""), 0): 2}, "text": 3}
    assert Named(None).within(mapping) is mapping and Named(block).within(given := {"text": {}}) is given
