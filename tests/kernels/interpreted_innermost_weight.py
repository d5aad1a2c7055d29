# SPDX-License-Identifier: Apache-2.0
"""The kernel beside its reference, on weights of odd sizes; to be run with TRITON_INTERPRET=1."""

from __future__ import annotations

import torch
from interpreting import with_numbers

from nexfort_engine.kernels.channels_last_weight import op as channels_last_weight
from nexfort_engine.kernels.channels_last_weight import triton_kernel as kernels

with_numbers()
torch.manual_seed(0)
for shape in ((3, 8, 3, 3), (2, 300, 3, 3), (5, 257, 1, 3), (1, 1, 7, 7), (2, 96, 7, 5), (4, 4, 1, 1), (2, 33, 2, 2)):
    for dtype in channels_last_weight.DTYPES:
        weight = torch.randn(shape).to(dtype)
        # memory that nobody wrote to is not a number
        laid = torch.full((shape[0], *shape[2:], shape[1]), float("nan"), dtype=dtype)
        sizes = channels_last_weight.blocks(shape[2] * shape[3])
        kernels.lay_innermost[(-(-shape[1] // sizes["BLOCK"]), shape[0])](weight, laid, shape[1], **sizes)
        assert torch.equal(laid.permute(0, 3, 1, 2), channels_last_weight.reference(weight)), (shape, dtype)
