# SPDX-License-Identifier: Apache-2.0
"""A small joint-attention transformer in plain torch, with the calling convention and the hooks of ComfyUI's."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812


class _DiTBlock(nn.Module):
    """Joint attention over prompt and image tokens with modulation, and the hooks that ComfyUI's blocks have."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.gain = heads, 1.0
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Linear(width, 4 * width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(
        self, image: torch.Tensor, text: torch.Tensor, vec: torch.Tensor, transformer_options: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        options = transformer_options.copy()
        shift, scale, gate1, gate2 = self.modulation(F.silu(vec)).unsqueeze(1).chunk(4, -1)
        x = torch.cat([text, image], 1)
        h = self.norm1(x) * (1 + scale) + shift
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        for patch in options.get("patches", {}).get("attn1_patch", ()):
            q, k, v = patch(q, k, v, options)
        attention = F.scaled_dot_product_attention
        if "optimized_attention_override" in options:
            attended = options["optimized_attention_override"](attention, q, k, v)
        else:
            attended = attention(q, k, v)
        x = x + gate1 * self.out(attended.transpose(1, 2).flatten(2))
        x = x + gate2 * self.mlp(self.norm2(x)) * self.gain
        return x[:, text.shape[1] :], x[:, : text.shape[1]]


class TorchDiT(nn.Module):
    """A small joint-attention transformer with ComfyUI's calling convention."""

    def __init__(self, depth: int, width: int = 32) -> None:
        super().__init__()
        self.patch = nn.Conv2d(4, width, 2, stride=2)
        self.text = nn.Linear(16, width)
        self.time = nn.Sequential(nn.Linear(32, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList([_DiTBlock(width, 2) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.final = nn.Linear(width, 16)

    def forward(
        self,
        x: torch.Tensor,
        timesteps: torch.Tensor,
        context: torch.Tensor,
        control: Any = None,
        transformer_options: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        options = transformer_options if transformer_options is not None else {}
        height, width = x.shape[-2] // 2, x.shape[-1] // 2
        image, text = self.patch(x).flatten(2).transpose(1, 2), self.text(context)
        image = image + self._positions(height, width, image)
        vec = self.time(_waves(timesteps * 100.0, 32).to(x.dtype))
        replaced = options.get("patches_replace", {}).get("dit", {})
        for i, block in enumerate(self.blocks):
            options["block_index"] = i
            if ("double_block", i) in replaced:

                def original(args: dict[str, Any], block: nn.Module = block) -> dict[str, Any]:
                    out = block(args["img"], args["txt"], args["vec"], args["transformer_options"])
                    return dict(zip(("img", "txt"), out, strict=True))

                args = {"img": image, "txt": text, "vec": vec, "transformer_options": options}
                out = replaced[("double_block", i)](args, {"original_block": original})
                image, text = out["img"], out["txt"]
            else:
                image, text = block(image, text, vec, options)
        x = self.final(self.norm(image)).unflatten(1, (height, width)).unflatten(-1, (4, 2, 2))
        return x.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)

    @staticmethod
    def _positions(height: int, width: int, like: torch.Tensor) -> torch.Tensor:
        rows = _waves(torch.arange(height, device=like.device), like.shape[-1] // 2)
        columns = _waves(torch.arange(width, device=like.device), like.shape[-1] // 2)
        grid = torch.cat([rows.unsqueeze(1).expand(-1, width, -1), columns.expand(height, -1, -1)], -1)
        return grid.flatten(0, 1).to(like.dtype)


def _waves(position: torch.Tensor, width: int) -> torch.Tensor:
    frequencies = torch.exp(-math.log(100.0) * torch.arange(width // 2, device=position.device) / (width // 2))
    angles = position.float().unsqueeze(-1) * frequencies
    return torch.cat([angles.cos(), angles.sin()], -1)
