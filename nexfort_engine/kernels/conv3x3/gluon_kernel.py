# SPDX-License-Identifier: Apache-2.0
"""The kernel of op.py for cards of compute capability 9.0. Imported by what lowers for one alone.

A convolution is a product of as many summands as a channel has places times channels: what one of nine places gives to
8 x 16 results are 8 x 16 neighbours, which the card copies as one block, with zeros for what lies outside the image. A
program computes such parts, with N + R channels each, one after another: 320 and 160 channels have more than one
product, whose sizes are powers of 2. Groups of warps, barriers and descriptors are as in
kernels/geglu_linear/gluon_kernel.py.

With SIDE = 2 the images are convolved as if they had been upsampled to the double (upsample_op.py): results
in one of four phases, by the parity of their line and column, have a weight of two by two places each.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..gluon_names import REINTERPRET, copy_block

DOWN = gl.constexpr(8)  # results of a part
ACROSS = gl.constexpr(16)
M = gl.constexpr(128)
K = gl.constexpr(64)  # channels of a block, 128 bytes
EACH = gl.constexpr(64)  # results of a group of warps
SCRATCH = 256  # bytes: two descriptors


@gluon.jit
def convolve_in_groups(
    x,
    weight,
    bias,
    unread,
    out,
    images,
    height,
    width,
    channels,
    columns,
    scratch,
    BIASED: gl.constexpr,
    SIDE: gl.constexpr,
    N: gl.constexpr,
    R: gl.constexpr,
    STAGES: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    """As `triton_kernel.convolve`. R: 0, or what divides N; STAGES: blocks in shared memory."""
    dtype: gl.constexpr = out.dtype.element_ty
    image: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
    lies: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    each: gl.constexpr = R if R > 0 else N
    phases: gl.constexpr = 4 if SIDE == 2 else 1
    line = channels.to(gl.int64) * width
    long = SIDE * SIDE * channels
    given = tma.make_tensor_descriptor(
        x, [images, height, width, channels], [height * line, line, channels, 1], [1, DOWN, ACROSS, K], image
    )
    weights = tma.make_tensor_descriptor(weight, [phases * columns, long], [long.to(gl.int64), 1], [each, K], lies)
    a = gl.allocate_shared_memory(dtype, [STAGES, M, K], lies)
    b = gl.allocate_shared_memory(dtype, [STAGES, N, K], lies)
    c = gl.allocate_shared_memory(dtype, [STAGES if R > 0 else 1, R if R > 0 else 16, K], lies)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    down = (height + DOWN - 1) // DOWN
    across = (width + ACROSS - 1) // ACROSS
    parts = images * down * across * (columns // (N + R)) * phases
    # registers of a thread: 232 for each that computes
    # fmt: off
    gl.warp_specialize([
        (_compute, (bias, out, height, width, channels, columns, down, across, parts, images, a, b, c, full, empty,
                    0, BIASED, SIDE, N, R, STAGES, PROGRAMS)),
        (_compute, (bias, out, height, width, channels, columns, down, across, parts, images, a, b, c, full, empty,
                    1, BIASED, SIDE, N, R, STAGES, PROGRAMS)),
        (_copy, (given, weights, channels, columns, down, across, parts, images, a, b, c, full, empty,
                 SIDE, N, R, STAGES, PROGRAMS)),
    ], [4, 1], [232, 24])
    # fmt: on


@gluon.jit
def _place(part, images, down, across, EVERY: gl.constexpr):
    """The image of a part, its first line, column and row of the weight; parts with the same rows follow each other."""
    tiles = images * down * across
    tile = part % tiles
    return tile // (down * across), tile // across % down * DOWN, tile % across * ACROSS, part // tiles * EVERY


@gluon.jit
def _copy(
    given,
    weights,
    channels,
    columns,
    down,
    across,
    parts,
    images,
    a,
    b,
    c,
    full,
    empty,
    SIDE: gl.constexpr,
    N: gl.constexpr,
    R: gl.constexpr,
    STAGES: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    """Blocks of the images and of the weights to shared memory, in the order in which they are multiplied."""
    image: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
    each: gl.constexpr = R if R > 0 else N
    stage = 0
    phase = 1
    for part in range(gl.program_id(0), parts, PROGRAMS):
        i, y, x, n = _place(part, images, down, across, N + R)
        y -= 1
        x -= 1
        if SIDE == 2:
            y += n // columns // 2
            x += n // columns % 2
        for place in range(SIDE * SIDE):
            for k in range(0, channels, K):
                mbarrier.wait(empty.index(stage), phase)
                there = full.index(stage)
                mbarrier.expect(there, (M + N + R) * K * 2)
                if REINTERPRET:
                    block = a.index(stage).reinterpret(a.dtype, [1, DOWN, ACROSS, K], image)
                else:
                    block = a.index(stage)._reinterpret(a.dtype, [1, DOWN, ACROSS, K], image)
                at = [i, y + place // SIDE, x + place % SIDE, k]
                copy_block(given, at, there, block)
                for j in gl.static_range(N // each):
                    some = b.index(stage).slice(j * each, each)
                    copy_block(weights, [n + j * each, place * channels + k], there, some)
                if R > 0:
                    copy_block(weights, [n + N, place * channels + k], there, c.index(stage))
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1


@gluon.jit
def _compute(
    bias,
    out,
    height,
    width,
    channels,
    columns,
    down,
    across,
    parts,
    images,
    a,
    b,
    c,
    full,
    empty,
    GROUP: gl.constexpr,
    BIASED: gl.constexpr,
    SIDE: gl.constexpr,
    N: gl.constexpr,
    R: gl.constexpr,
    STAGES: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    """The results of one group of warps."""
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    rest: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R if R > 0 else 16, 16])
    halves: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N // 2, 16])
    both: gl.constexpr = 2 if R > 0 else 1  # products under way of the block before
    stage = 0
    phase = 0
    for part in range(gl.program_id(0), parts, PROGRAMS):
        i, y, x, n = _place(part, images, down, across, N + R)
        u = gl.zeros([EACH, N], gl.float32, sums)
        v = gl.zeros([EACH, R if R > 0 else 16], gl.float32, rest)
        before = 0
        for k in range(0, SIDE * SIDE * channels, K):
            mine = a.index(stage).slice(GROUP * EACH, EACH)
            mbarrier.wait(full.index(stage), phase)
            u = warpgroup_mma(mine, b.index(stage).permute((1, 0)), u, is_async=True)
            if R > 0:
                v = warpgroup_mma(mine, c.index(stage).permute((1, 0)), v, is_async=True)
                u, v = warpgroup_mma_wait(both, [u, v])
            else:
                u = warpgroup_mma_wait(both, [u])
            if k > 0:
                mbarrier.arrive(empty.index(before), count=1)
            before = stage
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        if R > 0:
            u, v = warpgroup_mma_wait(0, [u, v])
        else:
            u = warpgroup_mma_wait(0, [u])
        mbarrier.arrive(empty.index(before), count=1)
        # in halves, so that what is between registers and memory is less
        left, right = gl.split(gl.permute(gl.reshape(u, [EACH, 2, N // 2]), [0, 2, 1]))
        left = gl.convert_layout(left, halves, assert_trivial=True)
        right = gl.convert_layout(right, halves, assert_trivial=True)
        _store(left, bias, out, i, y, x, n, height, width, columns, GROUP, BIASED, SIDE, N // 2)
        _store(right, bias, out, i, y, x, n + N // 2, height, width, columns, GROUP, BIASED, SIDE, N // 2)
        if R > 0:
            _store(v, bias, out, i, y, x, n + N, height, width, columns, GROUP, BIASED, SIDE, R)


@gluon.jit
def _store(
    sums,
    bias,
    out,
    i,
    y,
    x,
    n,
    height,
    width,
    columns,
    GROUP: gl.constexpr,
    BIASED: gl.constexpr,
    SIDE: gl.constexpr,
    S: gl.constexpr,
):
    """Some channels of a group's results, which lie in S columns."""
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [256 // S, S // 8], [4, 1], [1, 0])
    phase = n // columns if SIDE == 2 else 0
    n -= phase * columns
    if BIASED:
        sums += gl.load(bias + n + gl.arange(0, S, gl.SliceLayout(0, sums.type.layout))).to(gl.float32)[None, :]
    made = gl.convert_layout(sums.to(out.dtype.element_ty), lines)
    r = GROUP * EACH + gl.arange(0, EACH, gl.SliceLayout(1, lines))
    y += r // ACROSS
    x += r % ACROSS
    inside = (y < height) & (x < width)
    if SIDE == 2:
        y = 2 * y + phase // 2
        x = 2 * x + phase % 2
        at = ((i * 2 * height + y).to(gl.int64) * (2 * width) + x) * columns
    else:
        at = ((i * height + y).to(gl.int64) * width + x) * columns
    column = n + gl.arange(0, S, gl.SliceLayout(0, lines))
    gl.store(out + at[:, None] + column[None, :], made, mask=inside[:, None])
