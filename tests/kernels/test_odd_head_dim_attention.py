# SPDX-License-Identifier: Apache-2.0
"""Attention of heads that libraries pad: the kernels, and which attention of a graph is computed by them.

What runs the one that Inductor reads is Triton's interpreter, in a process of its own.
"""

from __future__ import annotations

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
    launches_of,
    node_of,
    of_copies,
    torchs,
)
from kernel_scripts import run
from large_rows import few
from torch._subclasses import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention as attention

from nexfort_engine.kernels.gluon_support import DESCRIPTORS
from nexfort_engine.kernels.odd_head_dim_attention import op as kernel
from nexfort_engine.lowering import inductor
from nexfort_engine.passes import odd_head_dim_attention as passes
from nexfort_engine.passes.odd_head_dim_attention import LEAST, unpadded_attentions

pytest.importorskip("triton", reason="the kernels are Triton's")


def test_the_kernel_that_inductor_reads_gives_what_plain_torch_gives() -> None:
    run("interpreted_unpadded_attention.py", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.parametrize("kinds", ["few", pytest.param("all", marks=pytest.mark.large)])
def test_the_kernel_is_compiled_for_its_card(kinds: str, tmp_path: Path) -> None:
    run("compiled_unpadded_attention.py", kinds, CUDA_VISIBLE_DEVICES="", TRITON_CACHE_DIR=str(tmp_path))


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


def _of_values_of_one_row(_: Tensors, x: torch.Tensor) -> torch.Tensor:
    values = heads(x[:1, :, 288:], 72).expand(x.shape[0], -1, -1, -1)[:1]
    return joined(attention(heads(x[..., :144], 72), heads(x[..., 144:288], 72), values))


def _scaled_down(_: Tensors, x: torch.Tensor) -> torch.Tensor:
    return _of_itself([], x, scale=-0.3)


def _not_scaled(_: Tensors, x: torch.Tensor) -> torch.Tensor:
    return _of_itself([], x, scale=0.0)


def _of_other_heads(_: Tensors, x: torch.Tensor) -> torch.Tensor:
    return _of_itself([], x, 48)


def _of_wide_values(_: Tensors, x: torch.Tensor) -> torch.Tensor:
    return joined(attention(heads(x[..., :72], 72), heads(x[..., 72:144], 72), heads(x[..., 144:224], 80)))


@pytest.mark.parametrize(
    "function",
    [
        *(_masked, _causal),
        *few(
            (_of_other_heads, _shared, _of_one_row, _of_values_of_one_row, _scaled_down, _not_scaled, _of_wide_values),
            [],
        ),
    ],
    ids=lambda f: f.__name__,
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


# ---- lowered ---------------------------------------------------------------------------------------------------------

ORDERS = BEHIND, PLAIN, BEHIND, OUTERMOST, BEHIND


def _layouts(width: int, batch: int = 2, queries: int = 1024, keys: int = 1025) -> list[Input]:
    """What `_in_layouts` takes: all sizes but widths are symbols."""
    rows = (batch, queries, 6 * width), (batch, queries, 2 * width + 1), (batch, keys, 4 * width)
    return [*((sizes, (0, 1)) for sizes in rows), ((batch, 2, width, keys), (0, 3))]


def _in_layouts(
    one: Callable[..., torch.Tensor],
    rows: torch.Tensor,
    odd: torch.Tensor,
    more: torch.Tensor,
    across: torch.Tensor,
    count: int = len(ORDERS),
) -> Tensors:
    """Heads as parts of rows, which begin anywhere in some of odd lengths, or are computed on the way; keys across, and
    one head of them for all; to other rows and to their own.
    """
    width = across.shape[2]
    q, k, v = (heads(part, width) for part in rows.chunk(3, -1))
    keys, values = (heads(part, width) for part in more.chunk(2, -1))
    aside = heads(odd[..., 1:], width)
    given = (
        *((q, k, v, 0.125), (aside, keys, values, 0.5), (q * 2, keys + 1, values + 1, 0.125)),
        *((q, across.mT, values, 0.125), (q, keys[:, :1].expand_as(keys), values, 0.125)),
    )
    return [one(*arguments, order) for arguments, order in zip(given[:count], ORDERS[:count], strict=True)]


@pytest.mark.skipif(torch.version.cuda is None or torch.cuda.is_available(), reason="a torch for CUDA, without a GPU")
@pytest.mark.parametrize(
    ("count", "read"),
    [(2, 5), pytest.param(len(ORDERS), 9, marks=pytest.mark.large)],  # the first are parts of rows, one behind one
    ids=["some", "all"],
)
def test_the_kernel_is_told_how_its_tensors_lie(
    count: int, read: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the card cannot copy from where it lies is handed over as a copy."""
    monkeypatch.setenv("PYTHONPATH", str(Path(gpu_blocks.__file__).parent))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    launches = launches_of(
        *(tmp_path, "unpadded_attention", "attend_unpadded_in_groups"),
        *(lambda _, *given: _in_layouts(torchs, *given, count), _layouts(72), ORDERS[:count]),
    )
    assert len(launches) == count
    in_place = []
    for launch in launches:
        assert len(launch.strides) == 4 and all(numbers[-1] == "1" for numbers in launch.strides), launch
        for numbers, start in zip(launch.strides, launch.starts, strict=True):
            assert start % 8 == 0 and numbers[1] != "0", launch
            assert all(number.startswith(("72", "144", "288", "432")) for number in numbers[:-1]), launch
        assert launch.rest[4:16] == [number for numbers in launch.strides for number in numbers[:-1]], launch
        parts = zip(launch.strides[:3], launch.views[:3], strict=True)
        in_place += [numbers[2] in ("432", "288") for numbers, is_view in parts if is_view]
    assert sum(in_place) == read, "parts of rows are read where they lie"


# batch, queries, keys; with two heads. Single queries so often that chance decides nothing. Of the last three a card
# has more parts than it computes at once, of many blocks
SIZES = [
    *((2, 1024, 1025), (2, 129, 1), (30, 1, 600), (3, 65, 128), (1, 4095, 4096), (2, 7, 129), (5, 300, 77)),
    *((70, 128, 128), (40, 257, 129), (40, 300, 385), (24, 700, 1000)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("width", kernel.WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_lowered_operator_is_no_further_from_the_truth_than_eager(
    dtype: torch.dtype, width: int, tmp_path: Path
) -> None:
    """At the sizes that it was lowered with and at others, however its tensors lie; what is no number stays so."""
    if torch.cuda.get_device_capability() not in DESCRIPTORS:
        pytest.skip("the kernel is for cards of compute capability 9.0")
    graph = graph_of(lambda _, *given: _in_layouts(kernel.operator(), *given), *_layouts(width), dtype=dtype)
    inductor.lower_graph(graph, [], tmp_path / "payload", {})
    assert any("attend_unpadded_in_groups" in file.read_text() for file in (tmp_path / "payload").rglob("*.py"))
    code = inductor.load(tmp_path / "payload", {}, [])
    generator = torch.Generator("cuda").manual_seed(0)
    for size in SIZES:
        shapes = [sizes for sizes, _ in _layouts(width, *size)]
        given = [torch.randn(shape, device="cuda", generator=generator).to(dtype) for shape in shapes]
        truth = _in_layouts(kernel.reference, *(x.double() for x in given))
        eager = _in_layouts(of_copies, *given)
        for ours, plain, right, order in zip(code(given), eager, truth, ORDERS, strict=True):
            assert ours.dtype == dtype and ours.shape == right.shape and ours.permute(*order).is_contiguous()
            far, near = ((x.double() - right).norm() for x in (ours, plain))
            assert far <= 1.1 * near, (size, float(far / right.norm()), float(near / right.norm()))
    given[0][0, 3, 0] = float("nan")  # a query of the first row and head
    ours = code(given)[0]
    assert ours[0, 0, 3].isnan().all() and not ours[0, 1].isnan().any() and not ours[1:].isnan().any()
    given[0][0, 3, 2 * width] = float("nan")  # a key
    ours = code(given)[0]
    assert ours[0, 0].isnan().all() and not ours[0, 1].isnan().any() and not ours[1:].isnan().any()
