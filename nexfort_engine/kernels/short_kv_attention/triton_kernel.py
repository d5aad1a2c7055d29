# SPDX-License-Identifier: Apache-2.0
"""The kernel of `few_keys_attention`. Imported by what lowers for a GPU alone."""

import triton
import triton.language as tl


@triton.jit
def attend_few(
    q,
    k,
    v,
    out,
    queries,
    keys,
    heads,
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
    SCALE: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """softmax(scale * q @ k.T) @ v of M queries of one head of E numbers.

    Online softmax (Milakov and Gimelshein, 2018) over blocks of N keys, which is right for any number of them. Each
    tensor is read and written as it lies, the numbers of a head side by side.
    """
    tiles = tl.cdiv(queries, M)
    head = tl.program_id(0) // tiles
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    row = tl.program_id(0) % tiles * M + tl.arange(0, M)
    e = tl.arange(0, E)
    within = (row < queries)[:, None]
    x = tl.load(q + b * qb + h * qh + row[:, None].to(tl.int64) * ql + e[None, :], mask=within, other=0.0)
    k += b * kb + h * kh
    v += b * vb + h * vh
    largest = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    result = tl.zeros([M, E], tl.float32)
    for start in range(0, keys, N):
        n = start + tl.arange(0, N)
        there = n < keys
        y = tl.load(k + n[:, None].to(tl.int64) * kn + e[None, :], mask=there[:, None], other=0.0)
        s = tl.dot(x, tl.trans(y)) * (SCALE * 1.4426950408889634)  # of exponentials to base 2
        s = tl.where(there[None, :], s, float("-inf"))
        more = tl.maximum(largest, tl.max(s, 1))
        p = tl.exp2(s - more[:, None])
        shrunk = tl.exp2(largest - more)
        total = total * shrunk + tl.sum(p, 1)
        z = tl.load(v + n[:, None].to(tl.int64) * vn + e[None, :], mask=there[:, None], other=0.0)
        result = tl.dot(p.to(z.dtype), z, result * shrunk[:, None])
        largest = more
    to = out + b * ob + h * oh + row[:, None].to(tl.int64) * ol + e[None, :]
    tl.store(to, (result / total[:, None]).to(out.dtype.element_ty), mask=within)
