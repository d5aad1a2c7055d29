# SPDX-License-Identifier: Apache-2.0
"""Products in fp8: which are taken, and that the graph then computes what it did within what fp8 can tell apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from emulated import Emulated
from hypothesis import given, settings
from probe import Probe, block_of
from subjects import graphs_as_they_are

import nexfort_engine
from nexfort_engine.cache.store import Store
from nexfort_engine.cli.main import main
from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.engine import Engine
from nexfort_engine.passes import low_precision as precision
from nexfort_engine.passes.low_precision import describe_plan, gain, low_precision, plan
from nexfort_engine.quant import matmul
from nexfort_engine.quant.matmul import FP8, narrowed


class Attention(torch.nn.Module):
    """Three products of one input, one of another, and one of a single row."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(64, 64, bias=bias) for bias in (True, False, True))
        self.out, self.gate, self.odd = torch.nn.Linear(64, 32), torch.nn.Linear(16, 32), torch.nn.Linear(64, 30)
        self.to(dtype).eval().requires_grad_(False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mixed = torch.softmax(self.q(x) @ self.k(x).transpose(-1, -2) / 8, -1) @ self.v(x)
        return self.out(mixed) * self.gate(y)[:, None], self.odd(x)


@pytest.fixture
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are taken however small: these tests' would not pay."""
    monkeypatch.setattr(precision, "gain", lambda rows, *_: 1.0 if rows > 8 else -1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_graph_computes_the_same_within_what_fp8_tells_apart(dtype: torch.dtype, every_size: None) -> None:
    torch.manual_seed(0)
    block = Attention(dtype)
    probe = Probe(block, torch.randn(2, 24, 64).to(dtype), torch.randn(2, 16).to(dtype))
    graph, weights = probe.captured.graph, [dict(block.named_parameters())[n] for n in names(block)]
    taken = {product.node.args[1].name: product.reason for product in plan(graph)}  # type: ignore[union-attr]
    assert len(taken) == 6 and sum(reason is None for reason in taken.values()) == 4
    assert any("multiples of 16" in (reason or "") for reason in taken.values())
    assert low_precision(graph) == 4
    graph.recompile()
    casts = [n for n in graph.graph.nodes if n.target is torch.ops.aten.to.dtype and n.args[1] is torch.float8_e4m3fn]
    assert len(casts) == 2 + 3, "x once for its three layers, of which the two with a bias are one product"
    for sizes in ((2, 24), (1, 24), (3, 7)):
        x, y = torch.randn(*sizes, 64).to(dtype), torch.randn(sizes[0], 16).to(dtype)
        Emulated.products = 0
        found = Emulated(graph).run(*[weights[i] for i in probe.artefact.weights], x, y)
        assert Emulated.products == 3
        for result, wanted in zip(found, block(x, y), strict=True):
            assert result.dtype == dtype and result.shape == wanted.shape
            error = float((result.float() - wanted.float()).norm() / wanted.float().norm())
            assert error < 0.06
        assert torch.equal(found[1], block(x, y)[1]), "what was not taken is as it was"


def changed_between(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = x * 1
    first = self.first(x)
    x[:, 0].mul_(3)
    return first + self.second(x) + self.plain(x)


def changed_results(self: Any, x: torch.Tensor) -> torch.Tensor:
    first, second = self.first(x), self.second(x)
    first.view(x.shape[0], -1)[:, ::2].mul_(2)
    return first + second + self.plain(x)


def seen_as_rows(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.first(x).view(x.shape[0], -1) + self.second(x).view(x.shape[0], -1)


@pytest.mark.parametrize("function", [changed_between, changed_results, seen_as_rows])
def test_layers_of_one_input_are_one_product_only_where_nothing_tells_them_apart(
    function: Any, every_size: None
) -> None:
    torch.manual_seed(0)
    layers = {name: torch.nn.Linear(64, 64, bias=name != "plain") for name in ("first", "second", "plain")}
    block = block_of(function, **layers).bfloat16()
    probe = Probe(block, torch.randn(3, 5, 64).bfloat16())
    graph = probe.captured.graph
    assert low_precision(graph) >= 2
    graph.recompile()
    x = torch.randn(4, 7, 64).bfloat16()
    given = probe.weights
    (found,), wanted = Emulated(graph).run(*given, x), block(x)
    assert found.shape == wanted.shape
    assert float((found.float() - wanted.float()).norm() / wanted.float().norm()) < 0.06


def names(block: torch.nn.Module) -> list[str]:
    return [name for name, _ in block.named_parameters()]


@settings(max_examples=80)
@given(
    st.integers(1, 6),
    st.integers(1, 40),
    st.floats(-8, 8),
    st.integers(0, 2**16),
    st.sampled_from([torch.float16, torch.bfloat16]),
)
def test_rows_keep_their_numbers_within_half_a_step(
    rows: int, inner: int, size: float, seed: int, dtype: torch.dtype
) -> None:
    x = (torch.randn(rows, inner, generator=torch.Generator().manual_seed(seed)) * 2.0**size).to(dtype)
    x[0] = 0.0
    values, scale = narrowed(x, FP8)
    back = values.float() * scale
    assert values.dtype == torch.float8_e4m3fn and scale.shape == (rows, 1)
    assert torch.equal(back[0], torch.zeros(inner)) and bool(back.isfinite().all())
    largest = x.float().abs().amax(-1, keepdim=True)
    # three bits behind the point: half a step is 1/16 of a number, or of the smallest that has all three
    step = torch.maximum(x.float().abs(), largest * 2.0**-14) / 16
    assert bool(((back - x.float()).abs() <= step * 1.01 + 1e-30).all())


@pytest.mark.parametrize("dtype", [FP8, torch.int8])
def test_small_products_do_not_pay_and_large_ones_do(dtype: torch.dtype) -> None:
    assert gain(4608, 3072, 12288, dtype) > 1e-4 and gain(8192, 1280, 10240, dtype) > 0
    assert gain(2, 3072, 18432, dtype) < 0 and gain(154, 2048, 1280, dtype) < 0 and gain(64, 64, 64, dtype) < 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_graph_in_int8_computes_the_same_within_what_whole_numbers_tell_apart(
    dtype: torch.dtype, every_size: None
) -> None:
    """By a CPU's own products of int8; the same layers as in fp8, nearer to what they were."""
    torch.manual_seed(0)
    block = Attention(dtype)
    probe = Probe(block, torch.randn(2, 24, 64).to(dtype), torch.randn(2, 16).to(dtype))
    graph, weights = probe.captured.graph, [dict(block.named_parameters())[n] for n in names(block)]
    assert (
        sum(row["count"] for row in describe_plan(graph, torch.int8) if row["type"] == "int8" and row["reason"] is None)
        == 4
    )
    assert low_precision(graph, torch.int8) == 4
    graph.recompile()
    assert sum(n.target is torch.ops.aten._int_mm.default for n in graph.graph.nodes) == 3, "two layers are one product"
    for sizes in ((2, 24), (1, 24), (3, 7), (1, 1)):
        x, y = torch.randn(*sizes, 64).to(dtype), torch.randn(sizes[0], 16).to(dtype)
        with torch.inference_mode():
            for found, wanted in zip(graph(*weights, x, y), block.double()(x.double(), y.double()), strict=True):
                assert found.dtype == dtype and found.shape == wanted.shape
                assert float((found - wanted).norm() / wanted.norm()) < 0.02
        block.to(dtype)


def test_products_in_int8_are_exact_where_numbers_are_whole() -> None:
    """Rows and columns whose largest number is 127 have a scale of 1: nothing is rounded, however long the sums."""
    torch.manual_seed(0)
    x, weight = (torch.randint(-127, 128, (rows, 4096)).float() for rows in (5, 32))
    x[:, 0] = weight[:, 0] = 127
    bias = torch.randint(-9, 10, (32,)).float()
    found = matmul.times_whole_rows(narrowed(matmul.with_zeros(x), torch.int8), narrowed(weight, torch.int8), bias, x)
    assert torch.allclose(found.double(), x.double() @ weight.double().t() + bias, rtol=1e-6)


def test_low_precision_on_cards_without_fp8_is_offered_in_int8_and_says_that_nobody_measured_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def options(card: tuple[int, int], asked: dict[str, bool]) -> tuple[dict[str, object], str]:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: card)
        engine = Engine(torch.nn.Linear(8, 8), CompileConfig.parse({"mode": "O3", "options": asked}), Store(tmp_path))
        return engine.builder.finder.options("cuda"), " ".join(engine.report.as_dict()["notes"])

    low = ("nexfort.low_precision", "nexfort.low_precision_int8", "nexfort.narrow_attention")
    for card in ((8, 0), (8, 6)):
        found, notes = options(card, {})
        assert not any(found[name] for name in low) and "quant.int8" in notes and "not active" in notes
        found, notes = options(card, {"quant.int8": True, "quant.attention": True})
        assert [found[name] for name in low] == [False, True, False] and "nobody measured" in notes
    found, notes = options((7, 5), {"quant.int8": True})
    assert not any(found[name] for name in low) and "need 8.0" in notes
    found, notes = options((9, 0), {})
    assert [found[name] for name in low] == [True, False, True] and "low precision" not in notes
    found, notes = options((9, 0), {"quant.int8": True})
    assert [found[name] for name in low] == [False, True, True]


def test_where_there_is_no_such_card_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "NVIDIA" in (matmul.missing("cpu") or "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 6))
    assert matmul.missing("cuda") == "the card's compute capability is 8.6, products in fp8 need 8.9 or newer"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    assert matmul.missing("cuda") is None
    with graphs_as_they_are():
        block = torch.nn.Sequential(torch.nn.Linear(16, 16)).eval().requires_grad_(False)
        compiled = nexfort_engine.compile(block, options={"mode": "O3"})
        with torch.inference_mode():
            assert torch.allclose(compiled(torch.ones(2, 16)), block(torch.ones(2, 16)), atol=1e-6)
    assert any("low precision is not active" in note for note in compiled.report.as_dict()["notes"])


def test_products_one_after_another_and_weights_that_are_no_matrix(every_size: None) -> None:
    torch.manual_seed(0)
    block = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 16)).half().eval().requires_grad_(False)
    probe = Probe(block, torch.randn(2, 24, 32).half())
    assert low_precision(probe.captured.graph) == 2
    vector = Probe(block_of(lambda b, h, v: torch.nn.functional.linear(h, v)), torch.randn(2, 9, 16), torch.randn(16))
    (product,) = plan(vector.captured.graph)
    assert "no matrix" in (product.reason or "")


def test_the_plan_is_in_the_report_and_can_be_printed_later(
    every_size: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """On a pretended card: what is planned for a block is kept beside its artefact."""
    own = CompileConfig.lowering_options

    def as_on_a_card(self: CompileConfig, device: str) -> dict[str, object]:
        return {**own(self, device), "nexfort.low_precision": self.has("low-precision")}

    monkeypatch.setattr(matmul, "missing", lambda *_: None)
    monkeypatch.setattr(CompileConfig, "lowering_options", as_on_a_card)
    torch.manual_seed(0)
    blocks = torch.nn.ModuleList(Attention(torch.bfloat16) for _ in range(2))
    with graphs_as_they_are(), pytest.MonkeyPatch.context() as patch:
        for mode in ("O2", "O3"):
            patch.setenv("NEXFORT_CACHE_DIR", str(tmp_path / mode))
            (tmp_path / mode).mkdir(mode=0o700)
            compiled = nexfort_engine.compile(Both(blocks), options={"mode": mode})
            with torch.inference_mode():
                compiled(torch.randn(2, 24, 64).bfloat16(), torch.randn(2, 16).bfloat16())
            assert main(["plan", "--dir", str(tmp_path / mode)]) == 0
            printed, said = capsys.readouterr().out, compiled.report.as_dict()
            assert bool(said["precision"]) == (mode == "O3") == ("in fp8" in str(compiled.report))
    assert "run a model once in the mode O3" not in printed
    assert sorted(row["region"] for row in said["precision"]) == ["blocks.0", "blocks.1"], "each says what it runs"
    rows = said["precision"][0]["products"]
    assert sum(row["count"] for row in rows) == 6
    assert sum(row["count"] for row in rows if row["reason"] is None) == 4
    assert "precision: 8 of 12 products in fp8" in str(compiled.report)
    assert "4 of 6 products in fp8" in printed and "  3 x  (48, 64) x (64, 64)  fp8" in printed
    assert "multiples of 16" in printed
    assert main(["plan", "--dir", str(tmp_path / "O2")]) == 0 and "run a model once" in capsys.readouterr().out
    assert main(["plan", "--json", "--dir", str(tmp_path / "O3")]) == 0
    assert json.loads(capsys.readouterr().out)["artefacts"][0]["products"] == rows


class Both(torch.nn.Module):
    """Two blocks of a kind."""

    def __init__(self, blocks: torch.nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return sum(block(x, y)[0] for block in self.blocks)
