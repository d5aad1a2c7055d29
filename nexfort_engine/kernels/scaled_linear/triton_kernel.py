# SPDX-License-Identifier: Apache-2.0
"""The kernel of `scaled_linear`. Imported by what lowers for a GPU alone."""

import triton
import triton.language as tl

GELU_TANH = tl.constexpr(1)
GELU = tl.constexpr(2)
SILU = tl.constexpr(3)


@triton.jit
def multiply(
    x,
    x_scale,
    weight,
    weight_scale,
    up,
    up_scale,
    bias,
    up_bias,
    gate,
    residual,
    out,
    rows,
    tokens,
    gate_batch,
    gate_token,
    scratch,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    COLUMN_SCALES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    UP: tl.constexpr,
    BIASED: tl.constexpr,
    UP_BIASED: tl.constexpr,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
    M_BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """out (rows, COLUMNS) = ACTIVATION of x (rows, INNER) @ weight (COLUMNS, INNER).T, scaled, plus bias.

    All contiguous but gate. Sums of whole numbers are whole numbers, too. They are multiplied by x_scale (rows, or 1
    number without ROW_SCALES) times weight_scale (COLUMNS, or 1 number without COLUMN_SCALES). UP: times the same with
    the weight `up`, without an activation. GATED: times gate (rows, COLUMNS), which has strides of batch and token.
    ADDED: plus residual, which is as out is. What is not asked for is not read. Programs next to each other share rows
    of weight: TOGETHER blocks of rows are computed for one block of columns after another. scratch and PROGRAMS are for
    gluon_kernel.py.
    """
    kept: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    blocks = tl.cdiv(rows, M_BLOCK)
    across = (COLUMNS + N_BLOCK - 1) // N_BLOCK
    part = tl.program_id(0)
    first = part // (TOGETHER * across) * TOGETHER
    height = tl.minimum(blocks - first, TOGETHER)
    m = (first + part % (TOGETHER * across) % height) * M_BLOCK + tl.arange(0, M_BLOCK)
    n = part % (TOGETHER * across) // height * N_BLOCK + tl.arange(0, N_BLOCK)
    row = tl.minimum(m, rows - 1).to(tl.int64)
    column = n if COLUMNS % N_BLOCK == 0 else tl.minimum(n, COLUMNS - 1)
    k = tl.arange(0, K_BLOCK)
    at_x = x + row[:, None] * INNER + k[None, :]
    at_w = column[:, None] * INNER + k[None, :]
    sums = tl.zeros([M_BLOCK, N_BLOCK], kept)
    ups = tl.zeros([M_BLOCK, N_BLOCK], kept)
    for start in range(0, INNER, K_BLOCK):
        if INNER % K_BLOCK == 0:
            a = tl.load(at_x + start)
            b = tl.load(weight + at_w + start)
        else:
            inside = (start + k < INNER)[None, :]
            a = tl.load(at_x + start, mask=inside, other=0.0)
            b = tl.load(weight + at_w + start, mask=inside, other=0.0)
        sums = tl.dot(a, tl.trans(b), sums, out_dtype=kept)
        if UP:
            if INNER % K_BLOCK == 0:
                c = tl.load(up + at_w + start)
            else:
                c = tl.load(up + at_w + start, mask=(start + k < INNER)[None, :], other=0.0)
            ups = tl.dot(a, tl.trans(c), ups, out_dtype=kept)
    x_scales = tl.load(x_scale + row)[:, None] if ROW_SCALES else tl.load(x_scale)
    made = sums.to(tl.float32) * (x_scales * _scales(weight_scale, column, COLUMN_SCALES))
    if BIASED:
        made += tl.load(bias + column).to(tl.float32)[None, :]
    if ACTIVATION == GELU_TANH:
        made = made * _sigmoid(1.5957691216057308 * (made + 0.044715 * made * made * made))
    elif ACTIVATION == GELU:
        made = 0.5 * made * (1.0 + tl.erf(made * 0.7071067811865476))
    elif ACTIVATION == SILU:
        made = made * _sigmoid(made)
    if UP:
        more = ups.to(tl.float32) * (x_scales * _scales(up_scale, column, COLUMN_SCALES))
        if UP_BIASED:
            more += tl.load(up_bias + column).to(tl.float32)[None, :]
        made *= more
    # places that columns alone tell apart take no registers of their own
    within = (m < rows)[:, None]
    if COLUMNS % N_BLOCK != 0:
        within = within & (n < COLUMNS)[None, :]
    if GATED:
        at_gate = gate + row // tokens * gate_batch + row % tokens * gate_token
        made *= tl.load(at_gate[:, None] + n[None, :], mask=within, other=0.0).to(tl.float32)
    at = row[:, None] * COLUMNS + n[None, :]
    if ADDED:
        made += tl.load(residual + at, mask=within, other=0.0).to(tl.float32)
    tl.store(out + at, made.to(out.dtype.element_ty), mask=within)


@triton.jit
def _scales(scale, column, COLUMN_SCALES: tl.constexpr):
    """Of the columns, as a row; or one for all."""
    return tl.load(scale + column)[None, :] if COLUMN_SCALES else tl.load(scale)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))
