# SPDX-License-Identifier: Apache-2.0
"""Attention to few keys: the kernel, and which attention of a graph is computed by it.

What runs the kernel here is Triton's interpreter, in a process of its own.
"""

from __future__ import annotations

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
    launches_of,
    node_of,
    of_copies,
    torchs,
)
from kernel_scripts import run
from large_rows import few
from torch._subclasses import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention as attention

import nexfort_engine
from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.kernels.short_kv_attention import op as kernel
from nexfort_engine.lowering import inductor
from nexfort_engine.passes import short_kv_attention as passes
from nexfort_engine.passes.short_kv_attention import FEW, few_keys_attentions

pytest.importorskip("triton", reason="the kernel is Triton's")


@pytest.mark.parametrize("cases", ["some", pytest.param("all", marks=pytest.mark.large)])
def test_the_kernel_gives_what_plain_torch_gives(cases: str) -> None:
    run("interpreted_few_keys_attention.py", cases, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.parametrize("cards", ["few", pytest.param("all", marks=pytest.mark.large)])
def test_the_kernel_is_compiled_for_every_card(cards: str, tmp_path: Path) -> None:
    run("compiled_few_keys_attention.py", cards, CUDA_VISIBLE_DEVICES="", TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.parametrize("order", [PLAIN, BEHIND, OUTERMOST])
def test_the_operator_knows_its_result_and_how_it_lies(order: tuple[int, ...]) -> None:
    q, k, v = (torch.randn(2, 3, length, 64).half() for length in (5, 7, 7))
    found = kernel.operator()(q, k, v, 0.3, order)
    assert found.permute(*order).is_contiguous() and torch.equal(found, attention(q, k, v, scale=0.3))
    torch.library.opcheck(kernel.operator(), (q, k, v, 0.3, order), raise_exception=True)


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_heads_of_other_sizes_are_told(wrong: int) -> None:
    for mode in (FakeTensorMode(), torch.no_grad()):
        with mode, pytest.raises(ValueError, match="numbers; expected 64 each"):
            kernel.operator()(*(torch.zeros(1, 1, 2, 72 if i == wrong else 64) for i in range(3)), 0.3, PLAIN)


# ---- which attention -------------------------------------------------------------------------------------------------

IMAGE, PROMPT = ((2, 1024, 128), (0, 1)), ((2, 77, 256), (0, 1))  # sizes, and which of them are symbols


@pytest.mark.parametrize(
    ("image", "prompt"),
    [
        (IMAGE, PROMPT),
        (IMAGE, (PROMPT[0], (0,))),
        ((IMAGE[0], (0,)), PROMPT),
        ((IMAGE[0], ()), (PROMPT[0], ())),
        (((2, 77, 128), (0, 1)), PROMPT),
        (IMAGE, ((2, 1, 256), (0,))),
        (IMAGE, ((2, FEW, 256), (0, 1))),
    ],
    ids=["any", "so many keys", "so many queries", "no symbols", "as many, by chance", "one key", "the most"],
)
def test_attention_to_a_prompt_is_computed_so_once(image: Input, prompt: Input) -> None:
    graph = graph_of(crossed, image, prompt)
    before = node_of(graph, TORCHS)
    result, tensors = before.meta["val"], before.args[:3]
    assert few_keys_attentions(graph) == 1 and few_keys_attentions(graph) == 0
    graph.graph.lint()
    written = node_of(graph, kernel.operator())
    assert written.args[:3] == tensors and written.args[3] == 0.125
    found = written.target(*(a.meta["val"] if hasattr(a, "meta") else a for a in written.args))
    assert found.shape == result.shape and found.stride() == result.stride(), "what follows finds it as it was"


def test_its_scale_is_told() -> None:
    graph = graph_of(lambda *given: crossed(*given, scale=0.3), IMAGE, PROMPT)
    assert few_keys_attentions(graph) == 1 and node_of(graph, kernel.operator()).args[3] == 0.3


def test_graphs_give_what_they_gave_at_other_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "_DEVICE", "cpu")
    before, after = (graph_of(crossed, IMAGE, PROMPT, device="cpu") for _ in range(2))
    assert few_keys_attentions(after) == 1
    after.recompile()
    generator = torch.Generator().manual_seed(0)
    for batch, tokens, keys in ((2, 16, 77), (3, 65, 5), (2, 9, 300)):
        given = [
            torch.randn(batch, length, n, generator=generator).half() for length, n in ((tokens, 128), (keys, 256))
        ]
        (wanted,), (found,) = before(*given), after(*given)
        assert torch.equal(found, wanted) and found.stride() == wanted.stride()


SMALL = ((2, 64, 256), (0, 1))  # an image of few tokens, with keys and values beside each other as a prompt's


def _of_itself(_: Tensors, x: torch.Tensor) -> torch.Tensor:
    return crossed([], x[..., :128], x)


def _of_its_pooled_self(_: Tensors, x: torch.Tensor) -> torch.Tensor:
    return crossed([], x[..., :128], x.unflatten(1, (-1, 4)).mean(2))


def _of_both(_: Tensors, x: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
    return crossed([], x[..., :128], torch.cat([prompt, x], 1))


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (_of_itself, [SMALL]),
        (_of_itself, [(SMALL[0], (0,))]),
        (_of_its_pooled_self, [SMALL]),
        (_of_both, [SMALL, PROMPT]),
        pytest.param(_of_both, [SMALL, (PROMPT[0], (0,))], marks=pytest.mark.large),  # the row above is of more sizes
        (crossed, [((2, 77, 128), (0,)), (PROMPT[0], (0,))]),
    ],
)
def test_attention_stays_whose_keys_may_be_an_images(function: Callable[..., Any], inputs: list[Input]) -> None:
    graph = graph_of(function, *inputs)
    assert few_keys_attentions(graph) == 0
    assert 1 <= passes.hint(node_of(graph, TORCHS).args[1].meta["val"].shape[2]) <= FEW


