# SPDX-License-Identifier: Apache-2.0
"""Which layers of a network are packed, and why not; and that the network that was given stays itself."""

from __future__ import annotations

import copy
import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from nexfort_engine.quant import matmul
from nexfort_engine.quant.plan import BUDGET, Quantisation, Row, by_likeness, by_structure, quantise, unfit
from nexfort_engine.quant.quant_types import TYPES
from nexfort_engine.quant.quantized_linear import QuantisedLinear

FP8 = TYPES["fp8_e4m3_e4m3_dynamic"]
INT8 = TYPES["int8_dynamic"]


class Modulation(nn.Module):
    """As transformers have them: a row for each picture becomes the norm's shift and scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.silu, self.linear, self.norm = nn.SiLU(), nn.Linear(width, 2 * width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        shift, scale = self.linear(self.silu(row))[:, None].chunk(2, -1)
        return self.norm(x) * (1 + scale) + shift


class Block(nn.Module):
    """Modulation, and two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.modulation, self.up, self.down = (
            Modulation(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.modulation(x, row))))


class Net(nn.Module):
    """A first layer, blocks in a list, a last layer, and a buffer."""

    def __init__(self, width: int = 32, depth: int = 2) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(8, width), nn.Linear(width, 8)
            self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.register_buffer("table", torch.ones(width))
        self.eval().requires_grad_(False)

    def forward(self, x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * self.table
        for block in self.blocks:
            x = block(x, row)
        return self.last(x)


def call(net: nn.Module) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1)
    return net(torch.randn(2, 9, 8, generator=draw), torch.randn(2, 32, generator=draw))


def packed(net: nn.Module) -> set[str]:
    return {path for path, module in net.named_modules() if isinstance(module, QuantisedLinear)}


def test_by_structure_the_layers_inside_blocks_are_packed() -> None:
    chosen = by_structure(Net())
    assert {path for path, reason in chosen.items() if reason is None} == {
        *("blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down")
    }
    assert "outside the blocks" in (chosen["first"] or "") and "outside the blocks" in (chosen["last"] or "")
    assert "one row for each picture" in (chosen["blocks.0.modulation.linear"] or "")
    plain = by_structure(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4)))
    assert [path for path, reason in plain.items() if reason is None] == ["2"], "without a list: all but first and last"


@pytest.mark.parametrize("name", TYPES)
def test_the_network_given_stays_itself_and_all_else_is_shared(name: str) -> None:
    net = Net()
    wanted, before = call(net), {key: value.data_ptr() for key, value in net.state_dict().items()}
    result, rows = quantise(net, TYPES[name], by_structure(net), BUDGET)
    assert packed(result) == {"blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"} and not packed(net)
    assert type(result) is Net and result.blocks[0] is not net.blocks[0]
    assert {key: value.data_ptr() for key, value in net.state_dict().items()} == before
    assert torch.equal(call(net), wanted)
    for key, value in result.state_dict().items():
        shared = before.get(key) == value.data_ptr()
        layer = key.rpartition(".")[0]
        assert shared != (layer in packed(result) and not key.endswith("bias")), key
    found = call(result)
    assert 1e-4 < float((found - wanted).norm() / wanted.norm()) < 0.1
    there = {row.layer: row for row in rows}
    for path in packed(result):
        taken = sum(result.state_dict()[f"{path}.{part}"].nbytes for part in ("weight", "weight_scale"))
        assert there[path].taken == taken < there[path].full / 2 and 0.001 < (there[path].error or 0) < BUDGET


def test_a_layer_over_the_budget_goes_back() -> None:
    net = Net()
    net.blocks[1].up.weight[:, 0] = 500.0  # an outlier in each row takes the steps of all others in int8
    net.blocks[1].up.weight[:, 0] *= torch.tensor([1.0, -1.0]).repeat(64)
    net.blocks[0].down.weight[0, 0] = math.nan
    result, rows = quantise(net, INT8, by_structure(net), 0.012)
    there = {row.layer: row for row in rows}
    assert there["blocks.0.down"].type is None and "budget" in (there["blocks.0.down"].reason or "")
    kept = {row.layer for row in rows if row.type is not None}
    assert kept == packed(result) == {row.layer for row in rows if row.error is not None and row.error <= 0.012}
    assert quantise(net, INT8, by_structure(net), 0.0)[0].blocks[0].up.__class__ is nn.Linear


