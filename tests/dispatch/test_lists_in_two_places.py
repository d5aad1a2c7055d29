# SPDX-License-Identifier: Apache-2.0
"""Blocks that keep things in lists in ways that compiled code cannot follow give eager's numbers, call after call.

Captured graphs run as they are here (subjects.py), which leaves out Inductor and nothing else.
"""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
from large_rows import few

torch = pytest.importorskip("torch")
import net_pairs  # noqa: E402
from net_pairs import Net, Pair  # noqa: E402
from torch import nn  # noqa: E402

T = torch.Tensor
unlowered = net_pairs.unlowered  # a fixture
WIDTH = 8


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(WIDTH, WIDTH)
        self.set_up()

    def set_up(self) -> None:
        """What it keeps at first."""


class First(Keeps):
    def forward(self, h: T) -> T:
        before, self.kept[0] = self.kept[0], h[:1]
        return self.l(h) if before is None else self.l(h) + before


class Shared(nn.Module):
    """Two layers that keep in one list: the second reads what the first has put there."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = First(), First()
        self.a.kept = self.b.kept = [None]

    def forward(self, h: T) -> T:
        return self.b(self.a(h))


class Twice(Keeps):
    def set_up(self) -> None:
        self.kept = [[None]] * 2

    def forward(self, h: T) -> T:
        self.kept[0][0] = h[:1]
        return self.l(h) + self.kept[1][0]


class Nested(Keeps):
    def set_up(self) -> None:
        self.kept = {"k": [None]}

    def forward(self, h: T) -> T:
        before, self.kept["k"][0] = self.kept["k"][0], h[:1]
        return self.l(h) if before is None else self.l(h) + before


class Counts(Keeps):
    def set_up(self) -> None:
        self.at, self.kept = [0], [None]

    def forward(self, h: T) -> T:
        self.at[0] += 1
        self.kept[0] = h[:1]
        return self.l(h) * self.at[0]


class ByThread(Keeps):
    def set_up(self) -> None:
        self.kept = {}

    def forward(self, h: T) -> T:
        mine = threading.current_thread().ident
        before, self.kept[mine] = self.kept.get(mine), h[:1]
        return self.l(h) if before is None else self.l(h) + before


class Queue(Keeps):
    def set_up(self) -> None:
        self.kept = []

    def forward(self, h: T) -> T:
        self.kept.append(h[:1])
        return self.l(h) + (self.kept.pop(0) if len(self.kept) > 2 else self.kept[0])


class OnlyPuts(Keeps):
    def set_up(self) -> None:
        self.kept = {"b": None, "a": None}

    def forward(self, h: T) -> T:
        self.kept["a"] = h[:1]
        return self.l(h)


class AsksTypes(Keeps):
    def set_up(self) -> None:
        self.kept = [0, None]

    def forward(self, h: T) -> T:
        at = self.kept[0]
        self.kept[0], self.kept[1] = at + 1, h[:1]
        return self.l(h) * (2 if type(at) is int else 3)


KINDS = (AsksTypes, Shared, Twice, Nested, Counts, ByThread, Queue, OnlyPuts)


def net_of(kind: type[nn.Module]) -> Net:
    return Net(WIDTH, lambda _: kind())


def kept_by(net: nn.Module) -> tuple[str, list[T]]:
    """What modules keep: its form, and the tensors in it."""
    tensors: list[T] = []

    def form(value: Any) -> Any:
        if isinstance(value, dict):
            return [(key, form(part)) for key, part in value.items()]
        if isinstance(value, list):
            return list(map(form, value))
        if isinstance(value, T):
            tensors.append(value)
            return list(value.shape)
        return value

    found = [form(getattr(sub, name)) for sub in net.modules() for name in ("kept", "at") if hasattr(sub, name)]
    return str(found), tensors


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verified", few([None, 2], [2]))
def test_each_call_gives_eager_s_numbers_and_leaves_what_eager_leaves(
    kind: type[nn.Module], verified: int | None, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    pair = Pair(net_of(kind).eval().requires_grad_(False), tmp_path)
    eager = copy.deepcopy(pair.net)
    for step in range(5):
        h = torch.randn(3 + step % 2, WIDTH)
        if step == verified:
            pair.engine.verify_next()
        with torch.no_grad():
            wanted, found = eager(h), pair.compiled(h)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        (form, ours), (wanted_form, theirs) = kept_by(pair.compiled), kept_by(eager)
        assert form == wanted_form
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
