# SPDX-License-Identifier: Apache-2.0
"""The kernel of `unpadded_attention` in Triton's language: what Inductor reads in place of
gluon_kernel.py's.

Imported by what lowers for a GPU alone. It computes the same; nobody calls it on a card.
"""

import triton
import triton.language as tl

M = tl.constexpr(64)  # queries of a part
N = tl.constexpr(64)  # keys of a block
W = tl.constexpr(128)  # numbers of a head, and of what is behind it


@triton.jit
def attend_unpadded(
    q,
    k,
    v,
    out,
    batch,
    heads,
    queries,
    keys,
    qb,
    qh,
    ql,
    kb,
    kh,
    kn,
    vb,
    vh,
    vn,
    ob,
    oh,
    ol,
    scratch,
    SCALE: tl.constexpr,
    E: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """softmax(scale * q @ k.T) @ v for q and out (batch, heads, queries, E), k and v (batch, heads, keys, E).

    A head's numbers lie side by side; begins and strides are multiples of 16 bytes. Online softmax (Milakov and
    Gimelshein, 2018). scratch is not read. PROGRAMS: that are run.
    """
    parts = tl.cdiv(queries, M)
    e = tl.arange(0, W)
    for part in range(tl.program_id(0), parts * heads * batch, PROGRAMS):
        b = (part // parts // heads).to(tl.int64)
        h = (part // parts % heads).to(tl.int64)
        row = part % parts * M + tl.arange(0, M)
        within = (row < queries)[:, None] & (e < E)[None, :]
        x = tl.load(q + b * qb + h * qh + row[:, None].to(tl.int64) * ql + e[None, :], mask=within, other=0.0)
        largest = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        result = tl.zeros([M, W], tl.float32)
        for start in range(0, keys, N):
            n = start + tl.arange(0, N)
            there = (n < keys)[:, None] & (e < E)[None, :]
            y = tl.load(k + b * kb + h * kh + n[:, None].to(tl.int64) * kn + e[None, :], mask=there, other=0.0)
            s = tl.dot(x, tl.trans(y)) * (SCALE * 1.4426950408889634)  # of exponentials to base 2
            s = tl.where((n < keys)[None, :], s, float("-inf"))
            more = tl.maximum(largest, tl.max(s, 1))
            p = tl.exp2(s - more[:, None])
            shrunk = tl.exp2(largest - more)
            total = total * shrunk + tl.sum(p, 1)
            z = tl.load(v + b * vb + h * vh + n[:, None].to(tl.int64) * vn + e[None, :], mask=there, other=0.0)
            result = tl.dot(p.to(z.dtype), z, result * shrunk[:, None])
            largest = more
        to = out + b * ob + h * oh + row[:, None].to(tl.int64) * ol + e[None, :]
        tl.store(to, (result / total[:, None]).to(out.dtype.element_ty), mask=within)
