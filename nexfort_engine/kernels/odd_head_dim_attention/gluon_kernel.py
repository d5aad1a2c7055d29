# SPDX-License-Identifier: Apache-2.0
"""The kernel of `unpadded_attention` for cards of compute capability 9.0. Imported by what lowers for one alone.

A program computes parts of 128 queries of a head, one after another. One of its three groups of warps has the card copy
blocks of keys and values to shared memory, the others look at them for 64 queries each, so that a block is read once
for 128. The card multiplies 16 numbers at a time and copies lines of up to 64, so heads are in two pieces, of 64 and of
16 numbers; what is behind a head's end is zeros in shared memory.

Products with values of one block and scores of the next are begun together, and exponentials of those are computed
beside the former. The two groups take turns at beginning, so that products of one run beside exponentials of the other.

What the card copies is said to it in descriptors, which each program writes to `scratch` (gluon_autotuner.py).
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

EACH = gl.constexpr(64)  # queries of a group of warps
N = gl.constexpr(128)  # keys of a block
WIDE = gl.constexpr(64)  # numbers of the first piece of a head
REST = gl.constexpr(16)  # of the second
STAGES = gl.constexpr(3)  # blocks of keys, and of values of the block before, in shared memory
BYTES = gl.constexpr(2 * N.value * (WIDE.value + REST.value))  # of a block
SCRATCH = 512  # bytes: four descriptors

# barriers: the first keys are there, and were used; whose turn it is, for each group; then one a stage, twice
FIRST = gl.constexpr(0)
FIRST_USED = gl.constexpr(1)
TURNS = gl.constexpr(2)
THERE = gl.constexpr(4)
USED = gl.constexpr(THERE.value + STAGES.value)


@gluon.jit
def attend_unpadded_in_groups(
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
    SCALE: gl.constexpr,
    E: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    """As `triton_kernel.attend_unpadded`."""
    dtype: gl.constexpr = out.dtype.element_ty
    lines: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    short: gl.constexpr = gl.NVMMASharedLayout(32, 16, 2)
    lines4: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
    short4: gl.constexpr = gl.NVMMASharedLayout(32, 16, 4)
    sizes = [batch, heads, keys, E]
    given = (
        tma.make_tensor_descriptor(k, sizes, [kb, kh, kn, 1], [1, 1, N, WIDE], lines4),
        tma.make_tensor_descriptor(k, sizes, [kb, kh, kn, 1], [1, 1, N, REST], short4),
        tma.make_tensor_descriptor(v, sizes, [vb, vh, vn, 1], [1, 1, N, WIDE], lines4),
        tma.make_tensor_descriptor(v, sizes, [vb, vh, vn, 1], [1, 1, N, REST], short4),
    )
    # keys of a part's first block are behind those of the stages
    blocks = (
        gl.allocate_shared_memory(dtype, [STAGES + 1, N, WIDE], lines),
        gl.allocate_shared_memory(dtype, [STAGES + 1, N, REST], short),
        gl.allocate_shared_memory(dtype, [STAGES, N, WIDE], lines),
        gl.allocate_shared_memory(dtype, [STAGES, N, REST], short),
    )
    mine = (
        gl.allocate_shared_memory(dtype, [2, EACH, WIDE], lines),
        gl.allocate_shared_memory(dtype, [2, EACH, REST], short),
    )
    bars = gl.allocate_shared_memory(gl.int64, [USED + STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bars.index(FIRST), count=1)
    mbarrier.init(bars.index(FIRST_USED), count=2)
    for i in gl.static_range(2):
        mbarrier.init(bars.index(TURNS + i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(THERE + i), count=1)
        mbarrier.init(bars.index(USED + i), count=2)
    fence_async_shared()
    much = (batch, heads, queries, keys)
    asked = (q, qb, qh, ql)
    to = (out, ob, oh, ol)
    # registers of a thread: 232 for each that computes
    # fmt: off
    gl.warp_specialize([
        (_attend, (asked, to, much, blocks, mine, bars, 0, SCALE, E, PROGRAMS)),
        (_attend, (asked, to, much, blocks, mine, bars, 1, SCALE, E, PROGRAMS)),
        (_copy, (given, much, blocks, bars, PROGRAMS)),
    ], [4, 1], [232, 24])
    # fmt: on


@gluon.jit
def _copy(given, much, blocks, bars, PROGRAMS: gl.constexpr):
    """Keys of the first block, then values of each beside keys of the next, which behind the last are zeros."""
    batch, heads, queries, keys = much
    parts = (queries + 2 * EACH - 1) // (2 * EACH)
    stage = 0
    phase = 1
    first = 1
    for part in range(gl.program_id(0), parts * heads * batch, PROGRAMS):
        b = part // parts // heads
        h = part // parts % heads
        mbarrier.wait(bars.index(FIRST_USED), first)
        first ^= 1
        mbarrier.expect(bars.index(FIRST), BYTES)
        _copy_block(given[0], given[1], b, h, 0, bars.index(FIRST), blocks[0].index(STAGES), blocks[1].index(STAGES))
        for n in range(0, gl.maximum(keys, 1), N):  # of no keys one block too, which the others wait for
            mbarrier.wait(bars.index(USED + stage), phase)
            there = bars.index(THERE + stage)
            mbarrier.expect(there, 2 * BYTES)
            _copy_block(given[0], given[1], b, h, n + N, there, blocks[0].index(stage), blocks[1].index(stage))
            _copy_block(given[2], given[3], b, h, n, there, blocks[2].index(stage), blocks[3].index(stage))
            stage, phase = _following(stage, phase)


@gluon.jit
def _copy_block(wide, rest, b, h, n, there, to_wide, to_rest):
    """Both pieces of a block of one head, from its token n on."""
    dtype: gl.constexpr = to_wide.dtype
    if REINTERPRET:
        to_wide = to_wide.reinterpret(dtype, [1, 1, N, WIDE], gl.NVMMASharedLayout(128, 16, 4))
        to_rest = to_rest.reinterpret(dtype, [1, 1, N, REST], gl.NVMMASharedLayout(32, 16, 4))
    else:
        to_wide = to_wide._reinterpret(dtype, [1, 1, N, WIDE], gl.NVMMASharedLayout(128, 16, 4))
        to_rest = to_rest._reinterpret(dtype, [1, 1, N, REST], gl.NVMMASharedLayout(32, 16, 4))
    copy_block(wide, [b, h, n, 0], there, to_wide)
    copy_block(rest, [b, h, n, WIDE], there, to_rest)


@gluon.jit
def _attend(
    asked, to, much, blocks, mine, bars, GROUP: gl.constexpr, SCALE: gl.constexpr, E: gl.constexpr,
    PROGRAMS: gl.constexpr,
):  # fmt: skip
    """The queries of one group of warps."""
    batch, heads, queries, keys = much
    dtype: gl.constexpr = blocks[0].dtype
    scale: gl.constexpr = SCALE * 1.4426950408889634  # of exponentials to base 2
    results: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    rests: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST, 16])
    parts = (queries + 2 * EACH - 1) // (2 * EACH)
    q_wide = mine[0].index(GROUP)
    q_rest = mine[1].index(GROUP)
    stage = 0
    phase = 0
    turn = 0
    first = 0
    if GROUP == 1:
        mbarrier.arrive(bars.index(TURNS), count=1)
    for part in range(gl.program_id(0), parts * heads * batch, PROGRAMS):
        b = part // parts // heads
        h = part // parts % heads
        row = part % parts * (2 * EACH) + GROUP * EACH
        _read_queries(asked, b, h, row, queries, q_wide, q_rest, E)
        mbarrier.wait(bars.index(FIRST), first)
        first ^= 1
        s = _scores(q_wide, q_rest, blocks[0].index(STAGES), blocks[1].index(STAGES))
        s = warpgroup_mma_wait(0, [s])
        mbarrier.arrive(bars.index(FIRST_USED), count=1)
        s = _within(s, 0, keys)
        largest = gl.convert_layout(_largest(s), gl.SliceLayout(1, s.type.layout)) * scale
        e = gl.exp2(s * scale - largest[:, None])
        seen = (largest, _sums(e), e.to(dtype), gl.zeros([EACH, WIDE], gl.float32, results),
                gl.zeros([EACH, REST], gl.float32, rests))  # fmt: skip
        end = (keys - 1) // N * N
        for _ in range(N, end, N):
            seen = _next(seen, q_wide, q_rest, blocks, bars, stage, phase, turn, end, keys, False, GROUP, SCALE)
            turn ^= 1
            stage, phase = _following(stage, phase)
        if end > 0:
            seen = _next(seen, q_wide, q_rest, blocks, bars, stage, phase, turn, end, keys, True, GROUP, SCALE)
            turn ^= 1
            stage, phase = _following(stage, phase)
        _, total, p, result, rest = seen
        mbarrier.wait(bars.index(THERE + stage), phase)
        result, rest = _with_values(p, blocks[2].index(stage), blocks[3].index(stage), result, rest)
        result, rest = warpgroup_mma_wait(0, [result, rest])
        mbarrier.arrive(bars.index(USED + stage), count=1)
        stage, phase = _following(stage, phase)
        _write(to, b, h, row, queries, gl.sum(total, 1), result, rest, E)


@gluon.jit
def _following(stage, phase):
    """The next stage, and the phase in which its barriers are waited for."""
    again = stage == STAGES - 1
    return gl.where(again, 0, stage + 1), gl.where(again, phase ^ 1, phase)


@gluon.jit
def _read_queries(asked, b, h, first, queries, wide, rest, E: gl.constexpr):
    """Both pieces of some queries to shared memory; zeros behind the last query and behind a head's end."""
    x, xb, xh, xl = asked
    x += b.to(gl.int64) * _eights(xb) + h.to(gl.int64) * _eights(xh)
    row, e, there = _places(first, queries, WIDE, 0, E)
    wide.store(gl.load(x + row * _eights(xl) + e, mask=there, other=0.0))
    row, e, there = _places(first, queries, REST, WIDE, E)
    rest.store(gl.load(x + row * _eights(xl) + e, mask=there, other=0.0))
    fence_async_shared()