def _masked(_: Tensors, x: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
    return crossed([], x, prompt, attn_mask=x.new_ones(1, 1, 1, prompt.shape[1]))


def _causal(_: Tensors, x: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
    return crossed([], x, prompt, is_causal=True)


def _shared(_: Tensors, x: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
    keys = heads(prompt[..., :64])
    return joined(attention(heads(x), keys, keys, enable_gqa=True))


def _of_one_head(_: Tensors, x: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
    keys = heads(prompt[..., :64])
    return joined(attention(heads(x), keys, keys))


def _of_one_row(_: Tensors, x: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
    return crossed([], x, prompt[:1])


def _wide(_: Tensors, x: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
    keys, values = prompt[..., :144].chunk(2, -1)
    return joined(attention(heads(x[..., :72], 72), heads(keys, 72), heads(values, 72)))


def _narrow_values(_: Tensors, x: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
    return joined(attention(heads(x), heads(prompt[..., :128]), heads(prompt[..., :64], 32)))


@pytest.mark.parametrize(
    "function",
    few([_masked, _causal, _shared, _of_one_head, _of_one_row, _wide, _narrow_values], (_masked, _wide)),
    ids=lambda f: f.__name__,
)
def test_attention_stays_that_the_kernel_cannot(function: Callable[..., Any]) -> None:
    graph = graph_of(function, IMAGE, PROMPT)
    assert few_keys_attentions(graph) == 0 and node_of(graph, TORCHS)
    assert few_keys_attentions(graph_of(crossed, IMAGE, PROMPT)) == 1


@pytest.mark.parametrize(
    "other",
    [{"dtype": torch.float32}, {"device": "cpu"}, {"prompt": ((2, FEW + 1, 256), (0, 1))}],
    ids=["in 32 bits", "on a CPU", "many keys"],
)
def test_attention_stays_that_the_kernel_is_not_for(other: dict[str, Any]) -> None:
    graph = graph_of(crossed, IMAGE, other.pop("prompt", PROMPT), **other)
    assert few_keys_attentions(graph) == 0 and node_of(graph, TORCHS)
    assert few_keys_attentions(graph_of(crossed, IMAGE, PROMPT, dtype=torch.bfloat16)) == 1


def _mixed(node: Any) -> None:
    node.args[2].meta["val"] = node.args[2].meta["val"].bfloat16()


def _of_unknown_keys(node: Any) -> None:
    q, k, v = (part.meta["val"] for part in node.args[:3])
    unknown = q.fake_mode.shape_env.create_unbacked_symint()
    for part, x in zip(node.args[1:3], (k, v), strict=True):
        part.meta["val"] = x.new_empty(*x.shape[:2], unknown, x.shape[3])


def _of_unknown_order(node: Any) -> None:
    result = node.meta["val"]
    unknown = result.fake_mode.shape_env.create_unbacked_symint()
    node.meta["val"] = result.new_empty(*result.shape[:2], unknown, result.shape[3])


def _of_numbers_apart(node: Any) -> None:
    node.meta["val"] = node.meta["val"].mT.contiguous().mT


@pytest.mark.parametrize("change", [_mixed, _of_unknown_keys, _of_unknown_order, _of_numbers_apart])
def test_attention_stays_of_which_only_a_call_knows_enough(change: Callable[[Any], None]) -> None:
    graph = graph_of(crossed, IMAGE, PROMPT)
    change(node_of(graph, TORCHS))
    assert few_keys_attentions(graph) == 0 and node_of(graph, TORCHS)


@pytest.mark.parametrize(
    ("card", "asked", "expected"),
    [((9, 0), None, True), ((9, 0), False, False), ((8, 9), None, False), ((8, 9), True, True), ((10, 0), None, False)],
)
def test_it_is_chosen_where_it_was_measured_or_asked_for(
    card: tuple[int, int], asked: bool | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: card)
    options = {} if asked is None else {"options": {"fuse.few_keys_attention": asked}}
    compiled = nexfort_engine.compile(torch.nn.Linear(2, 2), options=options)
    assert compiled._nexfort_engine.builder.finder.options("cuda")["nexfort.few_keys_attention"] is expected
    assert CompileConfig.parse("O2").lowering_options("cpu")["nexfort.few_keys_attention"] is False


# ---- lowered ---------------------------------------------------------------------------------------------------------

LAYOUTS = ((2, 1024, 129), (0, 1)), ((2, 77, 256), (0, 1)), ((2, 2, 64, 77), (0, 3))
ORDERS = BEHIND, PLAIN, BEHIND, OUTERMOST


def _in_layouts(
    one: Callable[..., torch.Tensor], x: torch.Tensor, prompt: torch.Tensor, across: torch.Tensor
) -> Tensors:
    """Heads as parts of rows, which begin anywhere in some of odd lengths or are computed on the way; keys across.

    x (B, L, 129), prompt (B, S, 256), across (B, 2, 64, S): keys.
    """
    q, aside = heads(x[..., 1:]), heads(x[..., :-1].contiguous())
    k, v = (heads(part) for part in prompt.chunk(2, -1))
    given = (q, k, v, 0.125), (aside, k, v, 0.5), (aside * 2, k + 1, v + 1, 0.125), (q, across.mT, v, 0.125)
    return [one(*arguments, order) for arguments, order in zip(given, ORDERS, strict=True)]


@pytest.mark.skipif(torch.version.cuda is None or torch.cuda.is_available(), reason="a torch for CUDA, without a GPU")
@pytest.mark.large  # lowering/test_lower_ahead.py lowers this kernel, and has it for that of attention in 8 bits
def test_the_kernel_is_told_how_its_tensors_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that lie as Inductor likes, and of which it says something else before it knows."""
    monkeypatch.setenv("PYTHONPATH", str(Path(gpu_blocks.__file__).parent))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    launches = launches_of(
        *(tmp_path, "few_keys_attention", "attend_few"),
        *(lambda _, *given: _in_layouts(torchs, *given), LAYOUTS, ORDERS),
    )
    assert len(launches) == len(ORDERS)
    for launch in launches:
        assert len(launch.strides) == 4 and all(numbers[-1] == "1" for numbers in launch.strides), launch
        queries, keys, heads = launch.rest[:3]
        assert queries != keys and heads == "2", launch
        assert launch.rest[3:15] == [number for numbers in launch.strides for number in numbers[:-1]], launch
        assert re.fullmatch(rf"2\*s\d+\*\(\(63 \+ {queries}\) // 64\)", launch.rest[15]), launch


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_lowered_operator_is_no_further_from_the_truth_than_eager(dtype: torch.dtype, tmp_path: Path) -> None:
    """At the sizes that it was lowered with and at others, however its tensors lie."""
    graph = graph_of(lambda _, *given: _in_layouts(kernel.operator(), *given), *LAYOUTS, dtype=dtype)
    inductor.lower_graph(graph, [], tmp_path / "payload", {})
    assert any("attend_few" in file.read_text() for file in (tmp_path / "payload").rglob("*.py"))
    code = inductor.load(tmp_path / "payload", {}, [])
    generator = torch.Generator("cuda").manual_seed(0)
    for batch, queries, keys in ((2, 1024, 77), (1, 1, 1), (3, 65, 128), (2, 130, 231), (1, 4095, 33), (2, 7, 600)):
        shapes = (batch, queries, 129), (batch, keys, 256), (batch, 2, 64, keys)
        given = [torch.randn(shape, device="cuda", generator=generator).to(dtype) for shape in shapes]
        truth = _in_layouts(kernel.reference, *(x.double() for x in given))
        eager = _in_layouts(of_copies, *given)
        for ours, plain, right, order in zip(code(given), eager, truth, ORDERS, strict=True):
            assert ours.dtype == dtype and ours.shape == right.shape and ours.permute(*order).is_contiguous()
            far, near = ((x.double() - right).norm() for x in (ours, plain))
            assert far <= 1.1 * near, (batch, queries, keys, float(far / right.norm()), float(near / right.norm()))
