# SPDX-License-Identifier: Apache-2.0
"""The kernel of `gated_linear` and `narrow_gated_linear` for cards of compute capability 9.0.

Imported by what lowers for one alone.

A program computes parts of 128 rows and 128 columns, one after another. One of its three groups of warps has the card
copy blocks to shared memory; the others multiply 64 rows each by the weights of both halves, so that a block of weights
is read once for both groups, and what belongs together is in one thread's registers. Blocks of the next part are there
when a group is done with its sums.

What the card copies is said to it in descriptors. Each program writes its own to `scratch`, SCRATCH bytes for each;
gluon_autotuner.py says how it gets there.
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

from ..gluon_names import copy_block

M = gl.constexpr(128)  # rows of a part
N = gl.constexpr(128)  # its columns, of each half
BYTES = gl.constexpr(128)  # of each of its rows in a block
EACH = gl.constexpr(64)  # rows of a group of warps
STAGES = gl.constexpr(4)  # blocks in shared memory
SCRATCH = 256  # bytes: two descriptors


@gluon.jit
def multiply_gated_in_groups(
    x,
    weight,
    bias,
    x_scale,
    weight_scale,
    out,
    rows,
    scratch,
    BIASED: gl.constexpr,
    SCALED: gl.constexpr,
    COLUMNS: gl.constexpr,
    INNER: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    """As `triton_kernel.multiply_gated`."""
    dtype: gl.constexpr = x.dtype.element_ty
    bits: gl.constexpr = dtype.primitive_bitwidth
    inner: gl.constexpr = BYTES * 8 // bits  # numbers of a row in a block
    lies: gl.constexpr = gl.NVMMASharedLayout(BYTES, bits, 2)
    given = tma.make_tensor_descriptor(x, [rows, INNER], [INNER, 1], [M, inner], lies)
    weights = tma.make_tensor_descriptor(weight, [2 * COLUMNS, INNER], [INNER, 1], [N, inner], lies)
    a = gl.allocate_shared_memory(dtype, [STAGES, M, inner], lies)
    b = gl.allocate_shared_memory(dtype, [STAGES, 2 * N, inner], lies)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    scales = (x_scale, weight_scale)
    # registers of a thread: 232 for each that computes
    # fmt: off
    gl.warp_specialize([
        (_compute, (bias, scales, out, rows, a, b, full, empty, 0, BIASED, SCALED, COLUMNS, INNER, PROGRAMS)),
        (_compute, (bias, scales, out, rows, a, b, full, empty, 1, BIASED, SCALED, COLUMNS, INNER, PROGRAMS)),
        (_copy, (given, weights, rows, a, b, full, empty, COLUMNS, INNER, PROGRAMS)),
    ], [4, 1], [232, 24])
    # fmt: on


@gluon.jit
def _copy(
    given,
    weights,
    rows,
    a,
    b,
    full,
    empty,
    COLUMNS: gl.constexpr,
    INNER: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    """Blocks of x and of both halves' weights to shared memory, in the order in which they are multiplied.

    What lies behind the end of a row is zeros there.
    """
    inner: gl.constexpr = a.shape[2]
    blocks = (rows + M - 1) // M
    stage = 0
    phase = 1
    for part in range(gl.program_id(0), blocks * (COLUMNS // N), PROGRAMS):
        m = part % blocks * M
        n = part // blocks * N
        for k in range(0, INNER, inner):
            mbarrier.wait(empty.index(stage), phase)
            there = full.index(stage)
            both = b.index(stage)
            mbarrier.expect(there, (M + 2 * N) * BYTES)
            copy_block(given, [m, k], there, a.index(stage))
            copy_block(weights, [n, k], there, both.slice(0, N))
            copy_block(weights, [n + COLUMNS, k], there, both.slice(N, N))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _compute(
    bias,
    scales,
    out,
    rows,
    a,
    b,
    full,
    empty,
    GROUP: gl.constexpr,
    BIASED: gl.constexpr,
    SCALED: gl.constexpr,
    COLUMNS: gl.constexpr,
    INNER: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    """The rows of one group of warps."""
    inner: gl.constexpr = a.shape[2]
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * N, inner // 4])
    halves: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, inner // 4])
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    blocks = (rows + M - 1) // M
    stage = 0
    phase = 0
    for part in range(gl.program_id(0), blocks * (COLUMNS // N), PROGRAMS):
        m = part % blocks * M + GROUP * EACH
        n = part // blocks * N
        mine = a.index(stage).slice(GROUP * EACH, EACH)
        nothing = gl.zeros([EACH, 2 * N], gl.float32, sums)
        mbarrier.wait(full.index(stage), phase)
        both = warpgroup_mma(mine, b.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        both = warpgroup_mma_wait(1, [both])
        for _ in range(inner, INNER, inner):
            before = stage
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
            mine = a.index(stage).slice(GROUP * EACH, EACH)
            mbarrier.wait(full.index(stage), phase)
            both = warpgroup_mma(mine, b.index(stage).permute((1, 0)), both, is_async=True)
            both = warpgroup_mma_wait(1, [both])
            mbarrier.arrive(empty.index(before), count=1)
        both = warpgroup_mma_wait(0, [both])
        mbarrier.arrive(empty.index(stage), count=1)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
        value, gate = gl.split(gl.permute(gl.reshape(both, [EACH, 2, N]), [0, 2, 1]))
        value = gl.convert_layout(value, halves, assert_trivial=True)
        gate = gl.convert_layout(gate, halves, assert_trivial=True)
        column = n + gl.arange(0, N, gl.SliceLayout(0, halves))
        if SCALED:
            scaled = m + gl.arange(0, EACH, gl.SliceLayout(1, halves))
            scale = gl.load(scales[0] + scaled, mask=scaled < rows, other=0.0)[:, None]
            value *= scale * gl.load(scales[1] + column)[None, :]
            gate *= scale * gl.load(scales[1] + COLUMNS + column)[None, :]
        if BIASED:
            value += gl.load(bias + column).to(gl.float32)[None, :]
            gate += gl.load(bias + COLUMNS + column).to(gl.float32)[None, :]
        made = gl.convert_layout((value * _gelu(gate)).to(out.dtype.element_ty), lines)
        row = m + gl.arange(0, EACH, gl.SliceLayout(1, lines))
        to = out + row[:, None].to(gl.int64) * COLUMNS + (n + gl.arange(0, N, gl.SliceLayout(0, lines)))[None, :]
        gl.store(to, made, mask=(row < rows)[:, None])


@gluon.jit
def _gelu(x):
    """GELU in its erf form: (x + |x|) / 2 - |x| q(|x|), where q is the normal distribution's tail.

    log2(q) is a polynomial, fitted from 0 to 6.5, from where on x q is below 1e-9. GELU is off by 6e-7 at most, and by
    5e-6 of itself where it is larger than 1e-5. This has one slow function and one step less for each degree than
    passes/gelu.py's, which counts here: no product runs while both groups compute this. What is not a number stays so.
    """
    size = gl.minimum(gl.abs(x), 6.5)
    power = size * -1.7956582e-06 + 6.0938444e-05
    power = power * size - 9.262372e-04
    power = power * size + 8.494379e-03
    power = power * size - 5.3938787e-02
    power = power * size - 4.5847982e-01
    power = power * size - 1.1512470
    power = power * size - 0.99999547
    return 0.5 * (x + gl.abs(x)) - size * gl.exp2(power)
