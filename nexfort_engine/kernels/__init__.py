# SPDX-License-Identifier: Apache-2.0
"""Kernels: operators whose Triton code is written here, where what Inductor writes leaves time.

One operator a file: its kernels, the same in plain torch beside them (`reference`, which is also what runs where a
graph is not lowered for a GPU), and how it is lowered: Inductor calls the kernels on the tensors as they lie in memory,
so they are part of an artefact as its own are. registering.py, laying.py and launching.py serve all. A pass puts the
operator in a graph (passes/). Nothing here imports Triton before a graph is lowered for a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from . import (
    convolution,
    few_keys_attention,
    gated_linear,
    group_factors,
    grouped_linear,
    innermost_weight,
    narrow_attention,
    narrow_gated_linear,
    unpadded_attention,
    upsampled_convolution,
)


@contextmanager
def known_to_inductor(*, convolutions: bool = False) -> Iterator[None]:
    """Inside the block, which is in `flags.inductor_scope`, Inductor lowers these operators by their kernels.

    convolutions: those of torch, too.
    """
    from torch._inductor.lowering import lowerings

    each = (
        *(few_keys_attention, gated_linear, group_factors, grouped_linear, innermost_weight),
        *(narrow_attention, narrow_gated_linear, unpadded_attention, upsampled_convolution),
    )
    ours = {operator: lower for one in each for operator, lower in one.lowerings().items() if operator not in lowerings}
    with ExitStack() as stack:
        for operator, lower in ours.items():
            lowerings[operator] = lower
            stack.callback(lowerings.pop, operator)
        if convolutions:
            operator = torch.ops.aten.convolution.default
            stack.callback(lowerings.__setitem__, operator, lowerings[operator])
            lowerings[operator] = convolution.lowering(lowerings[operator])
        yield
