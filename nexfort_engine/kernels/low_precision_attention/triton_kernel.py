# SPDX-License-Identifier: Apache-2.0
"""The kernels of `narrow_attention`. Imported by what lowers for a GPU alone.

Whole numbers are read as floats without being converted: the product begins at the bits of 1.5 * 2**23, which added
to a whole number below 2**22 are the bits of that sum.
"""

import triton
import triton.language as tl

BITS = tl.constexpr(0x4B400000)
SUMMAND = tl.constexpr(12582912.0)  # those bits as a float
SMALLEST = tl.constexpr(1e-30)  # of the largest number of a block: zeros have a scale too
RAISED = tl.constexpr(8.0)  # power of 2 that the largest exponential is brought to, of the 448 that e4m3 holds


@triton.jit
def narrow_keys_values(
    k,
    v,
    k8,
    v8,
    k_scale,
    v_scale,
    keys,
    blocks,
    heads,
    kb,
    kh,
    kn,
    vb,
    vh,
    vn,
    E: tl.constexpr,
    W: tl.constexpr,
    N: tl.constexpr,
    SAMPLE: tl.constexpr,
):
    """Keys as int8 (B*H, blocks, N, W) and values as e4m3 (B*H, blocks, W, N), with the scales of each block.

    Every second program has a block's values, the others its keys.

    Some keys' mean is taken from all of them, which moves all scores of a query by the same and its softmax by nothing.
    Values lie in the order in which a warp holds its scores, so that these are multiplied where they are: place
    16a + 4q + 2j + r of a block has key 16a + 8j + 2q + r. v_scale is the logarithm to base 2 of what theirs stand for.
    """
    block = tl.program_id(0) // 2 % blocks
    head = tl.program_id(0) // 2 // blocks
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    e = tl.arange(0, W)
    tile = (head.to(tl.int64) * blocks + block) * (N * W)
    place = tl.arange(0, N)
    if tl.program_id(0) % 2 == 0:
        k += b * kb + h * kh
        some = (tl.arange(0, SAMPLE).to(tl.int64) * keys) // SAMPLE
        sampled = tl.load(k + some[:, None] * kn + e[None, :], mask=(e < E)[None, :], other=0.0)
        mean = tl.sum(sampled.to(tl.float32), 0) / SAMPLE
        key = block * N + place
        given = (key < keys)[:, None] & (e < E)[None, :]
        x = tl.load(k + key[:, None].to(tl.int64) * kn + e[None, :], mask=given, other=0.0).to(tl.float32)
        x = tl.where(given, x - mean[None, :], 0.0)
        most = tl.maximum(tl.max(tl.max(tl.abs(x), 1), 0), SMALLEST)
        steps = ((x * (127.0 / most) + SUMMAND) - SUMMAND).to(tl.int8)
        tl.store(k8 + tile + place[:, None] * W + e[None, :], steps)
        tl.store(k_scale + head * blocks + block, most / 127.0)
    else:
        v += b * vb + h * vh
        key = block * N + place // 16 * 16 + place % 4 // 2 * 8 + place % 16 // 4 * 2 + place % 2
        given = (key < keys)[:, None] & (e < E)[None, :]
        y = tl.load(v + key[:, None].to(tl.int64) * vn + e[None, :], mask=given, other=0.0).to(tl.float32)
        most = tl.maximum(tl.max(tl.max(tl.abs(y), 1), 0), SMALLEST)
        narrow = (y * (448.0 / most)).to(tl.float8e4nv)
        tl.store(v8 + tile + e[:, None] * N + place[None, :], tl.trans(narrow))
        tl.store(v_scale + head * blocks + block, tl.log2(most / 448.0))


@triton.jit
def attend(
    q,
    k8,
    v8,
    k_scale,
    v_scale,
    out,
    queries,
    keys,
    blocks,
    heads,
    qb,
    qh,
    ql,
    ob,
    oh,
    ol,
    SCALE: tl.constexpr,
    E: tl.constexpr,
    W: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """softmax(scale * q @ k.T) @ v of M queries of one head, whose rows are brought to int8 here.

    Online softmax (Milakov and Gimelshein, 2018) over blocks of N keys. The scale of a block of values is a summand of
    its scores, which the sum of the exponentials is rid of again, so that no result has to be multiplied by it.
    """
    tiles = (queries + M - 1) // M
    head = tl.program_id(0) // tiles
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    row = tl.program_id(0) % tiles * M + tl.arange(0, M)
    e = tl.arange(0, W)
    given = (row < queries)[:, None] & (e < E)[None, :]
    x = tl.load(q + b * qb + h * qh + row[:, None].to(tl.int64) * ql + e[None, :], mask=given, other=0.0)
    x = x.to(tl.float32)
    most = tl.maximum(tl.max(tl.abs(x), 1), SMALLEST)
    q8 = ((x * (127.0 / most)[:, None] + SUMMAND) - SUMMAND).to(tl.int8)
    q_scale = most * (SCALE * 1.4426950408889634 / 127.0)  # of exponentials to base 2
    k8 += head.to(tl.int64) * blocks * (N * W)
    v8 += head.to(tl.int64) * blocks * (N * W)
    k_scale += head * blocks
    v_scale += head * blocks
    largest = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    result = tl.zeros([M, W], tl.float32)
    # pipelined are the blocks that are whole
    for block in range(0, blocks - 1):
        result, total, largest = _block(
            q8, q_scale, k8, v8, k_scale, v_scale, result, total, largest, block, keys, W, M, N, False
        )
    result, total, largest = _block(
        q8, q_scale, k8, v8, k_scale, v_scale, result, total, largest, blocks - 1, keys, W, M, N, True
    )
    to = out + b * ob + h * oh + row[:, None].to(tl.int64) * ol + e[None, :]
    tl.store(to, (result / total[:, None]).to(out.dtype.element_ty), mask=given)


@triton.jit
def _block(
    q8,
    q_scale,
    k8,
    v8,
    k_scale,
    v_scale,
    result,
    total,
    largest,
    block,
    keys,
    W: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    LAST: tl.constexpr,
):
    """One block of keys and values more."""
    n = tl.arange(0, N)
    e = tl.arange(0, W)
    k = tl.load(k8 + block * (N * W) + n[:, None] * W + e[None, :])
    s = tl.dot(q8, tl.trans(k), tl.full([M, N], BITS, tl.int32), out_dtype=tl.int32).to(tl.float32, bitcast=True)
    if LAST:
        s = tl.where((block * N + n < keys)[None, :], s, float("-inf"))
    scale = q_scale * tl.load(k_scale + block)
    summand = tl.load(v_scale + block)
    more = tl.maximum(largest, (tl.max(s, 1) - SUMMAND) * scale + summand)
    less = more - summand + SUMMAND * scale - RAISED
    p = tl.exp2(s * scale[:, None] - less[:, None])
    shrunk = tl.exp2(largest - more)
    total = total * shrunk + tl.sum(p, 1) * tl.exp2(-summand)
    # in the order of the values
    p = tl.reshape(tl.permute(tl.reshape(p, [M, N // 16, 2, 4, 2]), [0, 1, 3, 2, 4]), [M, N])
    v = tl.load(v8 + block * (N * W) + e[:, None] * N + n[None, :])
    # summed by itself: what sums products of e4m3 holds 14 bits
    result = result * shrunk[:, None] + tl.dot(p.to(tl.float8e4nv), tl.trans(v))
    return result, total, more
