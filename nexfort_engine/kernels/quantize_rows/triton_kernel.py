# SPDX-License-Identifier: Apache-2.0
"""The kernel of `quantize_rows`. Imported by what lowers for a GPU alone."""

import triton
import triton.language as tl

LARGEST_HALF = tl.constexpr(65504.0)
LARGEST_BFLOAT16 = tl.constexpr(3.38953139e38)
SMALLEST_HALF = tl.constexpr(6.103515625e-05)  # a scale below it may be 0 in 16 bits
SMALLEST_SCALE = tl.constexpr(1e-30)
ROUNDING = tl.constexpr(12582912.0)  # 1.5 * 2**23: a small number added to it is rounded to a whole one, ties to even
GELU_TANH = tl.constexpr(1)
GELU = tl.constexpr(2)
SWIGLU = tl.constexpr(3)
RMS_NORM = tl.constexpr(4)
LAYER_NORM = tl.constexpr(5)


@triton.jit
def quantize(
    x,
    second,
    weight,
    bias,
    factor,
    shift,
    out,
    scales,
    tokens,
    x_batch,
    x_token,
    second_batch,
    second_token,
    factor_batch,
    factor_token,
    shift_batch,
    shift_token,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr,
    FACTOR: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    SHIFTED: tl.constexpr,
):
    """One row (INNER) of x (batch, tokens, INNER) as int8 to out (rows, INNER), with its scale to scales (rows).

    A program computes one row: KIND of x, times weight plus bias (INNER each), times factor (or one more) plus shift,
    rounded to the dtype of x; rotated in groups of GROUP numbers, or not at all for 0; rounded. second is as x is, and
    read for SWIGLU alone. What has strides of batch and token is as x is, or one row for several. BLOCK is the next
    power of 2 from INNER on, 256 at least. INNER is a multiple of GROUP.
    """
    row = tl.program_id(0)
    batch = (row // tokens).to(tl.int64)
    token = (row % tokens).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < INNER
    value = tl.load(x + batch * x_batch + token * x_token + at, mask=inside, other=0.0).to(tl.float32)
    if KIND == GELU_TANH:
        value = value * _sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))
    elif KIND == GELU:
        value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    elif KIND == SWIGLU:
        up = tl.load(second + batch * second_batch + token * second_token + at, mask=inside, other=0.0)
        value = value * _sigmoid(value) * up.to(tl.float32)
    elif KIND == RMS_NORM:
        value = value * tl.rsqrt(tl.sum(value * value) / INNER + EPS)
    elif KIND == LAYER_NORM:
        value = tl.where(inside, value - tl.sum(value) / INNER, 0.0)
        value = value * tl.rsqrt(tl.sum(value * value) / INNER + EPS)
    if WEIGHTED:
        value = value * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        value = value + tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    if FACTOR:
        by = tl.load(factor + batch * factor_batch + token * factor_token + at, mask=inside, other=0.0).to(tl.float32)
        value = value * (by + 1.0 if PLUS_ONE else by)
    if SHIFTED:
        by = tl.load(shift + batch * shift_batch + token * shift_token + at, mask=inside, other=0.0)
        value = value + by.to(tl.float32)
    dtype: tl.constexpr = x.dtype.element_ty
    given = value.to(dtype)
    value = _rotated(given, GROUP, BLOCK) if GROUP > 0 else given.to(tl.float32)
    largest = tl.max(tl.where(value == value, tl.abs(value), 0.0))
    largest = tl.minimum(largest, LARGEST_HALF if dtype == tl.float16 else LARGEST_BFLOAT16)
    scale = tl.maximum(largest * (1.0 / 127.0), SMALLEST_SCALE)
    tl.store(scales + row, scale)
    step = _rounded(scale, dtype)
    step = tl.where(step == 0.0, SMALLEST_HALF, step)
    steps = _rounded(tl.div_rn(_rounded(value, dtype), step + tl.zeros_like(value)), dtype)
    steps = tl.where(steps == steps, steps, -128.0)
    steps = tl.minimum(tl.maximum(steps, -128.0), 127.0)
    steps = (steps + ROUNDING) - ROUNDING
    tl.store(out + row.to(tl.int64) * INNER + at, steps.to(tl.int8), mask=inside)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    """Numbers in 32 bits as if they had been written in this dtype."""
    return x.to(dtype).to(tl.float32)


@triton.jit
def _rotated(x, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Every GROUP numbers (16, 64 or 256) of x (BLOCK) times the normalised Hadamard matrix of that size, in 32 bits.

    Such a matrix is the Kronecker product of smaller ones, so a group is rotated in two products with one of 16 by 16:
    along its rows of 16 numbers, and across them. Groups of 64 have four such rows, so that four columns at a time are
    rotated by a matrix with four small ones on its diagonal. What was computed is multiplied in two parts of bfloat16,
    which keep 16 bits of it.
    """
    lines: tl.constexpr = BLOCK // 16
    within = tl.dot(tl.reshape(x, [lines, 16]), _hadamard(4, x.dtype)) * 0.25
    if GROUP == 16:
        return tl.reshape(within, [BLOCK])
    each: tl.constexpr = 0.25 if GROUP == 256 else 0.5
    if GROUP == 256:
        within = tl.permute(tl.reshape(within, [BLOCK // 256, 16, 16]), [0, 2, 1])
    else:
        within = tl.permute(tl.reshape(within, [BLOCK // 64, 4, 16]), [0, 2, 1])
    within = tl.reshape(within, [lines, 16])
    matrix = _hadamard(4 if GROUP == 256 else 1, tl.bfloat16)
    finite = tl.minimum(tl.maximum(within, -LARGEST_BFLOAT16), LARGEST_BFLOAT16)
    within = tl.where(within == within, finite, within)  # what is infinite times 0 would be no number
    high = within.to(tl.bfloat16)
    low = (within - high.to(tl.float32)).to(tl.bfloat16)
    across = tl.dot(low, matrix, tl.dot(high, matrix)) * each
    if GROUP == 256:
        across = tl.permute(tl.reshape(across, [BLOCK // 256, 16, 16]), [0, 2, 1])
    else:
        across = tl.permute(tl.reshape(across, [BLOCK // 64, 16, 4]), [0, 2, 1])
    return tl.reshape(across, [BLOCK])


@triton.jit
def _hadamard(OUTER: tl.constexpr, dtype: tl.constexpr):
    """The regular Hadamard matrix of 16 (OUTER 4), or four of 4 on a diagonal (OUTER 1), with 1 and -1 as numbers."""
    i = tl.arange(0, 16)[:, None]
    j = tl.arange(0, 16)[None, :]
    inner = tl.where(i % 4 + j % 4 == 3, -1.0, 1.0)
    if OUTER == 4:
        return (inner * tl.where(i // 4 + j // 4 == 3, -1.0, 1.0)).to(dtype)
    return tl.where(i // 4 == j // 4, inner, 0.0).to(dtype)