@gluon.jit
def _write(to, b, h, first, queries, total, result, rest, E: gl.constexpr):
    """Results of some queries, divided by their sums of exponentials."""
    x, xb, xh, xl = to
    dtype: gl.constexpr = x.dtype.element_ty
    x += b.to(gl.int64) * _eights(xb) + h.to(gl.int64) * _eights(xh)
    row, e, there = _places(first, queries, WIDE, 0, E)
    made = (result / gl.convert_layout(total, gl.SliceLayout(1, result.type.layout))[:, None]).to(dtype)
    gl.store(x + row * _eights(xl) + e, gl.convert_layout(made, there.type.layout), mask=there)
    row, e, there = _places(first, queries, REST, WIDE, E)
    made = (rest / gl.convert_layout(total, gl.SliceLayout(1, rest.type.layout))[:, None]).to(dtype)
    gl.store(x + row * _eights(xl) + e, gl.convert_layout(made, there.type.layout), mask=there)


@gluon.jit
def _eights(stride):
    """A stride, which is a multiple of 8: only where that is seen here are eight numbers read and written at once."""
    return stride // 8 * 8


@gluon.jit
def _places(first, queries, WIDTH: gl.constexpr, START: gl.constexpr, E: gl.constexpr):
    """Rows (64, 1) and numbers (1, WIDTH) of a piece of heads as they are read and written, and which there are."""
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    row = first + gl.arange(0, EACH, gl.SliceLayout(1, lines))
    e = START + gl.arange(0, WIDTH, gl.SliceLayout(0, lines))
    return row[:, None].to(gl.int64), e[None, :], (row < queries)[:, None] & (e < E)[None, :]


