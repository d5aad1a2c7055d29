# SPDX-License-Identifier: Apache-2.0
"""The kernels of `group_factors`. Imported by what lowers for a GPU alone."""

import triton
import triton.language as tl


@triton.jit
def moments_of_chunks(
    x,
    moments,
    channels,
    places,
    chunk,
    stride_n,
    stride_c,
    stride_p,
    CHUNKS: tl.constexpr,
    C_BLOCK: tl.constexpr,
    P_BLOCK: tl.constexpr,
):
    """Mean and variance of each channel in one chunk of its places: moments (N, CHUNKS, 2, C) of x (N, C, places).

    Where each row begins at a multiple of 16 numbers, which only the call knows, they are read several at a time.
    """
    c = tl.program_id(0) * C_BLOCK + tl.arange(0, C_BLOCK)
    k = tl.program_id(1)
    n = tl.program_id(2)
    here = c < channels
    first = k * chunk
    behind = tl.minimum(first + chunk, places)
    n_long, c_long = n.to(tl.int64), c[:, None].to(tl.int64)
    if (stride_n % 16 == 0) & (stride_c % 16 == 0):
        rows = x + n_long * (stride_n // 16 * 16) + c_long * (stride_c // 16 * 16)
        mean, variance = _moments(rows, stride_p, here, first, behind, P_BLOCK)
    else:
        rows = x + n_long * stride_n + c_long * stride_c
        mean, variance = _moments(rows, stride_p, here, first, behind, P_BLOCK)
    at = moments + (n * CHUNKS + k) * 2 * channels + c
    tl.store(at, mean, mask=here)
    tl.store(at + channels, variance, mask=here)


@triton.jit
def _moments(rows, stride_p, here, first, behind, P_BLOCK: tl.constexpr):
    """Means and variances of rows between two places.

    Summed less the mean of the first block, and squared. That mean lies at most sqrt(places / P_BLOCK) deviations from
    the row's own, so that a variance loses at most places / P_BLOCK roundings of fp32.
    """
    count = tl.maximum(behind - first, 1).to(tl.float32)
    p = first + tl.arange(0, P_BLOCK)
    given = here[:, None] & (p < behind)[None, :]
    values = tl.load(rows + p[None, :].to(tl.int64) * stride_p, mask=given, other=0.0).to(tl.float32)
    about = tl.sum(values, 1) / tl.minimum(count, P_BLOCK)
    apart = tl.where(given, values - about[:, None], 0.0)
    sums, squares = apart, apart * apart
    for start in range(first + P_BLOCK, behind, P_BLOCK):
        p = start + tl.arange(0, P_BLOCK)
        given = here[:, None] & (p < behind)[None, :]
        values = tl.load(rows + p[None, :].to(tl.int64) * stride_p, mask=given, other=0.0).to(tl.float32)
        apart = tl.where(given, values - about[:, None], 0.0)
        sums += apart
        squares += apart * apart
    apart = tl.sum(sums, 1) / count
    return about + apart, tl.maximum(tl.sum(squares, 1) / count - apart * apart, 0.0)


@triton.jit
def factors_of_groups(
    moments,
    weight,
    bias,
    offset,
    offsets,
    factors,
    channels,
    places,
    chunk,
    EPS: tl.constexpr,
    GROUPS: tl.constexpr,
    EACH: tl.constexpr,
    CHUNKS: tl.constexpr,
    E_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
):
    """Factors and summands (N, 2, C) of a group norm, from the moments (N, CHUNKS, 2, C) of its channels' chunks.

    offset (C) and offsets (N, C) are added to means, as they have still to be to the image.
    The variance of a group is the mean of its chunks' variances plus the variance of their means.
    """
    n = tl.program_id(0) // GROUPS
    e = tl.arange(0, E_BLOCK)
    c = tl.program_id(0) % GROUPS * EACH + e
    within = e < EACH
    added = tl.zeros([E_BLOCK], tl.float32)
    if offset is not None:
        added += tl.load(offset + c, mask=within, other=0.0).to(tl.float32)
    if offsets is not None:
        added += tl.load(offsets + n * channels + c, mask=within, other=0.0).to(tl.float32)
    base = moments + n * CHUNKS * 2 * channels + c[:, None]
    total = places * (EACH * 1.0)
    sums = tl.zeros([E_BLOCK, K_BLOCK], tl.float32)
    for start in range(0, CHUNKS, K_BLOCK):
        k = start + tl.arange(0, K_BLOCK)
        given = within[:, None] & (k < CHUNKS)[None, :]
        count = tl.maximum(tl.minimum(places - k * chunk, chunk), 0).to(tl.float32)[None, :]
        means = tl.load(base + k[None, :] * 2 * channels, mask=given, other=0.0) + added[:, None]
        sums += tl.where(given, means * count, 0.0)
    mean = tl.sum(tl.sum(sums, 1), 0) / total
    sums = tl.zeros([E_BLOCK, K_BLOCK], tl.float32)
    for start in range(0, CHUNKS, K_BLOCK):
        k = start + tl.arange(0, K_BLOCK)
        given = within[:, None] & (k < CHUNKS)[None, :]
        count = tl.maximum(tl.minimum(places - k * chunk, chunk), 0).to(tl.float32)[None, :]
        apart = tl.load(base + k[None, :] * 2 * channels, mask=given, other=0.0) + added[:, None] - mean
        variance = tl.load(base + k[None, :] * 2 * channels + channels, mask=given, other=0.0)
        sums += tl.where(given, (variance + apart * apart) * count, 0.0)
    scale = tl.zeros([E_BLOCK], tl.float32) + tl.rsqrt(tl.sum(tl.sum(sums, 1), 0) / total + EPS)
    if weight is not None:
        scale *= tl.load(weight + c, mask=within, other=0.0).to(tl.float32)
    shift = (added - mean) * scale
    if bias is not None:
        shift += tl.load(bias + c, mask=within, other=0.0).to(tl.float32)
    tl.store(factors + n * 2 * channels + c, scale, mask=within)
    tl.store(factors + n * 2 * channels + channels + c, shift, mask=within)
