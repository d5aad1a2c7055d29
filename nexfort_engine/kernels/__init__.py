# SPDX-License-Identifier: Apache-2.0
"""Kernels: operators whose Triton code is written here, where what Inductor writes leaves time.

One operator a file: its kernels, the same in plain torch beside them (`reference`, which is also what runs where a
graph is not lowered for a GPU), and how it is lowered: Inductor calls the kernels on the tensors as they lie in memory,
so they are part of an artefact as its own are. op_registry.py, layouts.py and inductor_launch.py serve all. A pass puts
the operator in a graph (passes/). Nothing here imports Triton before a graph is lowered for a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from .channels_last_weight import op as innermost_weight
from .conv3x3 import op as convolution
from .conv3x3 import upsample_op as upsampled_convolution
from .geglu_linear import fp8_op as narrow_gated_linear
from .geglu_linear import op as gated_linear
from .group_norm_scale import op as group_factors
from .grouped_gemm import op as grouped_linear
from .low_precision_attention import op as narrow_attention
from .odd_head_dim_attention import op as unpadded_attention
from .quantize_rows import op as quantize_rows
from .scaled_linear import op as scaled_linear
from .short_kv_attention import op as few_keys_attention


@contextmanager
def known_to_inductor(*, convolutions: bool = False) -> Iterator[None]:
    """Inside the block, which is in `process_settings.inductor_scope`, Inductor lowers these operators by their
    kernels.

    convolutions: those of torch, too.
    """
    from torch._inductor.lowering import lowerings

    each = (
        *(few_keys_attention, gated_linear, group_factors, grouped_linear, innermost_weight),
        *(narrow_attention, narrow_gated_linear, unpadded_attention, upsampled_convolution),
        *(quantize_rows, scaled_linear),
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
