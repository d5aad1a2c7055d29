# SPDX-License-Identifier: Apache-2.0
"""Which attention is computed in 8 bits: what pays, what the kernels can, and what is said of the rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_blocks import captured
from subjects import graphs_as_they_are

import nexfort_engine
from nexfort_engine.cli.main import main
from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.kernels import gluon_support
from nexfort_engine.kernels.low_precision_attention import op as kernel
from nexfort_engine.passes.low_precision_attention import describe_plan, gain, narrow_attentions, plan
from nexfort_engine.quant import matmul
from nexfort_engine.reporting.report import Report

TORCHS = torch.ops.aten.scaled_dot_product_attention.default


def count(graph: Any, target: Any) -> int:
    return sum(node.target is target for node in graph.graph.nodes)


def node_of(graph: Any) -> Any:
    (node,) = [node for node in graph.graph.nodes if node.target is TORCHS]
    return node


def test_what_pays_is_written_anew_once() -> None:
    graph = captured("long").graph
    before = node_of(graph).meta["val"]
    assert describe_plan(graph) == [
        {"heads": 4, "queries": 8192, "keys": 8192, "width": 128, "reason": None, "count": 1}
    ]
    assert narrow_attentions(graph) == 1 and narrow_attentions(graph) == 0
    graph.graph.lint()
    assert (count(graph, TORCHS), count(graph, kernel.operator())) == (0, 1)
    (written,) = [node for node in graph.graph.nodes if node.target is kernel.operator()]
    assert written.args[3] == pytest.approx(128**-0.5)
    result = written.target(*(a.meta["val"] if hasattr(a, "meta") else a for a in written.args))
    assert result.stride() == before.stride() and result.shape == before.shape, "what follows finds it as it was"


def test_of_few_tokens_it_stays_and_is_said_to() -> None:
    graph = captured("wide").graph
    (row,) = describe_plan(graph)
    assert (row["heads"], row["queries"], row["keys"], row["width"]) == (40, 1024, 1024, 64)
    assert "as long or longer" in row["reason"]
    assert narrow_attentions(graph) == 0


def test_gain_follows_what_was_measured() -> None:
    """Microseconds by both on an H200: 3917 and 2563, 396 and 351, 479 and 408, 186 and 169."""
    measured = {
        (24, 14040, 14040, 128): 1 - 2563 / 3917,
        (24, 4608, 4608, 128): 1 - 351 / 396,
        (10, 9216, 9216, 64): 1 - 408 / 479,
        (20, 4096, 4096, 64): 1 - 169 / 186,
    }
    assert all(gain(*sizes) == pytest.approx(part, abs=0.05) for sizes, part in measured.items())
    assert gain(48, 1536, 1536, 128) < 0, "rounds of programs that are not full"
    assert gain(40, 1024, 1024, 64) < 0.05
    assert gain(24, 4096, 77, 64) < 0 and gain(24, 1, 1, 128) < 0


def _masked(node: Any) -> None:
    node.args = (*node.args[:3], node.args[0])


def _causal(node: Any) -> None:
    node.args = (*node.args[:3], None, 0.0, True)


def _shared(node: Any) -> None:
    node.kwargs = {**node.kwargs, "enable_gqa": True}


def _single(node: Any) -> None:
    for part in node.args[:3]:
        part.meta["val"] = part.meta["val"].float()


def _too_wide(node: Any) -> None:
    for part in node.args[:3]:
        part.meta["val"] = torch.cat([part.meta["val"]] * 2, -1)


def _narrow_values(node: Any) -> None:
    node.args[2].meta["val"] = node.args[2].meta["val"][..., :64]


def _of_one_row(node: Any) -> None:
    for part in node.args[1:3]:
        part.meta["val"] = part.meta["val"][:1]


def _scaled_down(node: Any) -> None:
    node.kwargs = {"scale": -0.5}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_scaled_down, "multiplied by -0.5; expected a number above 0"),
        (_masked, "a mask"),
        (_causal, "a mask"),
        (_shared, "share keys"),
        (_single, "float32; expected float16 or bfloat16"),
        (_too_wide, "heads of 256 and 256 numbers; expected 64 or 128 for both"),
        (_narrow_values, "heads of 128 and 64 numbers"),
        (_of_one_row, "several rows"),
    ],
)
def test_what_the_kernels_cannot_stays_with_its_reason(change: Callable[[Any], None], reason: str) -> None:
    graph = captured("long").graph
    change(node_of(graph))
    (seen,) = plan(graph)
    assert reason in (seen.reason or "")
    assert narrow_attentions(graph) == 0 and count(graph, TORCHS) == 1


def test_what_drops_out_is_no_matter_of_it() -> None:
    graph = captured("long").graph
    node_of(graph).kwargs = {"dropout_p": 0.5}
    assert plan(graph) == [] and narrow_attentions(graph) == 0


class Looking(torch.nn.Module):
    """Attention of its input to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight * torch.nn.functional.scaled_dot_product_attention(x, x, x)


