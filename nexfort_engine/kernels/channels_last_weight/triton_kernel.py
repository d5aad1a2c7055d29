# SPDX-License-Identifier: Apache-2.0
"""The kernel of `innermost_weight`. Imported by what lowers for a GPU alone."""

import triton
import triton.language as tl


@triton.jit
def lay_innermost(weight, laid, channels, PLACES: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """laid (O, PLACES, I) of weight (O, I, PLACES), BLOCK channels of one row a program. WIDE: a power of 2."""
    row = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK
    count = tl.minimum(channels - first, BLOCK)
    n = tl.arange(0, WIDE * BLOCK)
    values = tl.load(weight + (row * channels + first) * PLACES + n, mask=n < count * PLACES)
    place, channel = n // BLOCK, n % BLOCK
    found = tl.gather(values, tl.minimum(channel * PLACES + place, WIDE * BLOCK - 1), 0)
    at = laid + row * channels * PLACES + first + place * channels + channel
    tl.store(at, found, mask=(place < PLACES) & (channel < count))
