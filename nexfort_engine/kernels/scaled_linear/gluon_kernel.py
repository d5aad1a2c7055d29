# SPDX-License-Identifier: Apache-2.0
"""The kernel of `scaled_linear` for cards of compute capability 9.0, in the form that is `grouped`.

Imported by what lowers for one alone.

It is built as that of geglu_linear: a program computes parts of 128 rows and 256 columns, one after another. One of its
three groups of warps has the card copy blocks to shared memory; the others multiply 64 rows each. With `up` half of the
columns are of the other weight, so that what belongs together is in one thread's registers. What is behind the product
is computed for half of the columns at a time, because what brings residuals to where sums are takes shared memory.
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
N = gl.constexpr(128)  # half of its columns
BYTES = gl.constexpr(128)  # of each of its rows in a block
EACH = gl.constexpr(64)  # rows of a group of warps
STAGES = gl.constexpr(4)  # blocks in shared memory
SCRATCH = 384  # bytes: three descriptors
GELU_TANH = gl.constexpr(1)
GELU = gl.constexpr(2)
SILU = gl.constexpr(3)


@gluon.jit
def multiply_in_groups(
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
    COLUMNS: gl.constexpr,
    INNER: gl.constexpr,
    ROW_SCALES: gl.constexpr,
    COLUMN_SCALES: gl.constexpr,
    ACTIVATION: gl.constexpr,
    UP: gl.constexpr,
    BIASED: gl.constexpr,
    UP_BIASED: gl.constexpr,
    GATED: gl.constexpr,
    ADDED: gl.constexpr,
    M_BLOCK: gl.constexpr,
    N_BLOCK: gl.constexpr,
    K_BLOCK: gl.constexpr,
    TOGETHER: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    """As `triton_kernel.multiply`. Blocks are of the sizes above, whatever is said of them."""
    dtype: gl.constexpr = x.dtype.element_ty
    each: gl.constexpr = N if UP else 2 * N  # columns of a part
    lies: gl.constexpr = gl.NVMMASharedLayout(BYTES, 8, 2)
    given = tma.make_tensor_descriptor(x, [rows, INNER], [INNER, 1], [M, BYTES], lies)
    first = tma.make_tensor_descriptor(weight, [COLUMNS, INNER], [INNER, 1], [each, BYTES], lies)
    other = first
    if UP:
        other = tma.make_tensor_descriptor(up, [COLUMNS, INNER], [INNER, 1], [each, BYTES], lies)
    a = gl.allocate_shared_memory(dtype, [STAGES, M, BYTES], lies)
    b = gl.allocate_shared_memory(dtype, [STAGES, 2 * N, BYTES], lies)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    scales = (x_scale, weight_scale, up_scale)
    more = (bias, up_bias, gate, residual, tokens, gate_batch, gate_token)
    flags: gl.constexpr = (ROW_SCALES, COLUMN_SCALES, ACTIVATION, UP, BIASED, UP_BIASED, GATED, ADDED)
    # registers of a thread: 232 for each that computes
    # fmt: off
    gl.warp_specialize([
        (_compute, (scales, more, out, rows, a, b, full, empty, 0, flags, COLUMNS, INNER, PROGRAMS)),
        (_compute, (scales, more, out, rows, a, b, full, empty, 1, flags, COLUMNS, INNER, PROGRAMS)),
        (_copy, (given, first, other, rows, a, b, full, empty, UP, COLUMNS, INNER, PROGRAMS)),
    ], [4, 1], [232, 24])
    # fmt: on


@gluon.jit
def _copy(
    given,
    first,
    other,
    rows,
    a,
    b,
    full,
    empty,
    UP: gl.constexpr,
    COLUMNS: gl.constexpr,
    INNER: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    """Blocks of x and of the weights to shared memory, in the order in which they are multiplied.

    What lies behind the end of a row or the last row is zeros there.
    """
    each: gl.constexpr = N if UP else 2 * N
    blocks = (rows + M - 1) // M
    stage = 0
    phase = 1
    for part in range(gl.program_id(0), blocks * ((COLUMNS + each - 1) // each), PROGRAMS):
        m = part % blocks * M
        n = part // blocks * each
        for k in range(0, INNER, BYTES):
            mbarrier.wait(empty.index(stage), phase)
            there = full.index(stage)
            mbarrier.expect(there, (M + 2 * N) * BYTES)
            copy_block(given, [m, k], there, a.index(stage))
            if UP:
                both = b.index(stage)
                copy_block(first, [n, k], there, both.slice(0, N))
                copy_block(other, [n, k], there, both.slice(N, N))
            else:
                copy_block(first, [n, k], there, b.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _compute(
    scales,
    more,
    out,
    rows,
    a,
    b,
    full,
    empty,
    GROUP: gl.constexpr,
    FLAGS: gl.constexpr,
    COLUMNS: gl.constexpr,
    INNER: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    """The rows of one group of warps."""
    has_up: gl.constexpr = FLAGS[3]
    each: gl.constexpr = N if has_up else 2 * N
    kept: gl.constexpr = gl.int32 if a.dtype == gl.int8 else gl.float32
    wide: gl.constexpr = N if a.dtype == gl.int8 else 2 * N  # Triton multiplies at most 224 columns of int8 at once
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, wide, BYTES // 4])
    halves: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, BYTES // 4])
    blocks = (rows + M - 1) // M
    stage = 0
    phase = 0
    for part in range(gl.program_id(0), blocks * ((COLUMNS + each - 1) // each), PROGRAMS):
        m = part % blocks * M + GROUP * EACH
        n = part // blocks * each
        mine = a.index(stage).slice(GROUP * EACH, EACH)
        nothing = gl.zeros([EACH, 2 * N], kept, sums)
        mbarrier.wait(full.index(stage), phase)
        both = warpgroup_mma(mine, b.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        both = warpgroup_mma_wait(1, [both])
        for _ in range(BYTES, INNER, BYTES):
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
        left, right = gl.split(gl.permute(gl.reshape(both, [EACH, 2, N]), [0, 2, 1]))
        left = gl.convert_layout(left, halves, assert_trivial=True)
        right = gl.convert_layout(right, halves, assert_trivial=True)
        if has_up:
            _write(left, right, scales, more, out, rows, m, n, FLAGS, COLUMNS)
        else:
            _write(left, left, scales, more, out, rows, m, n, FLAGS, COLUMNS)
            _write(right, right, scales, more, out, rows, m, n + N, FLAGS, COLUMNS)


@gluon.jit
def _write(left, right, scales, more, out, rows, m, n, FLAGS: gl.constexpr, COLUMNS: gl.constexpr):
    """What is behind the sums of 64 rows from m on and 128 columns from n on. right: those of `up`."""
    row_scales: gl.constexpr = FLAGS[0]
    column_scales: gl.constexpr = FLAGS[1]
    activation: gl.constexpr = FLAGS[2]
    halves: gl.constexpr = left.type.layout
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = gl.minimum(m + gl.arange(0, EACH, gl.SliceLayout(1, halves)), rows - 1)
    column = n + gl.arange(0, N, gl.SliceLayout(0, halves))
    if COLUMNS % (2 * N) != 0:
        column = gl.minimum(column, COLUMNS - 1)
    x_scales = gl.load(scales[0] + row)[:, None] if row_scales else gl.load(scales[0])
    by = gl.load(scales[1] + column)[None, :] if column_scales else gl.load(scales[1])
    made = left.to(gl.float32) * (x_scales * by)
    if FLAGS[4]:
        made += gl.load(more[0] + column).to(gl.float32)[None, :]
    if activation == GELU_TANH:
        made = made * _sigmoid(1.5957691216057308 * (made + 0.044715 * made * made * made))
    elif activation == GELU:
        made = _gelu(made)
    elif activation == SILU:
        made = made * _sigmoid(made)
    if FLAGS[3]:
        by = gl.load(scales[2] + column)[None, :] if column_scales else gl.load(scales[2])
        times = right.to(gl.float32) * (x_scales * by)
        if FLAGS[5]:
            times += gl.load(more[1] + column).to(gl.float32)[None, :]
        made *= times
    at_row = m + gl.arange(0, EACH, gl.SliceLayout(1, lines))
    at_column = n + gl.arange(0, N, gl.SliceLayout(0, lines))
    within = (at_row < rows)[:, None]
    if COLUMNS % (2 * N) != 0:
        within = within & (at_column < COLUMNS)[None, :]
    at = at_row[:, None].to(gl.int64) * COLUMNS + at_column[None, :]
    if FLAGS[6]:
        token = at_row.to(gl.int64)
        places = (token // more[4] * more[5] + token % more[4] * more[6])[:, None] + at_column[None, :]
        gates = gl.load(more[2] + places, mask=within, other=0.0)
        made *= gl.convert_layout(gates, halves).to(gl.float32)
    if FLAGS[7]:
        made += gl.convert_layout(gl.load(more[3] + at, mask=within, other=0.0), halves).to(gl.float32)
    gl.store(out + at, gl.convert_layout(made.to(out.dtype.element_ty), lines), mask=within)


@gluon.jit
def _sigmoid(x):
    return 1.0 / (1.0 + gl.exp(-x))


@gluon.jit
def _gelu(x):
    """GELU in its erf form, as the kernel of geglu_linear has it."""
    size = gl.minimum(gl.abs(x), 6.5)
    power = size * -1.7956582e-06 + 6.0938444e-05
    power = power * size - 9.262372e-04
    power = power * size + 8.494379e-03
    power = power * size - 5.3938787e-02
    power = power * size - 4.5847982e-01
    power = power * size - 1.1512470
    power = power * size - 0.99999547
    return 0.5 * (x + gl.abs(x)) - size * gl.exp2(power)