def test_an_error_is_measured_without_the_caller_s_random_numbers() -> None:
    net = Net()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    one = quantise(net, FP8, by_structure(net), BUDGET)[1]
    assert torch.equal(torch.get_rng_state(), before)
    assert one == quantise(net, FP8, by_structure(net), BUDGET)[1]


class Other(nn.Linear):
    """A linear layer with code of its own."""


def refusals() -> dict[str, tuple[nn.Linear, Any, str]]:
    hooked = nn.Linear(32, 32)
    hooked.register_forward_hook(lambda *_: None)
    return {
        "another class": (Other(32, 32), FP8, "Other, whose code may do more"),
        "packed": (QuantisedLinear(nn.Linear(32, 32), INT8), FP8, "packed already, as int8_dynamic"),
        "a hook": (hooked, FP8, "carries a forward hook"),
        "sizes": (nn.Linear(32, 40), FP8, "40x32; expected multiples of 16"),
        "sizes in": (nn.Linear(24, 32), INT8, "32x24; expected multiples of 16"),
        "no weights": (nn.Linear(32, 32, device="meta"), FP8, "not loaded"),
        "a dtype": (nn.Linear(32, 32).double(), FP8, "of torch.float64"),
    }


@pytest.mark.parametrize("case", refusals())
def test_what_cannot_be_packed_says_why(case: str) -> None:
    layer, kind, said = refusals()[case]
    assert said in (unfit(layer, kind) or "")
    assert unfit(nn.Linear(32, 32), kind) is None
    assert unfit(nn.Linear(24, 40), TYPES["fp8_e4m3_e4m3_weightonly"]) is None, "no product has conditions there"


def test_a_product_that_an_operator_refuses_leaves_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("self.size(0) needs to be greater than 16\nmore")

    monkeypatch.setattr(matmul, "_whole_numbers", refuse)
    result, rows = quantise(Net(), INT8, by_structure(Net()), BUDGET)
    assert not packed(result)
    assert sum("refused here: self.size(0) needs to be greater than 16" in (row.reason or "") for row in rows) == 4


# ---- by what was measured ----------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from([f"blocks.{i}.{n}" for i in range(4) for n in ("up", "down", "absent")]),
                       st.floats(0, 1), min_size=1), st.floats(0, 100))  # fmt: skip
def test_of_what_was_measured_the_best_are_kept(measured: dict[str, float], share: float) -> None:
    net = Net(depth=4)
    chosen = by_likeness(measured, share, "layers.json")(net)
    kept = {path for path, reason in chosen.items() if reason is None}
    there = set(measured) & set(chosen)
    assert kept <= there and len(kept) <= len(measured) * share / 100 + 1e-6
    left = there - kept
    assert all(measured[one] >= measured[other] for one in kept for other in left)
    if share == 100:
        assert kept == there
    assert all("is not in layers.json" in (chosen[path] or "") for path in set(chosen) - set(measured))
    assert all("is not among the best" in (chosen[path] or "") for path in left)


def test_a_layer_outside_blocks_is_packed_if_it_was_measured() -> None:
    net = Net(width=32)
    net.last = nn.Linear(32, 16).requires_grad_(False)
    chosen = by_likeness({"last": 0.999, "blocks.0.modulation.linear": 0.99, "first": 0.98}, 70, "f")(net)
    result, rows = quantise(net, FP8, chosen, BUDGET)
    assert packed(result) == {"last", "blocks.0.modulation.linear"}
    assert "ssim of 0.98 is not among the best 70 %" in next(row.reason or "" for row in rows if row.layer == "first")


# ---- the plan for people -----------------------------------------------------------------------------------


def test_the_plan_says_all_of_it() -> None:
    net = Net()
    plan = Quantisation(FP8.name, BUDGET)
    result, plan.parts["unet"] = quantise(net, FP8, by_structure(net), BUDGET)
    text, data = str(plan), plan.as_dict()
    assert text.startswith("unet: 4 of 8 linear layers as fp8_e4m3_e4m3_dynamic, ")
    assert "    2 x  blocks.*.up  128x32  error up to 0.0" in text and "  1 x  first  32x8  as it is: it stands" in text
    assert {Row(**row) for row in data["parts"]["unet"]} == set(plan.parts["unet"])
    assert copy.deepcopy(plan) == plan and packed(result)
    assert "0 of 1 linear layers" in Quantisation("x", 0, {"u": [Row("a", 1, 1, None, "why", None, 4, 4)]}).summary("u")
