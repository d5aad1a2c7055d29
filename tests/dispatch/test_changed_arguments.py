# SPDX-License-Identifier: Apache-2.0
"""What a call changes: arguments, random numbers and a network's memory are left as eager code leaves them.

Captured graphs run as they are here (subjects.py), which leaves out Inductor and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from large_rows import few

torch = pytest.importorskip("torch")
import net_pairs  # noqa: E402
from net_pairs import Net, Pair, Part, x  # noqa: E402
from torch import nn  # noqa: E402

T = torch.Tensor
unlowered = net_pairs.unlowered  # a fixture


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


class InRows(Part):
    """A block that changes the rows of what it is given: a view where that is contiguous, a copy elsewhere."""

    def forward(self, h: T, *more: Any, **named: Any) -> T:
        h.reshape(-1, h.shape[-1]).mul_(2.0)
        h.contiguous().add_(1.0)
        return self.linear(h) + (more[0] if more else 0)


def test_what_is_changed_by_strides_is_changed_as_eager_code_changes_it(tmp_path: Path) -> None:
    pair = Pair(Net(part=InRows), tmp_path)
    pair.agrees(x(), x(seed=2))
    pair.agrees(x(3, 5), x(3, 5, seed=2))
    assert not pair.reasons()
    pair.agrees(torch.randn(2, 8, 6).transpose(1, 2), x(seed=2))
    assert pair.reasons() == "it changes a tensor that is given to it only where that is contiguous"
    pair.agrees(x(3, 5), x(3, 5, seed=2))


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


@pytest.mark.parametrize("kind", few(["a list", "a mask for all rows", "frames", "numbers"], ("a list", "frames")))
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
