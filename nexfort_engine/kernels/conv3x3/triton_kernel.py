# SPDX-License-Identifier: Apache-2.0
"""Kernels of op.py in Triton's language: what Inductor reads in place of gluon_kernel.py's, and sums.

Imported by what lowers for a GPU alone. `convolve` computes the same as that kernel; nobody calls it on a card.
"""

import triton
import triton.language as tl

PIXELS = tl.constexpr(64)  # of a part
SOME = tl.constexpr(32)  # channels of the results in a part, and of the images in a block


@triton.jit
def convolve(
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
    BIASED: tl.constexpr,
    SIDE: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    STAGES: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """out of x (images, height, width, channels), all contiguous; one line of zeros lies around.

    SIDE = 3: weight (columns, 3, 3, channels), out (images, height, width, columns). SIDE = 2: weight (4, columns, 2,
    2, channels) of each phase, out (images, 2 * height, 2 * width, columns). bias (columns), where BIASED. unread: a
    tensor for those who do not call the kernel; scratch is not read either. channels is a multiple of 64, columns of
    N + R. PROGRAMS: that are run.
    """
    phases: tl.constexpr = 4 if SIDE == 2 else 1
    scale: tl.constexpr = 2 if SIDE == 2 else 1
    pixels = images * height * width
    blocks = tl.cdiv(pixels, PIXELS)
    channel = tl.arange(0, SOME)
    for part in range(tl.program_id(0), blocks * (columns // SOME) * phases, PROGRAMS):
        pixel = part % blocks * PIXELS + tl.arange(0, PIXELS)
        n = part // blocks * SOME + tl.arange(0, SOME)
        phase = part // blocks * SOME // columns
        row = pixel // width % height
        column = pixel % width
        sums = tl.zeros([PIXELS, SOME], tl.float32)
        for place in range(SIDE * SIDE):
            down = place // SIDE - 1
            across = place % SIDE - 1
            if SIDE == 2:
                down += phase // 2
                across += phase % 2
            inside = (row + down >= 0) & (row + down < height) & (column + across >= 0) & (column + across < width)
            seen = x + (pixel + down * width + across)[:, None].to(tl.int64) * channels + channel[None, :]
            at = weight + (n[None, :] * SIDE * SIDE + place) * channels + channel[:, None]
            for start in range(0, channels, SOME):
                a = tl.load(seen + start, mask=((pixel < pixels) & inside)[:, None], other=0.0)
                sums = tl.dot(a, tl.load(at + start), sums)
        line = (pixel // width // height * scale * height + scale * row + phase // 2).to(tl.int64)
        to = out + (line * (scale * width) + scale * column + phase % 2)[:, None] * columns
        n -= phase * columns
        if BIASED:
            sums += tl.load(bias + n).to(tl.float32)[None, :]
        tl.store(to + n[None, :], sums.to(out.dtype.element_ty), mask=(pixel < pixels)[:, None])


@triton.jit
def sum_places(weight, sums, rows, channels, BLOCK: tl.constexpr):
    """sums (4, rows, 2, 2, channels) of weight (rows, 3, 3, channels): of those of its places that read one pixel.

    Of the two lines of a phase with an even line the first reads what is above, the second what its own two lines read;
    with an odd one it is the other way round. Columns likewise. BLOCK channels of one row a program.
    """
    row = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    given = weight + row * 9 * channels + channel
    top, near, far = _line(given, channels, inside)
    left, middle, right = _line(given + 3 * channels, channels, inside)
    low, under, last = _line(given + 6 * channels, channels, inside)
    made = sums + row * 4 * channels + channel
    below = 2 * channels
    odd = 8 * rows * channels
    _put(made, rows, channels, inside, top, near, far)
    _put(made + below, rows, channels, inside, left + low, middle + under, right + last)
    _put(made + odd, rows, channels, inside, top + left, near + middle, far + right)
    _put(made + odd + below, rows, channels, inside, low, under, last)


@triton.jit
def _line(given, channels, inside):
    """Three places of a weight side by side."""
    a = tl.load(given, mask=inside).to(tl.float32)
    b = tl.load(given + channels, mask=inside).to(tl.float32)
    c = tl.load(given + 2 * channels, mask=inside).to(tl.float32)
    return a, b, c


@triton.jit
def _put(to, rows, channels, inside, a, b, c):
    """The sums of such places for even columns, and for odd ones in the phase behind."""
    dtype = to.dtype.element_ty
    odd = to + 4 * rows * channels
    tl.store(to, a.to(dtype), mask=inside)
    tl.store(to + channels, (b + c).to(dtype), mask=inside)
    tl.store(odd, (a + b).to(dtype), mask=inside)
    tl.store(odd + channels, c.to(dtype), mask=inside)
