# SPDX-License-Identifier: Apache-2.0
"""cuDNN's attention on a real card: near to float64, whichever kernel a call's sizes choose."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from nexfort_engine.attention import cudnn

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "keys"), [(cudnn.LEAST, cudnn.LEAST), (4224, 4224), (1111, 2047), (64, 4096), (1, 1)])
@pytest.mark.parametrize(("width", "groups"), [(64, 8), (128, 8), (128, 2), (72, 8)])
def test_its_error_is_that_of_torchs_choice(dtype: torch.dtype, rows: int, keys: int, width: int, groups: int) -> None:
    torch.manual_seed(rows + width)
    shapes = [(1, rows, 8, width), (1, keys, groups, width), (1, keys, groups, width)]
    q, k, v = (torch.randn(shape, device="cuda").to(dtype).transpose(1, 2) for shape in shapes)
    exact = functional.scaled_dot_product_attention(*(t.double() for t in (q, k, v)), enable_gqa=groups != 8)
    eager = functional.scaled_dot_product_attention(q, k, v, enable_gqa=groups != 8)
    found = cudnn.operator()(q, k, v, False, None, groups != 8, [0, 2, 1, 3])
    errors = [float((t.double() - exact).norm() / exact.norm()) for t in (found, eager)]
    assert errors[0] <= 1.1 * errors[1] + 1e-6
    assert found.transpose(1, 2).is_contiguous()


def test_a_replay_gives_what_the_call_gave() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2048, 4, 128, device="cuda").bfloat16().transpose(1, 2) for _ in range(3))
    wanted = cudnn.operator()(q, k, v, False, None, False, [0, 2, 1, 3])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = cudnn.operator()(q, k, v, False, None, False, [0, 2, 1, 3])
    graph.replay()
    assert torch.equal(found, wanted)
