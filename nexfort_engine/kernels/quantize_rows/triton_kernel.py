# SPDX-License-Identifier: Apache-2.0
"""The kernel of `quantize_rows`. Imported by what lowers for a GPU alone."""

import triton
import triton.language as tl

LARGEST_HALF = tl.constexpr(65504.0)
LARGEST_BFLOAT16 = tl.constexpr(3.38953139e38)
LARGEST_POWER = tl.constexpr(1.298074214633707e33)  # 2**110
SMALLEST_HALF = tl.constexpr(6.103515625e-05)  # a scale below it may be 0 in 16 bits
SMALLEST_SCALE = tl.constexpr(1e-30)
ROUNDING = tl.constexpr(12582912.0)  # 1.5 * 2**23: a small number added to it is rounded to a whole one, ties to even
BFLOAT16_ROUNDING = tl.constexpr(98304.0)  # 1.5 * 2**16: the same of a number between 1 and 2, to 8 bits
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
    REST: tl.constexpr,
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
    read for SWIGLU alone. What has strides of batch and token is as x is, or one row for several. BLOCK and REST are
    powers of 2 from 256 on, or REST is 0; together they are at least INNER. INNER is a multiple of GROUP.
    """
    row = tl.program_id(0)
    batch = (row // tokens).to(tl.int64)
    token = (row % tokens).to(tl.int64)
    x += batch * x_batch + token * x_token
    second += batch * second_batch + token * second_token
    factor += batch * factor_batch + token * factor_token
    shift += batch * shift_batch + token * shift_token
    dtype: tl.constexpr = x.dtype.element_ty
    at = tl.arange(0, BLOCK)
    value = _read(x, second, at, KIND, INNER)
    if REST > 0:
        at_rest = BLOCK + tl.arange(0, REST)
        rest = _read(x, second, at_rest, KIND, INNER)
    if KIND == LAYER_NORM:
        mean = tl.sum(value)
        if REST > 0:
            mean += tl.sum(rest)
            rest = tl.where(at_rest < INNER, rest - mean / INNER, 0.0)
        value = tl.where(at < INNER, value - mean / INNER, 0.0)
    if KIND >= RMS_NORM:
        squares = tl.sum(value * value)
        if REST > 0:
            squares += tl.sum(rest * rest)
            rest *= tl.rsqrt(squares / INNER + EPS)
        value *= tl.rsqrt(squares / INNER + EPS)
    value = _changed(value, weight, bias, factor, shift, at, INNER, WEIGHTED, BIASED, FACTOR, PLUS_ONE, SHIFTED)
    value = _rotated(value.to(dtype), GROUP, BLOCK) if GROUP > 0 else value.to(dtype).to(tl.float32)
    largest = _largest(value)
    if REST > 0:
        rest = _changed(rest, weight, bias, factor, shift, at_rest, INNER, WEIGHTED, BIASED, FACTOR, PLUS_ONE, SHIFTED)
        rest = _rotated(rest.to(dtype), GROUP, REST) if GROUP > 0 else rest.to(dtype).to(tl.float32)
        largest = tl.maximum(largest, _largest(rest))
    largest = tl.minimum(largest, LARGEST_HALF if dtype == tl.float16 else LARGEST_BFLOAT16)
    scale = tl.maximum(largest * (1.0 / 127.0), SMALLEST_SCALE)
    tl.store(scales + row, scale)
    step = scale.to(dtype).to(tl.float32)
    inverse = tl.div_rn(1.0, tl.where(step == 0.0, SMALLEST_HALF, step))
    out += row.to(tl.int64) * INNER
    tl.store(out + at, _steps(value, inverse, dtype), mask=at < INNER)
    if REST > 0:
        tl.store(out + at_rest, _steps(rest, inverse, dtype), mask=at_rest < INNER)


@triton.jit
def _read(x, second, at, KIND: tl.constexpr, INNER: tl.constexpr):
    """The input at these places of a row behind its activation, in 32 bits; 0 past the row's end."""
    value = tl.load(x + at, mask=at < INNER, other=0.0).to(tl.float32)
    if KIND == GELU_TANH:
        value = value * _sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))
    elif KIND == GELU:
        value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    elif KIND == SWIGLU:
        up = tl.load(second + at, mask=at < INNER, other=0.0)
        value = value * _sigmoid(value) * up.to(tl.float32)
    return value