def test_the_plan_is_in_the_report_and_can_be_printed_later(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    own = CompileConfig.lowering_options

    def as_on_a_card(self: CompileConfig, device: str) -> dict[str, object]:
        on = dict.fromkeys(("nexfort.low_precision", "nexfort.narrow_attention"), True)
        return {**own(self, device), **on}

    monkeypatch.setattr(matmul, "missing", lambda *_: None)
    monkeypatch.setattr(CompileConfig, "lowering_options", as_on_a_card)
    tmp_path.chmod(0o700)
    network = torch.nn.Sequential(Looking(), Looking()).eval()
    with graphs_as_they_are(), torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEXFORT_CACHE_DIR", str(tmp_path))
        for _ in range(2):  # made, and then loaded
            compiled = nexfort_engine.compile(network, options={"mode": "O3", "options": {"quant.attention": True}})
            x = torch.randn(2, 3, 24, 64).bfloat16()
            assert torch.allclose(compiled(x), network(x), atol=0.05)
            told_rows = [row for one in compiled.report.as_dict()["precision"] for row in one["attention"]]
            assert told_rows and {row["queries"] for row in told_rows} == {24}
            assert {row["reason"] for row in told_rows} == {"it is computed on cpu; expected a GPU"}
            assert "in 8 bits" not in str(compiled.report), "none is"
    assert main(["plan", "--dir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "attention of 24 queries, 24 keys, 6 heads of 64  as it is: it is computed on cpu" in printed


def test_what_is_in_8_bits_is_counted_in_the_report() -> None:
    report = Report()
    row = {"heads": 2, "queries": 9, "keys": 9, "width": 64, "count": 3}
    report.precision("blocks.0", [], [{**row, "reason": None}, {**row, "reason": "a mask"}])
    assert "precision: 0 of 0 products in fp8, 3 of 6 attentions in 8 bits" in str(report)


@pytest.mark.parametrize(
    ("card", "asked", "expected"),
    [((9, 0), None, True), ((9, 0), False, False), ((8, 9), None, False), ((8, 9), True, True), ((8, 6), True, False)],
)
def test_it_is_chosen_where_it_was_measured_or_asked_for(
    card: tuple[int, int], asked: bool | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: card)
    options = {} if asked is None else {"options": {"quant.attention": asked}}
    compiled = nexfort_engine.compile(Looking(), options={"mode": "O3", **options})
    assert compiled._nexfort_engine.builder.finder.options("cuda")["nexfort.narrow_attention"] is expected
    assert CompileConfig.parse("O2").lowering_options("cuda")["nexfort.narrow_attention"] is False
    assert CompileConfig.parse("O3").lowering_options("cpu")["nexfort.narrow_attention"] is False


def test_where_the_fastest_kernel_cannot_be_called_the_report_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another torch may write calls of kernels otherwise; the kernel that all cards have serves then."""
    assert gluon_support.gluon_missing() is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    compiled = nexfort_engine.compile(Looking(), options={"mode": "O3"})
    finder = compiled._nexfort_engine.builder.finder
    assert finder.options("cuda")["nexfort.narrow_attention"] and not compiled.report.as_dict()["notes"]
    monkeypatch.setattr(gluon_support, "_text", lambda *_: "class GluonASTSource")
    assert finder.options("cuda")["nexfort.narrow_attention"]
    (note,) = (note for note in compiled.report.as_dict()["notes"] if "8 bits" in note)
    assert "not by the fastest of its kernels: triton's" in note and "has no async_load" in note
