# SPDX-License-Identifier: Apache-2.0
"""The second kernel of `narrow_attention` for cards of compute capability 9.0. Imported by what lowers for one alone.

A program has three groups of four warps. One copies blocks of keys and values to shared memory; the others compute 64
queries each, so that a block is read once for 128, and a group's products run while the other has none. Scores of the
next block are begun before the exponentials of this one.

Exponentials are made as the bits of e4m3, without the card's slow exp2: eight times the power of 2 that is asked for is
a number's exponent and, as its next three bits, a mantissa that is off by up to 6 %, which is what rounding to three
bits is off by. Below the smallest power, where e4m3 has fixed steps, a second line is followed. Whole numbers are
rounded by bringing 1024 and more to fp16, and are its last byte.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..gluon_names import copy_values
from .triton_kernel import BITS, SMALLEST, SUMMAND

HIGHEST = gl.constexpr(
    15.75
)  # power of 2 that e4m3's bits 126 stand for, above its smallest: that of the largest number
ONE = gl.constexpr(56)  # e4m3's bits
STAGES = gl.constexpr(2)  # blocks of keys and values in shared memory
EACH = gl.constexpr(64)  # queries of a group of warps


@gluon.jit
def attend_in_groups(
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
    SCALE: gl.constexpr,
    E: gl.constexpr,
    W: gl.constexpr,
    M: gl.constexpr,
    N: gl.constexpr,
):
    """As `triton_kernel.attend`, for M = 128."""
    tile: gl.constexpr = gl.NVMMASharedLayout(W, 8, 2)
    across: gl.constexpr = gl.NVMMASharedLayout(N, 8, 2)
    k_tiles = gl.allocate_shared_memory(gl.int8, [STAGES + 1, N, W], tile)
    v_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, W, N], across)
    q_tiles = gl.allocate_shared_memory(gl.int8, [2, EACH, W], tile)
    spread: gl.constexpr = gl.BlockedLayout([1, 8], [256 // N, N // 8], [4, 1], [1, 0])
    one = gl.full([8, N], ONE, gl.int8, spread).to(gl.float8e4nv, bitcast=True)
    ones = gl.allocate_shared_memory(gl.float8e4nv, [8, N], across, one)
    full = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES + 1):
        mbarrier.init(full.index(i), count=128)
    for i in gl.static_range(STAGES):
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    tiles = (queries + M - 1) // M
    head = gl.program_id(0) // tiles
    b = (head // heads).to(gl.int64)
    h = (head % heads).to(gl.int64)
    first = gl.program_id(0) % tiles * M
    k8 += head.to(gl.int64) * blocks * (N * W)
    v8 += head.to(gl.int64) * blocks * (N * W)
    q += b * qb + h * qh
    out += b * ob + h * oh
    k_scale += head * blocks
    v_scale += head * blocks
    # registers of a thread: 232 for each that computes
    # fmt: off
    gl.warp_specialize([
        (_attend, (q, k_scale, v_scale, out, first, queries, keys, blocks, ql, ol,
                   k_tiles, v_tiles, q_tiles.index(0), ones, full, empty, SCALE, E, W, N)),
        (_attend, (q, k_scale, v_scale, out, first + EACH, queries, keys, blocks, ql, ol,
                   k_tiles, v_tiles, q_tiles.index(1), ones, full, empty, SCALE, E, W, N)),
        (_copy, (k8, v8, blocks, k_tiles, v_tiles, full, empty, W, N)),
    ], [4, 4], [232, 40])
    # fmt: on


@gluon.jit
def _copy(k8, v8, blocks, k_tiles, v_tiles, full, empty, W: gl.constexpr, N: gl.constexpr):
    """Blocks of keys and values to shared memory: the keys of each block beside the values of the one before."""
    wide: gl.constexpr = gl.BlockedLayout([1, 16], [512 // W, W // 16], [4, 1], [1, 0])
    long: gl.constexpr = gl.BlockedLayout([1, 16], [512 // N, N // 16], [4, 1], [1, 0])
    row = gl.arange(0, N, gl.SliceLayout(1, wide))[:, None] * W
    k = k8 + row + gl.arange(0, W, gl.SliceLayout(0, wide))[None, :]
    row = gl.arange(0, W, gl.SliceLayout(1, long))[:, None] * N
    v = v8 + row + gl.arange(0, N, gl.SliceLayout(0, long))[None, :]
    copy_values(k_tiles.index(STAGES), k)
    async_copy.mbarrier_arrive(full.index(STAGES), increment_count=False)
    stage = 0
    phase = 1
    for block in range(blocks):
        if block < blocks - 1:
            k += N * W
        mbarrier.wait(empty.index(stage), phase)
        copy_values(k_tiles.index(stage), k)
        copy_values(v_tiles.index(stage), v)
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        v += N * W
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _attend(
    q,
    k_scale,
    v_scale,
    out,
    first,
    queries,
    keys,
    blocks,
    ql,
    ol,
    k_tiles,
    v_tiles,
    q8,
    ones,
    full,
    empty,
    SCALE: gl.constexpr,
    E: gl.constexpr,
    W: gl.constexpr,
    N: gl.constexpr,
):
    """The queries of one group of warps, which q8 is made for."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 32])
    results: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 32])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 32])
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [256 // W, W // 8], [4, 1], [1, 0])
    row = first + gl.arange(0, EACH, gl.SliceLayout(1, rows))
    e = gl.arange(0, W, gl.SliceLayout(0, rows))
    given = (row < queries)[:, None] & (e < E)[None, :]
    x = gl.load(q + row[:, None].to(gl.int64) * ql + e[None, :], mask=given, other=0.0).to(gl.float32)
    most = gl.maximum(gl.max(gl.abs(x), 1), SMALLEST)
    q8.store(((x * (127.0 / most)[:, None] + SUMMAND) - SUMMAND).to(gl.int8))
    fence_async_shared()
    q_scale = gl.convert_layout(most * (SCALE * 1.4426950408889634 / 127.0), gl.SliceLayout(1, scores))
    largest = gl.full([EACH], float("-inf"), gl.float32, gl.SliceLayout(1, scores))
    result = gl.zeros([EACH, W], gl.float32, results)
    total = gl.zeros([EACH, 8], gl.float32, sums)
    none = gl.zeros([EACH, 8], gl.float32, sums)
    nothing = gl.zeros([EACH, W], gl.float32, results)
    begun = gl.full([EACH, N], BITS, gl.int32, scores)
    ks = gl.load(k_scale)
    vs = gl.load(v_scale)
    mbarrier.wait(full.index(STAGES), 0)
    s = warpgroup_mma(q8, k_tiles.index(STAGES).permute((1, 0)), begun, is_async=True)
    s = warpgroup_mma_wait(0, [s])
    stage = 0
    phase = 0
    for block in range(blocks - 1):
        next_ks = gl.load(k_scale + block + 1)
        next_vs = gl.load(v_scale + block + 1)
        mbarrier.wait(full.index(stage), phase)
        following = warpgroup_mma(q8, k_tiles.index(stage).permute((1, 0)), begun, is_async=True)
        p, shrunk, largest = _exponentials(s.to(gl.float32, bitcast=True), q_scale, ks, vs, largest, results, N)
        more = warpgroup_mma(p, v_tiles.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        added = warpgroup_mma(p, ones.permute((1, 0)), none, use_acc=False, is_async=True)
        s, added, more = warpgroup_mma_wait(0, [following, added, more])
        mbarrier.arrive(empty.index(stage), count=1)
        total = total * gl.convert_layout(shrunk, gl.SliceLayout(1, sums))[:, None] + added * gl.exp2(-vs)
        # summed by itself: what sums products of e4m3 holds 14 bits
        result = result * gl.convert_layout(shrunk, gl.SliceLayout(1, results))[:, None] + more
        ks = next_ks
        vs = next_vs
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    n = (blocks - 1) * N + gl.arange(0, N, gl.SliceLayout(0, scores))
    s = gl.where((n < keys)[None, :], s.to(gl.float32, bitcast=True), float("-inf"))
    p, shrunk, largest = _exponentials(s, q_scale, ks, vs, largest, results, N)
    mbarrier.wait(full.index(stage), phase)
    more = warpgroup_mma(p, v_tiles.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    added = warpgroup_mma(p, ones.permute((1, 0)), none, use_acc=False, is_async=True)
    added, more = warpgroup_mma_wait(0, [added, more])
    total = total * gl.convert_layout(shrunk, gl.SliceLayout(1, sums))[:, None] + added * gl.exp2(-vs)
    result = result * gl.convert_layout(shrunk, gl.SliceLayout(1, results))[:, None] + more
    # a sum stands eight times in its row
    part = gl.convert_layout(8.0 / gl.sum(total, 1), gl.SliceLayout(1, results))
    result = gl.convert_layout((result * part[:, None]).to(out.dtype.element_ty), rows)
    gl.store(out + row[:, None].to(gl.int64) * ol + e[None, :], result, mask=given)


@gluon.jit
def _exponentials(s, q_scale, ks, vs, largest, results: gl.constexpr, N: gl.constexpr):
    """Scores as exponentials in e4m3, in the order of the values; what older sums are worth; the largest until now."""
    scale = q_scale * ks
    more = gl.maximum(largest, (gl.max(s, 1) - SUMMAND) * scale + vs)
    steps = scale * 8.0
    less = (more - vs - HIGHEST) * 8.0 - 1024.0 + SUMMAND * steps
    t = s * steps[:, None] - less[:, None]
    t = gl.reshape(gl.permute(gl.reshape(t, [EACH, N // 16, 2, 4, 2]), [0, 1, 3, 2, 4]), [EACH, N])
    # 0.375 * x + 645 is the line through e4m3's bits of 2**-6 and 2**-8; 0x6400 is 1024, bits 0
    bits = gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, none, slope, from;
        mov.b32 none, 0x64006400;
        mov.b32 slope, 0x36003600;
        mov.b32 from, 0x610a610a;
        cvt.rn.f16x2.f32 a, $2, $1;
        fma.rn.f16x2 b, a, slope, from;
        max.f16x2 a, a, b;
        max.f16x2 $0, a, none;
        }""",
        "=r,f,f",
        [t],
        dtype=gl.int16,
        is_pure=True,
        pack=2,
    )
    p = bits.to(gl.int8).to(gl.float8e4nv, bitcast=True)
    return gl.convert_layout(p, gl.DotOperandLayout(0, results, 4)), gl.exp2(largest - more), more
