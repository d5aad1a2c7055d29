# SPDX-License-Identifier: Apache-2.0
"""What the layers of a network are called with, and which of them pay, by cards of any speed."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from nexfort_engine.quant.cost_model import Card, casting, narrowing, saves
from nexfort_engine.quant.plan import by_structure, sharing_copy
from nexfort_engine.quant.profitability import ROWS, Seen, Watch, only_what_pays
from nexfort_engine.quant.quant_types import TYPES

FP8 = TYPES["fp8_e4m3_e4m3_dynamic"]
# products cost nothing but what their work and their memory take
FAST = Card(half=1e9, narrow=2e9, memory=1e12, kernel=0.0, product=0.0, processors=0)


class Block(nn.Module):
    """Attention to itself and to a text, a layer that normalises before it looks, and one that is never run."""

    def __init__(self, width: int) -> None:
        super().__init__()
        names = ("q", "k", "v", "out", "text_k", "text_v", "normed", "unused", "row")
        for name in names:
            setattr(self, name, nn.Linear(width, width))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, text: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)) + self.row(row)[:, None]
        q = self.norm(self.normed(input=x))[:, None]
        k, v = (layer(text)[:, None] for layer in (self.text_k, self.text_v))
        return x + scaled_dot_product_attention(q, k, v)[:, 0]


class Net(nn.Module):
    """Two blocks that look at one text."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.eval().requires_grad_(False)

    def forward(self, x: torch.Tensor, text: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, text, row)
        return x


def seen_by(net: nn.Module, rows: int = 20) -> dict[str, Seen]:
    like, dtype = sharing_copy(net), next(net.parameters()).dtype
    watch = Watch({"net": like})
    with watch:
        like(*(torch.ones(2, *n, 32, dtype=dtype) for n in ((rows,), (7,), ())))
    assert watch.seen("another") is None and not any(module._forward_hooks for module in net.modules())
    return watch.seen("net") or {}


def kept(net: nn.Module, seen: dict[str, Seen] | None, card: Card) -> dict[str, str | None]:
    return only_what_pays(net, FP8, dict.fromkeys(by_structure(net)), seen, card)


def packed(chosen: dict[str, str | None]) -> set[str]:
    return {path for path, reason in chosen.items() if reason is None}


def test_rows_sources_and_readers_are_those_of_the_call() -> None:
    seen = seen_by(Net())
    rows = {path.removeprefix("blocks.0."): one.rows for path, one in seen.items() if path.startswith("blocks.0.")}
    assert rows == {
        **dict.fromkeys(("q", "k", "v", "out", "normed"), 40),
        **{"text_k": 14, "text_v": 14, "row": 2},
    }
    sources = {path: one.source for path, one in seen.items()}
    for names in (("q", "k", "v"), ("text_k", "text_v")):
        assert len({sources[f"blocks.0.{name}"] for name in names}) == 1, names
        assert sources[f"blocks.0.{names[0]}"] != sources[f"blocks.1.{names[0]}"], "another block is another artefact"
    assert len(set(sources.values())) == 2 * 5
    read = {path.rpartition(".")[2] for path, one in seen.items() if one.read_whole}
    assert read == {"q", "k", "v", "text_k", "text_v"}, "what a norm is between may be cast on its way"


def test_layers_that_do_not_pay_say_why() -> None:
    net = Net()
    seen, width = seen_by(net), 32
    card = dataclasses.replace(FAST, product=saves(14, width, width, FAST))
    chosen = kept(net, seen, card)
    assert packed(chosen) == {f"blocks.{i}.{name}" for i in range(2) for name in ("q", "k", "v", "out", "normed")}
    assert chosen["blocks.0.row"] == "2 rows times 32x32 would take as long or longer"
    assert chosen["blocks.1.text_k"] == "14 rows times 32x32 would take as long or longer"
    assert chosen["blocks.1.unused"] == "the call that was looked at does not run it"
    given = {**dict.fromkeys(chosen), "blocks.0.q": "it is ignored"}
    assert only_what_pays(net, FP8, given, seen, card)["blocks.0.q"] == "it is ignored"


def test_an_input_that_three_share_is_paid_for_once() -> None:
    net = Net().to(torch.bfloat16)
    seen, one = seen_by(net), saves(40, 32, 32, FAST)
    for kernel, names in (
        (0.9 * one, {"q", "k", "v"}),
        (1.6 * one, set()),
        (0.4 * one, {"q", "k", "v", "out", "normed"}),
    ):
        card = dataclasses.replace(FAST, kernel=kernel)
        assert packed(kept(net, seen, card)) == {f"blocks.{i}.{name}" for i in range(2) for name in names}
        assert (narrowing(40, 32, card, 3) < 3 * one) is bool(names)


def test_a_layer_that_gains_less_than_its_copy_of_the_input_stays_out() -> None:
    net = Net().to(torch.bfloat16)
    seen = seen_by(net)
    net.blocks[0].k = nn.Linear(32, 16, dtype=torch.bfloat16)
    product = saves(40, 32, 16, FAST)
    for copy, there in ((0.1, {"q", "k", "v"}), (10.0, {"q", "v"})):  # of what the small one saves
        card = dataclasses.replace(FAST, product=0.99 * product, memory=40 * 32 / (copy * 0.01 * product))
        found = {path.removeprefix("blocks.0.") for path in packed(kept(net, seen, card))}
        assert found & {"q", "k", "v"} == there


def test_attention_reads_what_it_is_given_in_float16() -> None:
    for dtype, there in ((torch.float16, False), (torch.bfloat16, True)):
        net = Net().to(dtype)
        card = dataclasses.replace(FAST, memory=4.0 * 40 * 32 / saves(40, 32, 32, FAST))
        assert casting(40, 32, card) >= saves(40, 32, 32, card) > narrowing(40, 32, card) / 3
        assert ("blocks.0.q" in packed(kept(net, seen_by(net), card))) is there


def test_without_a_call_sizes_alone_decide() -> None:
    net = Net()
    net.blocks[0].out = nn.Linear(32, 320)
    card = dataclasses.replace(FAST, product=2 * saves(ROWS, 32, 32, FAST))
    chosen = kept(net, None, card)
    assert packed(chosen) == {"blocks.0.out"}
    assert chosen["blocks.0.q"] == f"its rows are not known, and {ROWS} times 32x32 would take as long or longer"


@settings(max_examples=60)
@given(st.integers(1, 500), st.integers(0, 500), st.floats(0, 1e-4), st.floats(0, 1e-4))
def test_more_rows_pack_no_less(rows: int, more: int, kernel: float, product: float) -> None:
    net, card = Net(), dataclasses.replace(FAST, kernel=kernel, product=product, processors=4)
    few, many = ({path: Seen(n, i) for i, path in enumerate(by_structure(net))} for n in (rows, rows + more))
    assert packed(kept(net, few, card)) <= packed(kept(net, many, card))


@pytest.mark.parametrize("rows", [1, 2])
def test_of_several_calls_the_smallest_counts(rows: int) -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    watch = Watch({"net": net})
    with watch:
        for n in (8, rows, 9):
            net(torch.ones(n, 16))
    assert {one.rows for one in (watch.seen("net") or {}).values()} == {rows}
