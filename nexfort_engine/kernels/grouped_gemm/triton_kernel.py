# SPDX-License-Identifier: Apache-2.0
"""The kernel of `grouped_linear`. Imported by what lowers for a GPU alone."""

import triton
import triton.language as tl


@triton.jit
def multiply_rows(
    x,
    w0,
    w1,
    w2,
    w3,
    w4,
    w5,
    w6,
    w7,
    w8,
    w9,
    w10,
    w11,
    w12,
    w13,
    w14,
    w15,
    w16,
    w17,
    w18,
    w19,
    out,
    rows,
    P: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    M_BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
):
    """out (P, rows, COLUMNS) = x (rows, INNER) times each of P weights (COLUMNS, INNER), all contiguous.

    COLUMNS and INNER are multiples of their blocks. Programs for the same part of a weight follow each other.
    """
    blocks = tl.cdiv(rows, M_BLOCK)
    m = tl.program_id(0) % blocks * M_BLOCK + tl.arange(0, M_BLOCK)
    part = tl.program_id(0) // blocks
    n = part % (COLUMNS // N_BLOCK) * N_BLOCK + tl.arange(0, N_BLOCK)
    p = part // (COLUMNS // N_BLOCK)
    w = w0
    if P > 1:
        w = tl.where(p == 1, w1, w)
    if P > 2:
        w = tl.where(p == 2, w2, w)
    if P > 3:
        w = tl.where(p == 3, w3, w)
    if P > 4:
        w = tl.where(p == 4, w4, w)
    if P > 5:
        w = tl.where(p == 5, w5, w)
    if P > 6:
        w = tl.where(p == 6, w6, w)
    if P > 7:
        w = tl.where(p == 7, w7, w)
    if P > 8:
        w = tl.where(p == 8, w8, w)
    if P > 9:
        w = tl.where(p == 9, w9, w)
    if P > 10:
        w = tl.where(p == 10, w10, w)
    if P > 11:
        w = tl.where(p == 11, w11, w)
    if P > 12:
        w = tl.where(p == 12, w12, w)
    if P > 13:
        w = tl.where(p == 13, w13, w)
    if P > 14:
        w = tl.where(p == 14, w14, w)
    if P > 15:
        w = tl.where(p == 15, w15, w)
    if P > 16:
        w = tl.where(p == 16, w16, w)
    if P > 17:
        w = tl.where(p == 17, w17, w)
    if P > 18:
        w = tl.where(p == 18, w18, w)
    if P > 19:
        w = tl.where(p == 19, w19, w)
    k = tl.arange(0, K_BLOCK)
    within = (m < rows)[:, None]
    at_x = x + m[:, None].to(tl.int64) * INNER + k[None, :]
    at_w = w + n[:, None] * INNER + k[None, :]
    sums = tl.zeros([M_BLOCK, N_BLOCK], tl.float32)
    for start in range(0, INNER, K_BLOCK):
        a = tl.load(at_x + start, mask=within, other=0.0)
        b = tl.load(at_w + start)
        sums = tl.dot(a, tl.trans(b), sums)
    at = (p * rows + m).to(tl.int64)
    tl.store(out + at[:, None] * COLUMNS + n[None, :], sums.to(out.dtype.element_ty), mask=within)
