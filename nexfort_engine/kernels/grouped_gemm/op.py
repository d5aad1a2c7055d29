# SPDX-License-Identifier: Apache-2.0
"""Linear layers of equal sizes that are given the same few rows: one launch for all.

Keys and values of a prompt are such: ten layers of SDXL multiply the same 154 rows by twenty weights, a product each of
5 to 7 microseconds, which no card is filled by. Microseconds so and by cuBLAS, one after another (fp16, H200, torch
2.11, in a graph, 2026-11): 20 times 2048 to 1280 52 and 129, of 77 rows 45 and 123, of 308 77 and 134, of 512 119 and
147; of 154 rows 4 times 2048 to 640 10.6 and 23.6, 2 times 1024 to 320 5.6 and 8.8, to 1280 6.1 and 10.0.
"""

from __future__ import annotations

import functools
import operator as operators
from collections.abc import Sequence
from typing import Any

import torch

from ..inductor_launch import empty, launch
from ..layouts import contiguous
from ..op_registry import registered

MOST = 20  # weights of a launch, which are arguments of the kernel
SMALLEST = 64  # numbers of a block: sizes are multiples of it
_LARGE = 8192  # columns of all weights from which on wider blocks fill a card
DTYPES = (torch.float16, torch.bfloat16)


def reference(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """x (..., K) times each of the weights (N, K), as `torch.nn.functional.linear` without a bias: (..., N) each."""
    return [torch.nn.functional.linear(x, weight) for weight in weights]


def blocks(count: int, columns: int, inner: int) -> dict[str, int]:
    """How large a part of a product a program computes, and in what steps."""
    wide = columns % 128 == 0 and count * columns >= _LARGE
    deep = not wide and inner % 128 == 0
    return {"M_BLOCK": 64, "N_BLOCK": 128 if wide else SMALLEST, "K_BLOCK": 128 if deep else SMALLEST}


@functools.cache
def operator() -> Any:
    """The operator `nexfort::grouped_linear`, as `reference` is."""
    return registered(
        "grouped_linear(Tensor x, Tensor[] weights) -> Tensor[]",
        reference,
        lambda x, weights: [x.new_empty([*x.shape[:-1], weight.shape[0]]) for weight in weights],
    )


def lowerings() -> dict[Any, Any]:
    """The operator and what Inductor calls for it."""
    return {operator(): _lower}


def _lower(x: Any, weights: Sequence[Any]) -> list[Any]:
    """As `reference`, in Inductor's representation."""
    from torch._inductor.lowering import select, view

    before = x.get_size()[:-1]
    rows = functools.reduce(operators.mul, before, 1)
    x = contiguous(view(x, [rows, x.get_size()[-1]]))
    results = []
    for start in range(0, len(weights), MOST):
        some = [contiguous(weight) for weight in weights[start : start + MOST]]
        made = _launch(x, rows, some)
        results += [view(select(made, 0, i), [*before, some[0].get_size()[0]]) for i in range(len(some))]
    return results


def _launch(x: Any, rows: Any, weights: list[Any]) -> Any:
    from torch.utils._sympy.functions import CeilDiv

    from . import triton_kernel as kernels

    columns, inner = (int(size) for size in weights[0].get_size())
    made = empty(x, [len(weights), rows, columns], x.get_dtype())
    block = blocks(len(weights), columns, inner)
    given = [*weights, *weights[:1] * (MOST - len(weights))]
    launch(
        kernels.multiply_rows,
        [CeilDiv(rows, block["M_BLOCK"]) * (columns // block["N_BLOCK"]) * len(weights), 1, 1],
        ["out"],
        {"x": x, **{f"w{i}": weight for i, weight in enumerate(given)}, "out": made, "rows": rows}
        | {"P": len(weights), "COLUMNS": columns, "INNER": inner, **block},
    )
    return made
