# SPDX-License-Identifier: Apache-2.0
"""A block that lets a function of others attend in its place, beside its compiled self. No test lives here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import nexfort_engine

T = torch.Tensor
TOLERANCE = 1e-5
NAME = "options['attend']"


def attention(query: T, key: T, value: T, heads: int, mask: T | None = None, **_: Any) -> T:
    """The block's own: (B, L, H * E) in, the same out."""
    query, key, value = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (query, key, value))
    found = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)
    return found.transpose(1, 2).flatten(2)


class Block(nn.Module):
    """Attention over its own tokens and those of a prompt, which the options may have others compute."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.both, self.out = nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(16, 16)

    def forward(self, x: T, prompt: T, options: dict[str, Any]) -> T:
        extra = {key: value for key, value in options.items() if key != "attend"}
        extra["heads"] = 2
        copied = options.copy()
        copied["last"] = x.shape[1]
        copied.pop("first", None)
        key, value = self.both(torch.cat([x, prompt], 1)).chunk(2, -1)
        query = self.query(x)
        if "attend" in options:
            attended = options["attend"](
                attention, query, key, value, 2, mask=None, options=options, extra=extra, copied=copied
            )
        else:
            attended = attention(query, key, value, 2)
        return x + self.out(attended) * torch.sigmoid(query)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, x: T, prompt: T, options: dict[str, Any]) -> T:
        for number, block in enumerate(self.blocks):
            options["block_index"] = number
            x = block(x, prompt, options)
        return x


Way = Callable[..., Any]


class Pair:
    """A network and its compiled self."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.net = Net().eval().requires_grad_(False)
        self.compiled = nexfort_engine.compile(self.net)
        self.call()  # plain, so that what follows is of the function alone

    def call(self, way: Way | None = None, module: Any = None, *, length: int = 6, **more: Any) -> T:
        generator = torch.Generator().manual_seed(length)
        x, prompt = (torch.randn(2, n, 16, generator=generator) for n in (length, 4))
        options = {"sigmas": torch.tensor([0.5]), "uuids": [object()], **more}
        if way is not None:
            options["attend"] = way
        with torch.inference_mode():
            return (module or self.compiled)(x, prompt, options)

    def agrees(self, way: Way | None, **call: Any) -> dict[str, Any]:
        """What the report gained by a call that gives what eager gives, and not what it gives without the function."""
        wanted, mark = self.call(way, self.net, **call), self.compiled.report.mark()
        assert float((wanted - self.call(None, self.net, **call)).norm()) > 100 * TOLERANCE or way is None
        torch.testing.assert_close(self.call(way, **call), wanted, rtol=TOLERANCE, atol=TOLERANCE)
        return self.compiled.report.since(mark)

    def stays_eager(self, way: Way, reason: str, **call: Any) -> None:
        """Every block runs eager with this function for this reason, and compiled with others."""
        for _ in range(2):
            self.agrees(way, **call)
        told = {row["reason"] for row in self.compiled.report.as_dict()["eager"]}
        assert any(f"{NAME} {reason}" in text for text in told), told
        assert not self.agrees(turned)["eager"]


def turned(own: Way, *args: Any, **kwargs: Any) -> T:
    return own(*args, **kwargs).flip(1)


@pytest.fixture(scope="module")
def pair() -> Pair:
    made = Pair()
    new = made.agrees(turned)
    assert len(new["artefacts"]) == 1 and not new["eager"], new
    assert f"{NAME} is called from inside compiled blocks, as it is" in new["notes"]
    return made