@triton.jit
def _changed(
    value,
    weight,
    bias,
    factor,
    shift,
    at,
    INNER: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr,
    FACTOR: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    SHIFTED: tl.constexpr,
):
    """Times weight plus bias, times factor plus shift, each where there is one."""
    inside = at < INNER
    if WEIGHTED:
        value = value * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        value = value + tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    if FACTOR:
        by = tl.load(factor + at, mask=inside, other=0.0).to(tl.float32)
        value = value * (by + 1.0 if PLUS_ONE else by)
    if SHIFTED:
        value = value + tl.load(shift + at, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit
def _largest(value):
    """The largest size of what is a number."""
    return tl.max(tl.where(value == value, tl.abs(value), 0.0))


@triton.jit
def _steps(value, inverse, dtype: tl.constexpr):
    """The quotients in int8: value and quotient rounded to dtype, the quotient to a whole number, ties to even.

    What is not a number becomes -128.

    inverse is one over the divisor, a number of dtype. The product rounds to what the quotient rounds to. Numbers a and
    b of p bits have no quotient in the middle between two numbers of p bits, and none within 2**(-2 * p - 1) of it. The
    product is within 2**-23 of the quotient, where p is 8 or 11.
    """
    if dtype == tl.bfloat16:
        steps = _in_bfloat16(_clamped(_in_bfloat16(value) * inverse))
    else:
        steps = _clamped(value.to(dtype).to(tl.float32) * inverse).to(dtype).to(tl.float32)
    return (steps + ROUNDING).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def _clamped(x):
    """Between the least and the largest of int8; what is not a number is the least."""
    return tl.minimum(tl.where(x > -128.0, x, -128.0), 127.0)


@triton.jit
def _in_bfloat16(x):
    """Numbers rounded to bfloat16, ties to even, in 32 bits, in fewer cycles than converting them there and back takes.

    From 2**110 on numbers keep more bits, and those that bfloat16 has no full precision for keep all.
    """
    power = (x.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    large = tl.minimum(power, LARGEST_POWER) * BFLOAT16_ROUNDING
    return (x + large) - large


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _rotated(x, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Every GROUP numbers (16, 64 or 256) of x (BLOCK) times the normalised Hadamard matrix of that size, in 32 bits.

    Such a matrix is the Kronecker product of smaller ones, so a group is rotated in two products with one of 16 by 16:
    along its rows of 16 numbers, and across them. Groups of 64 have four such rows, so that four columns at a time are
    rotated by a matrix with four small ones on its diagonal. What was computed is multiplied in two parts of bfloat16,
    which keep 16 bits of it.
    """
    lines: tl.constexpr = BLOCK // 16
    within = tl.dot(tl.reshape(x, [lines, 16]), _hadamard(4, x.dtype))
    if GROUP == 16:
        return tl.reshape(within, [BLOCK]) * 0.25
    each: tl.constexpr = 0.0625 if GROUP == 256 else 0.125
    if GROUP == 256:
        within = tl.permute(tl.reshape(within, [BLOCK // 256, 16, 16]), [0, 2, 1])
    else:
        within = tl.permute(tl.reshape(within, [BLOCK // 64, 4, 16]), [0, 2, 1])
    within = tl.reshape(within, [lines, 16])
    matrix = _hadamard(4 if GROUP == 256 else 1, tl.bfloat16)
    # what is infinite has no difference, and times 0 would be no number
    within = tl.clamp(within, -LARGEST_BFLOAT16, LARGEST_BFLOAT16, propagate_nan=tl.PropagateNan.ALL)
    high = ((within.to(tl.uint32, bitcast=True) + 0x8000) & 0xFFFF0000).to(tl.float32, bitcast=True)
    low = (within - high).to(tl.bfloat16)
    across = tl.dot(low, matrix, tl.dot(high.to(tl.bfloat16), matrix)) * each
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
