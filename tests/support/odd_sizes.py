# SPDX-License-Identifier: Apache-2.0
"""Blocks called at sizes that few have tried: `python odd_sizes.py`, in a process that a wrong kernel may kill.

Each block is compiled at one call, lowered, and then called at drawn sizes of 0, 1, 2 and small primes. Prints JSON:
how many calls of each block were compared, and how many ran compiled. Raises where one gives another result than
eager, or another error. No test lives here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F  # noqa: N812

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import nexfort_engine

SIZES = (0, 1, 2, 3, 5, 7, 11)
EXAMPLES = 60
T = torch.Tensor


class Attention(nn.Module):
    """Of tokens to tokens and to a prompt."""

    sizes = (2, 6, 4)

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(16, 16), nn.Linear(16, 32)

    def call(self, batch: int, length: int, prompt: int) -> tuple[Any, ...]:
        return numbers(batch, length, 16), numbers(batch, prompt, 16)

    def forward(self, x: T, text: T) -> T:
        for seen in (x, text):
            k, v = self.kv(seen).chunk(2, -1)
            heads = [t.unflatten(-1, (2, 8)).transpose(1, 2) for t in (self.q(x), k, v)]
            x = x + F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        return x


class Halving(nn.Module):
    """To half the size and back, with norms that are computed of the places of an image."""

    sizes = (2, 8, 10)

    def __init__(self) -> None:
        super().__init__()
        self.down, self.norm = nn.Conv2d(4, 4, 3, stride=2, padding=1), nn.GroupNorm(2, 4)

    def call(self, batch: int, height: int, width: int) -> tuple[Any, ...]:
        return (numbers(batch, 4, height, width),)

    def forward(self, h: T) -> T:
        h = F.instance_norm(F.silu(self.norm(self.down(h))))
        return F.interpolate(F.avg_pool2d(h, 2, 1), scale_factor=2.0, mode="bilinear")


class Shrinking(nn.Module):
    """Convolutions without a border, of which nothing is left of small images."""

    sizes = (2, 7, 9)

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 3, 3)

    def call(self, batch: int, height: int, width: int) -> tuple[Any, ...]:
        return (numbers(batch, 3, height, width),)

    def forward(self, h: T) -> T:
        return F.avg_pool2d(self.down(h), 2, 1, padding=1) + h.amax((2, 3), True)


class Parts(nn.Module):
    """Some of the tokens, by a number, looked at apart from the others."""

    sizes = (2, 9, 4)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def call(self, batch: int, length: int, number: int) -> tuple[Any, ...]:
        return numbers(batch, length, 8), number

    def forward(self, x: T, number: int) -> T:
        first, rest = x[:, :number], x[:, number:]
        rest = F.scaled_dot_product_attention(rest, rest, rest) + first.amax(1, keepdim=True)
        return torch.cat([self.linear(first), rest, x[:, : x.shape[1] // 2].softmax(1)], 1)


class Filled(nn.Module):
    """Tokens with as many before them as they are too few, as videos are made longer."""

    sizes = (2, 3, 7)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def call(self, batch: int, length: int, kept: int) -> tuple[Any, ...]:
        return numbers(batch, length, 8), numbers(batch, kept, 8)

    def forward(self, x: T, kept: T) -> T:
        missing = x.new_ones(x.shape[0], max(0, 2 - x.shape[1]), 8)
        return torch.cat([missing, self.linear(x), kept.sum(1, True) / max(kept.shape[1], 2)], 1)


def numbers(*sizes: int) -> T:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(0))


def outcome(block: Any, args: tuple[Any, ...]) -> Any:
    """A result, or the class of an error."""
    try:
        with torch.inference_mode():
            return block(*args)
    except Exception as error:
        return type(error)


def compared(kind: type[Any]) -> dict[str, int]:
    torch.manual_seed(0)
    block = kind().eval().requires_grad_(False)
    compiled = nexfort_engine.compile(block)
    assert isinstance(outcome(compiled, block.call(*kind.sizes)), T)
    assert compiled.report.as_dict()["artefacts_compiled"] and not compiled.report.as_dict()["eager"]
    (region,) = compiled._nexfort_engine.regions
    counts = {"calls": 0, "compiled": 0, "errors": 0}

    @settings(max_examples=EXAMPLES, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
    @given(st.tuples(*[st.sampled_from(SIZES)] * 3))
    def compare(sizes: tuple[int, ...]) -> None:
        wanted, found = outcome(block, block.call(*sizes)), outcome(compiled, block.call(*sizes))
        if isinstance(wanted, T):
            assert isinstance(found, T), (sizes, found)
            assert found.shape == wanted.shape, (sizes, found.shape, wanted.shape)
            assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5, equal_nan=True), sizes
        else:
            assert found is wanted, (sizes, found, wanted)
        counts["calls"] += 1
        counts["errors"] += not isinstance(wanted, T)
        counts["compiled"] += any(b.artefact.conditions.broken(*_sizes(block, sizes)) is None for b in region.bindings)

    compare()
    reasons = [row["reason"] for row in compiled.report.as_dict()["eager"]]
    assert reasons and all(reason.startswith("it was compiled for other sizes: ") for reason in reasons), reasons
    return counts


def _sizes(block: Any, sizes: tuple[int, ...]) -> tuple[list[Any], list[int]]:
    call = block.call(*sizes)
    return [t.shape for t in call if isinstance(t, T)], [n for n in call if isinstance(n, int)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({kind.__name__: compared(kind) for kind in (Attention, Halving, Shrinking, Parts, Filled)}))
