# SPDX-License-Identifier: Apache-2.0
"""Attention of heads that libraries pad: the kernels, and which attention of a graph is computed by them.

What runs the one that Inductor reads is Triton's interpreter, in a process of its own.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_blocks
import pytest
import torch
from attention_graphs import (
    BEHIND,
    OUTERMOST,
    PLAIN,
    TORCHS,
    Input,
    Tensors,
    crossed,
    graph_of,
    heads,
    joined,
    node_of,
    of_copies,
    torchs,
)
from kernel_scripts import run
from torch._subclasses import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention as attention

import nexfort_engine
from nexfort_engine import lower
from nexfort_engine.config import CompileConfig
from nexfort_engine.kernels import unpadded_attention as kernel
from nexfort_engine.kernels.launching import DESCRIPTORS
from nexfort_engine.kernels.laying import empty_laid_out
from nexfort_engine.passes import unpadded_attention as passes
from nexfort_engine.passes.unpadded_attention import LEAST, unpadded_attentions

pytest.importorskip("triton", reason="the kernels are Triton's")


def test_the_kernel_that_inductor_reads_gives_what_plain_torch_gives() -> None:
    run("interpreted_unpadded_attention.py", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


def test_the_kernel_is_compiled_for_its_card(tmp_path: Path) -> None:
    run("compiled_unpadded_attention.py", CUDA_VISIBLE_DEVICES="", TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.parametrize("order", [PLAIN, BEHIND, OUTERMOST])
@pytest.mark.parametrize("width", kernel.WIDTHS)
def test_the_operator_knows_its_result_and_how_it_lies(width: int, order: tuple[int, ...]) -> None:
    q, k, v = (torch.randn(2, 3, length, width).half() for length in (5, 7, 7))
    found = kernel.operator()(q, k, v, 0.3, order)
    assert found.permute(*order).is_contiguous() and torch.equal(found, attention(q, k, v, scale=0.3))
    torch.library.opcheck(kernel.operator(), (q, k, v, 0.3, order), raise_exception=True)


@pytest.mark.parametrize("widths", [(64, 64, 64), (80, 72, 72), (72, 72, 80)])
def test_heads_of_other_sizes_are_told(widths: tuple[int, ...]) -> None:
    for mode in (FakeTensorMode(), torch.no_grad()):
        with mode, pytest.raises(ValueError, match="numbers; expected 72 or 80, the same for each"):
            kernel.operator()(*(torch.zeros(1, 1, 2, width) for width in widths), 0.3, PLAIN)


# ---- which attention -------------------------------------------------------------------------------------------------

SELF = ((2, 1024, 3 * 144), (0, 1))  # queries, keys and values of two heads beside each other


def _of_itself(_: Tensors, x: torch.Tensor, width: int = 72, **how: Any) -> torch.Tensor:
    return joined(attention(*(heads(part, width) for part in x.chunk(3, -1)), **how))


@pytest.mark.parametrize("width", kernel.WIDTHS)
@pytest.mark.parametrize("symbols", [(0, 1), (0,), ()])
def test_attention_of_such_heads_is_computed_so_once(width: int, symbols: tuple[int, ...]) -> None:
    graph = graph_of(lambda _, x: _of_itself(_, x, width), ((2, LEAST, 3 * 2 * width), symbols))
    before = node_of(graph, TORCHS)
    result, tensors = before.meta["val"], before.args[:3]
    assert unpadded_attentions(graph) == 1 and unpadded_attentions(graph) == 0
    graph.graph.lint()
    written = node_of(graph, kernel.operator())
    assert written.args[:3] == tensors and written.args[3] == pytest.approx(width**-0.5)
    found = written.target(*(a.meta["val"] if hasattr(a, "meta") else a for a in written.args))
    assert found.shape == result.shape and found.stride() == result.stride(), "what follows finds it as it was"


def test_its_scale_is_told() -> None:
    graph = graph_of(lambda _, x: _of_itself(_, x, scale=0.3), SELF)
    assert unpadded_attentions(graph) == 1 and node_of(graph, kernel.operator()).args[3] == 0.3


def test_graphs_give_what_they_gave_at_other_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "_DEVICE", "cpu")
    before, after = (graph_of(_of_itself, SELF, device="cpu") for _ in range(2))
    assert unpadded_attentions(after) == 1
    after.recompile()
    generator = torch.Generator().manual_seed(0)
    for batch, tokens in ((2, 16), (3, 65), (2, 9)):
        given = torch.randn(batch, tokens, 3 * 144, generator=generator).half()
        (wanted,), (found,) = before(given), after(given)
        assert torch.equal(found, wanted) and found.stride() == wanted.stride()


def _masked(_: Tensors, x: torch.Tensor) -> torch.Tensor:
    return _of_itself([], x, attn_mask=x.new_ones(1, 1, 1, x.shape[1]))


def _causal(_: Tensors, x: torch.Tensor) -> torch.Tensor:
    return _of_itself([], x, is_causal=True)


def _shared(_: Tensors, x: torch.Tensor) -> torch.Tensor:
    keys = heads(x[..., 144:216], 72)
    return joined(attention(heads(x[..., :144], 72), keys, keys, enable_gqa=True))


def _of_one_row(_: Tensors, x: torch.Tensor) -> torch.Tensor:
    return crossed([], x[..., :144], x[:1, :, 144:], width=72)


def _of_other_heads(_: Tensors, x: torch.Tensor) -> torch.Tensor:
    return _of_itself([], x, 48)


def _of_wide_values(_: Tensors, x: torch.Tensor) -> torch.Tensor:
    return joined(attention(heads(x[..., :72], 72), heads(x[..., 72:144], 72), heads(x[..., 144:224], 80)))


@pytest.mark.parametrize(
    "function", [_masked, _causal, _shared, _of_one_row, _of_other_heads, _of_wide_values], ids=lambda f: f.__name__
)
def test_attention_stays_that_the_kernel_cannot(function: Callable[..., Any]) -> None:
    graph = graph_of(function, SELF)
    assert unpadded_attentions(graph) == 0 and node_of(graph, TORCHS)
    assert unpadded_attentions(graph_of(_of_itself, SELF)) == 1


FEW = LEAST - 1


@pytest.mark.parametrize(
    ("other", "inputs"),
    [
        ({"dtype": torch.float32}, ((2, 1024, 144), (2, 1024, 288))),
        ({"device": "cpu"}, ((2, 1024, 144), (2, 1024, 288))),
        ({}, ((2, 1024, 144), (2, FEW, 288))),
        ({}, ((2, FEW, 144), (2, 1024, 288))),
    ],
    ids=["in 32 bits", "on a CPU", "few keys", "few queries"],
)
def test_attention_stays_that_the_kernel_is_not_for(other: dict[str, Any], inputs: tuple[tuple[int, ...], ...]) -> None:
    def function(_: Tensors, x: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
        return crossed([], x, prompt, width=72)

    graph = graph_of(function, *((sizes, (0, 1)) for sizes in inputs), **other)
    assert unpadded_attentions(graph) == 0 and node_of(graph, TORCHS)
    enough = [((2, LEAST, 144), (0, 1)), ((2, LEAST, 288), (0, 1))]
    assert unpadded_attentions(graph_of(function, *enough, dtype=torch.bfloat16)) == 1


@pytest.mark.parametrize(
    ("card", "version", "asked", "reason"),
    [
        ((9, 0), "2.11.0+cu130", None, None),
        ((9, 0), "2.12.0", None, "needs torch 2.11"),
        ((8, 9), "2.11.0", None, ""),
        ((8, 9), "2.11.0", True, "this card has 8.9"),
    ],
)
def test_it_is_chosen_where_the_kernel_can_be_called_and_the_report_says_where_it_is_missed(
    card: tuple[int, int], version: str, asked: bool | None, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: it is chosen. An empty text: it is not, and nobody expects it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: card)
    monkeypatch.setattr(torch, "__version__", version)
    options = {} if asked is None else {"options": {"fuse.unpadded_attention": asked}}
    compiled = nexfort_engine.compile(torch.nn.Linear(2, 2), options=options)
    found = compiled._nexfort_engine.builder.finder.options("cuda")["nexfort.unpadded_attention"]
    assert found is (reason is None)
    notes = " ".join(note for note in compiled.report.as_dict()["notes"] if "72 and 80" in note)
    assert reason in notes if reason else not notes
    assert CompileConfig.parse("O2").lowering_options("cpu")["nexfort.unpadded_attention"] is False


# ---- lowered ---------------------------------------------------------------------------------------------------------

LAYOUTS: list[Input] = [((2, 1024, 3 * 144), (0, 1)), ((2, 1024, 145), (0, 1)), ((2, 2, 72, 1024), (0, 3))]
ORDERS = BEHIND, PLAIN, BEHIND, OUTERMOST, BEHIND


def _in_layouts(
    one: Callable[..., torch.Tensor], parts: torch.Tensor, odd: torch.Tensor, across: torch.Tensor
) -> Tensors:
    """Heads as parts of rows, which begin anywhere in some of odd lengths, or are computed on the way; keys across, and
    one head of them for all.

    parts (B, L, 432), odd (B, L, 145), across (B, 2, 72, L): keys.
    """
    q, k, v = (heads(part, 72) for part in parts.chunk(3, -1))
    aside = heads(odd[..., 1:], 72)
    given = (
        *((q, k, v, 0.125), (aside, k, v, 0.5), (q * 2, k + 1, v + 1, 0.125), (q, across.mT, aside, 0.125)),
        (q, k[:, :1].expand_as(k), v, 0.125),
    )
    return [one(*arguments, order) for arguments, order in zip(given, ORDERS, strict=True)]


@pytest.mark.skipif(torch.version.cuda is None or torch.cuda.is_available(), reason="a torch for CUDA, without a GPU")
def test_the_kernel_is_told_how_its_tensors_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the card cannot copy from where it lies is handed over as a copy."""
    monkeypatch.setenv("PYTHONPATH", str(Path(gpu_blocks.__file__).parent))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    graph = graph_of(lambda _, *given: _in_layouts(torchs, *given), *LAYOUTS)
    nodes = [node for node in graph.graph.nodes if node.target is TORCHS]
    for node, order in zip(nodes, ORDERS, strict=True):  # as on a card, where it follows the queries
        result = node.meta["val"]
        node.meta["val"] = result.new_empty_strided(result.shape, empty_laid_out(result, order).stride())
    one = dataclasses.replace(gpu_blocks.captured("wide"), graph=graph, lasting=[])
    options: dict[str, object] = {"nexfort.unpadded_attention": True}
    payload = gpu_blocks.lowered(tmp_path, "pretended_worker", ["block"], options, lambda _: one)["block"]
    (code,) = (text for file in payload.rglob("*.py") if "def call(" in (text := file.read_text()))
    call = code.partition("def call(")[2].partition("runner = ")[0]
    view = r"reinterpret_tensor\((\w+), \([^()]*\), \(([^()]*)\), (\w+)\)"
    made = r"(\w+) = (?:empty_strided_cuda\(|reinterpret_tensor\(\w+, )\([^()]*\), \(([^()]*)\)"
    lies = dict(re.findall(made, call))
    lies |= {name: strides for name, strides, _ in re.findall(view, call[call.index("return (") :])}
    launches = re.findall(r"attend_unpadded_in_groups_\d+\.run\((.*)\)", call)
    assert len(launches) == len(ORDERS)
    in_place = []
    for launch in launches:
        tensors = re.findall(rf"{view}|(buf\d+)", launch)[:4]
        strides = [(given or lies[name]).split(", ") for _, given, _, name in tensors]
        assert len(strides) == 4 and all(numbers[-1] == "1" for numbers in strides), launch
        for numbers, (_, _, start, _) in zip(strides, tensors, strict=True):
            assert int(start or 0) % 8 == 0 and numbers[1] != "0", launch
            assert all(number.startswith(("72", "144", "432")) for number in numbers[:-1]), launch
        rest = launch[launch.rindex(tensors[-1][0] or tensors[-1][-1]) :].split(", ")
        assert rest[5:17] == [number for numbers in strides for number in numbers[:-1]], launch
        in_place += [given.split(", ")[2] == "432" for _, given, _, _ in tensors[:3] if given]
    assert sum(in_place) == 8, "parts of rows are read where they lie"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_lowered_operator_is_no_further_from_the_truth_than_eager(dtype: torch.dtype, tmp_path: Path) -> None:
    """At the sizes that it was lowered with and at others, however its tensors lie; what is no number stays so."""
    if torch.cuda.get_device_capability() not in DESCRIPTORS:
        pytest.skip("the kernel is for cards of compute capability 9.0")
    graph = graph_of(lambda _, *given: _in_layouts(kernel.operator(), *given), *LAYOUTS, dtype=dtype)
    lower.lower_graph(graph, [], tmp_path / "payload", {})
    assert any("attend_unpadded_in_groups" in file.read_text() for file in (tmp_path / "payload").rglob("*.py"))
    code = lower.load(tmp_path / "payload", {}, [])
    generator = torch.Generator("cuda").manual_seed(0)
    for batch, tokens in ((2, 1024), (2, 129), (1, 1), (3, 65), (1, 4095), (2, 7), (5, 300), (70, 128)):
        shapes = (batch, tokens, 3 * 144), (batch, tokens, 145), (batch, 2, 72, tokens)
        given = [torch.randn(shape, device="cuda", generator=generator).to(dtype) for shape in shapes]
        truth = _in_layouts(kernel.reference, *(x.double() for x in given))
        eager = _in_layouts(of_copies, *given)
        for ours, plain, right, order in zip(code(given), eager, truth, ORDERS, strict=True):
            assert ours.dtype == dtype and ours.shape == right.shape and ours.permute(*order).is_contiguous()
            far, near = ((x.double() - right).norm() for x in (ours, plain))
            assert far <= 1.1 * near, (batch, tokens, float(far / right.norm()), float(near / right.norm()))
    given[0][0, 3, 0] = float("nan")  # a query of the first row and head
    ours = code(given)[0]
    assert ours[0, 0, 3].isnan().all() and not ours[0, 1].isnan().any() and not ours[1:].isnan().any()
    given[0][0, 3, 144] = float("nan")  # a key
    ours = code(given)[0]
    assert ours[0, 0].isnan().all() and not ours[0, 1].isnan().any() and not ours[1:].isnan().any()
