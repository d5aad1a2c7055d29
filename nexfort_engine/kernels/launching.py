# SPDX-License-Identifier: Apache-2.0
"""Calls of kernels in what Inductor writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def empty(like: Any, sizes: Sequence[Any], dtype: torch.dtype = torch.float32) -> Any:
    """A contiguous tensor with nothing in it, where `like` is, in Inductor's representation."""
    from torch._inductor.lowering import empty_strided

    return empty_strided(sizes, None, dtype=dtype, device=like.get_device())


def launch(kernel: Any, grid: Sequence[Any], written: Sequence[str], arguments: dict[str, Any]) -> None:
    """Have a kernel called that writes to the arguments of these names alone."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
    from torch._inductor import ir

    number = kernel_side_table.add_kernel(kernel)
    called = ir.UserDefinedTritonKernel(
        kernel_idx=number, grid=[tuple(grid)], tma_descriptor_metadata={}, kernel_args=arguments
    )
    # where Inductor cannot read a kernel it takes all of its arguments for written, and copies them
    found = {id(one) for one in called.mutable_args}
    assert found == {id(arguments[name]) for name in written}, f"{kernel} was not understood"
