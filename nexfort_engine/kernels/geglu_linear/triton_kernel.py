# SPDX-License-Identifier: Apache-2.0
"""The kernel of `gated_linear` and `narrow_gated_linear` in Triton's language: what Inductor reads in place of
gluon_kernel.py's.

Imported by what lowers for a GPU alone. It computes the same; nobody calls it on a card.
"""

import triton
import triton.language as tl

EACH = tl.constexpr(64)  # rows, columns and summands of a block


@triton.jit
def multiply_gated(
    x,
    weight,
    bias,
    x_scale,
    weight_scale,
    out,
    rows,
    scratch,
    BIASED: tl.constexpr,
    SCALED: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """out (rows, COLUMNS) = u * gelu(v), u and v being the halves of x @ weight.T + bias; GELU in its erf form.

    x (rows, INNER), weight (2 * COLUMNS, INNER), bias (2 * COLUMNS), all contiguous. SCALED: x and weight are narrow,
    and x_scale (rows) and weight_scale (2 * COLUMNS) in float32 are what their rows are multiplied by. bias is not read
    unless BIASED, scales unless SCALED, scratch never. COLUMNS is a multiple of 128, INNER of 64. PROGRAMS: that are
    run.
    """
    blocks = tl.cdiv(rows, EACH)
    k = tl.arange(0, EACH)
    for part in range(tl.program_id(0), blocks * (COLUMNS // EACH), PROGRAMS):
        m = part % blocks * EACH + tl.arange(0, EACH)
        n = part // blocks * EACH + tl.arange(0, EACH)
        within = (m < rows)[:, None]
        value = tl.zeros([EACH, EACH], tl.float32)
        gate = tl.zeros([EACH, EACH], tl.float32)
        for start in range(0, INNER, EACH):
            a = tl.load(x + m[:, None].to(tl.int64) * INNER + (start + k)[None, :], mask=within, other=0.0)
            at = weight + n[:, None] * INNER + (start + k)[None, :]
            value = tl.dot(a, tl.trans(tl.load(at)), value)
            gate = tl.dot(a, tl.trans(tl.load(at + COLUMNS * INNER)), gate)
        if SCALED:
            scale = tl.load(x_scale + m, mask=m < rows, other=0.0)[:, None]
            value *= scale * tl.load(weight_scale + n)[None, :]
            gate *= scale * tl.load(weight_scale + COLUMNS + n)[None, :]
        if BIASED:
            value += tl.load(bias + n).to(tl.float32)[None, :]
            gate += tl.load(bias + COLUMNS + n).to(tl.float32)[None, :]
        made = value * (0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)))
        tl.store(out + m[:, None].to(tl.int64) * COLUMNS + n[None, :], made.to(out.dtype.element_ty), mask=within)
