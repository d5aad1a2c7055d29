# SPDX-License-Identifier: Apache-2.0
"""Blocks of video models for `gpu_blocks.captured`: modulation by segments, and frames that are kept. No test here."""

from __future__ import annotations

import torch
from torch.nn import functional

Tensors = list[torch.Tensor]


def segmented(w: Tensors, x: torch.Tensor, time: torch.Tensor, *lengths: torch.Tensor) -> torch.Tensor:
    """A layer between norms whose rows are modulated and gated by three segments, each by a row of one table.

    lengths: as long as the first two segments are, and as the row of each is far.
    """
    first = lengths[0].shape[0]
    second = first + lengths[1].shape[0]
    ends = ((0, first), (first, second), (second, x.shape[0]))
    segments = [(*end, row.shape[0]) for end, row in zip(ends, lengths[2:], strict=True)]
    table = functional.linear(time.float(), w[2].float(), w[3].float()).view(time.shape[0] * 3, -1).chunk(6, -1)

    def norm(x: torch.Tensor, scale: int) -> torch.Tensor:
        h = functional.rms_norm(x, [x.shape[-1]], w[0])
        for a, b, row in segments:
            h[a:b].mul_(1.0 + table[scale][row].to(h.dtype)).add_(table[scale + 1][row].to(h.dtype))
        return h

    for scale in (0, 3):
        more = functional.linear(norm(x, scale), w[1])
        for a, b, row in segments:
            x[a:b].addcmul_(more[a:b], table[scale + 2][row].to(x.dtype))
    return x


def frames(w: Tensors, x: torch.Tensor, *kept: torch.Tensor) -> torch.Tensor:
    """A block of a video's autoencoder behind frames that it kept, and the frames that it keeps of this call."""
    h, keeps = x, []
    for before, (scale, weight, bias) in zip(kept, (w[:3], w[3:]), strict=True):
        h = functional.silu(functional.normalize(h, dim=1) * (x.shape[1] ** 0.5) * scale)
        keeps.append(h[:, :, -2:].flatten())
        h = functional.conv3d(functional.pad(torch.cat([before, h], 2), (1, 1, 1, 1, 0, 0)), weight, bias)
    return torch.cat([(h + x).flatten(), *keeps])


def laid_out_frames(w: Tensors, x: torch.Tensor, *kept: torch.Tensor) -> torch.Tensor:
    """The same where all lies with channels innermost, which is how blocks hand it on."""
    second, last = (0, 4, 1, 2, 3), (0, 2, 3, 4, 1)
    h, keeps = x.permute(second), []
    for before, (scale, weight, bias) in zip(kept, (w[:3], w[3:]), strict=True):
        h = functional.silu(functional.normalize(h, dim=1) * (x.shape[-1] ** 0.5) * scale)
        keeps.append(h[:, :, -2:].permute(last).flatten())
        joined = functional.pad(torch.cat([before.permute(second), h], 2), (1, 1, 1, 1, 0, 0))
        h = functional.conv3d(joined, weight, bias)
    return torch.cat([(h + x.permute(second)).permute(last).flatten(), *keeps])


INPLACE = {
    "segmented": (
        segmented,
        torch.bfloat16,
        [(5376,), (5376, 5376), (18 * 5376, 64), (18 * 5376,)],
        [((16384, 5376), (0,)), ((2, 64), (0,)), *(((length, 4), (0,)) for length in (64, 512, 2, 3, 4))],
    )
}
VIDEOS = {
    "frames": (
        frames,
        torch.bfloat16,
        [(96, 1, 1, 1), (96, 96, 3, 3, 3), (96,)] * 2,
        [((1, 96, 4, 480, 832), (2,)), *[((1, 96, 2, 480, 832), ())] * 2],
    ),
    "laid_out_frames": (
        laid_out_frames,
        torch.bfloat16,
        [(96, 1, 1, 1), (96, 96, 3, 3, 3), (96,)] * 2,
        [((1, 4, 480, 832, 96), (1,)), *[((1, 2, 480, 832, 96), ())] * 2],
    ),
}