@gluon.jit
def _scores(q_wide, q_rest, k_wide, k_rest):
    """Begin q @ k.T."""
    s = gl.zeros([EACH, N], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16]))
    s = warpgroup_mma(q_wide, k_wide.permute((1, 0)), s, use_acc=False, is_async=True)
    return warpgroup_mma(q_rest, k_rest.permute((1, 0)), s, is_async=True)


@gluon.jit
def _with_values(p, v_wide, v_rest, result, rest):
    """Begin to add p @ v."""
    wide = warpgroup_mma(
        gl.convert_layout(p, gl.DotOperandLayout(0, result.type.layout, 2)), v_wide, result, is_async=True
    )
    return wide, warpgroup_mma(
        gl.convert_layout(p, gl.DotOperandLayout(0, rest.type.layout, 2)), v_rest, rest, is_async=True
    )


@gluon.jit
def _next(
    seen, q_wide, q_rest, blocks, bars, stage, phase, turn, start, keys, LAST: gl.constexpr, GROUP: gl.constexpr,
    SCALE: gl.constexpr,
):  # fmt: skip
    """What was seen, with the values of one more block, and the exponentials of the next.

    It is: the largest scores, which exponentials are relative to, sums of exponentials by threads, exponentials of the
    last block, and both pieces of the result without those.
    """
    largest, total, p, result, rest = seen
    scale: gl.constexpr = SCALE * 1.4426950408889634
    mbarrier.wait(bars.index(THERE + stage), phase)
    mbarrier.wait(bars.index(TURNS + GROUP), turn)
    s = _scores(q_wide, q_rest, blocks[0].index(stage), blocks[1].index(stage))
    result, rest = _with_values(p, blocks[2].index(stage), blocks[3].index(stage), result, rest)
    mbarrier.arrive(bars.index(TURNS + 1 - GROUP), count=1)
    s = warpgroup_mma_wait(2, [s])
    if LAST:
        s = _within(s, start, keys)
    more = gl.maximum(largest, gl.convert_layout(_largest(s), largest.type.layout) * scale)
    shrunk = gl.exp2(largest - more)
    e = gl.exp2(s * scale - more[:, None])
    total = total * gl.convert_layout(shrunk, gl.SliceLayout(1, total.type.layout))[:, None] + _sums(e)
    result, rest = warpgroup_mma_wait(0, [result, rest])
    mbarrier.arrive(bars.index(USED + stage), count=1)
    result *= gl.convert_layout(shrunk, gl.SliceLayout(1, result.type.layout))[:, None]
    rest *= gl.convert_layout(shrunk, gl.SliceLayout(1, rest.type.layout))[:, None]
    return more, total, e.to(p.dtype), result, rest


@gluon.jit
def _within(s, start, keys):
    """Scores, without those of keys that there are not."""
    n = start + gl.arange(0, N, gl.SliceLayout(0, s.type.layout))
    return gl.where((n < keys)[None, :], s, float("-inf"))


@gluon.jit
def _by_thread(s):
    """(64, N) as (64, 4, N // 32, 4, 2): a thread has all of a row but the fourth. Few numbers wait for each other."""
    return gl.reshape(s, [EACH, 4, N // 32, 4, 2])


@gluon.jit
def _largest(s):
    """(64): of each row."""
    return gl.max(gl.max(gl.max(gl.max(_by_thread(s), 4), 2), 1), 1)


@gluon.jit
def _sums(e):
    """(64, 4): of each row, by threads, which are added up in the end alone."""
    return gl.sum(gl.sum(gl.sum(_by_thread(e), 4), 2), 1)
