# SPDX-License-Identifier: Apache-2.0
"""Attention by cuDNN's kernel: where the operator is written, and what it gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_blocks import captured
from torch.nn import functional

from nexfort_engine.attention import cudnn
from nexfort_engine.passes.cudnn_attention import cudnn_attentions

TORCHS = torch.ops.aten.scaled_dot_product_attention.default


def count(graph: Any, target: Any) -> int:
    return sum(node.target is target for node in graph.graph.nodes)


@pytest.mark.parametrize(("kind", "written", "left"), [("transformer", 1, 0), ("masked", 1, 1), ("feed_forward", 0, 0)])
def test_only_attention_without_a_mask_is_written(kind: str, written: int, left: int) -> None:
    graph = captured(kind).graph
    assert cudnn_attentions(graph) == written and cudnn_attentions(graph) == 0
    graph.graph.lint()
    assert (count(graph, TORCHS), count(graph, cudnn.operator())) == (left, written)


def tensors(rows: int, keys: int, groups: int = 4) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(rows)
    given = [(2, rows, 4, 64), (2, keys, groups, 64), (2, keys, groups, 64)]
    return tuple(torch.randn(shape).bfloat16().transpose(1, 2) for shape in given)


@pytest.mark.parametrize("rows", [1, 16, cudnn.LEAST, cudnn.LEAST + 3])
@pytest.mark.parametrize(("causal", "groups"), [(False, 4), (True, 4), (False, 2)])
def test_the_result_is_torchs_and_lies_as_asked_for(rows: int, causal: bool, groups: int) -> None:
    q, k, v = tensors(rows, rows, groups)
    wanted = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.1, enable_gqa=groups != 4)
    for order in ([0, 2, 1, 3], [0, 1, 2, 3]):
        found = cudnn.operator()(q, k, v, causal, 0.1, groups != 4, order)
        assert torch.equal(found, wanted)
        lies = torch.empty_permuted(found.shape, order).stride()
        assert all(n == 1 or one == other for n, one, other in zip(found.shape, found.stride(), lies, strict=True))


def test_the_operator_keeps_torchs_rules() -> None:
    q, k, v = tensors(8, 12)
    names = ("test_schema", "test_faketensor")
    found = torch.library.opcheck(cudnn.operator(), (q, k, v, False, None, False, [0, 2, 1, 3]), test_utils=names)
    assert set(found.values()) == {"SUCCESS"}


class _Pretended(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    @property
    def is_cuda(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("rows", "keys", "enabled", "takes", "wanted"),
    [
        (cudnn.LEAST, cudnn.LEAST, True, True, True),
        (cudnn.LEAST - 1, cudnn.LEAST, True, True, False),
        (cudnn.LEAST, cudnn.LEAST - 1, True, True, False),
        (cudnn.LEAST, cudnn.LEAST, False, True, False),
        (cudnn.LEAST, cudnn.LEAST, True, False, False),
    ],
)
def test_a_call_decides_by_its_sizes_and_by_what_the_user_switched_off(
    rows: int, keys: int, enabled: bool, takes: bool, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: enabled)
    monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda params: asked.append(params) or takes)
    monkeypatch.setattr(cudnn, "_takes", {})
    q, k, v = tensors(rows, keys)
    for _ in range(2):
        assert cudnn._is_for_cudnn(q.as_subclass(_Pretended), k, v, False, False) is wanted
    assert not cudnn._is_for_cudnn(q, k, v, False, False), "these lie in main memory"
    assert len(asked) == (enabled and min(rows, keys) >= cudnn.LEAST), "torch is asked once"
