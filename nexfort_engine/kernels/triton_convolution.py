# SPDX-License-Identifier: Apache-2.0
"""The kernel of convolution.py in Triton's language: what Inductor reads in place of gluon_convolution.py's.

Imported by what lowers for a GPU alone. It computes the same; nobody calls it on a card.
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
    out,
    images,
    height,
    width,
    scratch,
    BIASED: tl.constexpr,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    STAGES: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """out (images, height, width, COLUMNS) of x (images, height, width, CHANNELS), weight (COLUMNS, 3, 3, CHANNELS).

    A convolution with stride 1 and one line of zeros around, plus bias (COLUMNS) where BIASED. All contiguous. scratch
    is not read. CHANNELS is a multiple of 64, COLUMNS of N + R. PROGRAMS: that are run.
    """
    pixels = images * height * width
    blocks = tl.cdiv(pixels, PIXELS)
    channel = tl.arange(0, SOME)
    for part in range(tl.program_id(0), blocks * (COLUMNS // SOME), PROGRAMS):
        pixel = part % blocks * PIXELS + tl.arange(0, PIXELS)
        n = part // blocks * SOME + tl.arange(0, SOME)
        row = pixel // width % height
        column = pixel % width
        sums = tl.zeros([PIXELS, SOME], tl.float32)
        for place in range(9):
            down = place // 3 - 1
            across = place % 3 - 1
            inside = (row + down >= 0) & (row + down < height) & (column + across >= 0) & (column + across < width)
            seen = x + (pixel + down * width + across)[:, None].to(tl.int64) * CHANNELS + channel[None, :]
            at = weight + (n[None, :] * 9 + place) * CHANNELS + channel[:, None]
            for start in range(0, CHANNELS, SOME):
                a = tl.load(seen + start, mask=((pixel < pixels) & inside)[:, None], other=0.0)
                sums = tl.dot(a, tl.load(at + start), sums)
        if BIASED:
            sums += tl.load(bias + n).to(tl.float32)[None, :]
        to = out + pixel[:, None].to(tl.int64) * COLUMNS + n[None, :]
        tl.store(to, sums.to(out.dtype.element_ty), mask=(pixel < pixels)[:, None])
