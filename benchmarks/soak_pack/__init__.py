# SPDX-License-Identifier: Apache-2.0
"""A node pack that `benchmarks.soak` mounts in its ComfyUI: random conditioning, without a text encoder."""

from __future__ import annotations

import torch


class SoakConditioning:
    """What a text encoder would give for a prompt of so many tokens: the same tensors for the same numbers."""

    CATEGORY, FUNCTION, RETURN_TYPES = "testing", "make", ("CONDITIONING",)

    @classmethod
    def INPUT_TYPES(cls) -> dict:  # noqa: N802  # ComfyUI's name
        """The inputs as ComfyUI reads them."""
        whole = ("INT", {"default": 1, "min": 0, "max": 1 << 20})
        return {"required": {"seed": whole, "tokens": whole, "width": whole, "pooled": whole}}

    def make(self, seed: int, tokens: int, width: int, pooled: int) -> tuple:
        """A conditioning of `tokens` rows of `width` numbers, and a vector of `pooled` numbers if there are any."""
        generator = torch.Generator().manual_seed(seed)
        context = torch.randn((1, tokens, width), generator=generator)
        extra = {"pooled_output": torch.randn((1, pooled), generator=generator)} if pooled else {}
        return ([[context, extra]],)


NODE_CLASS_MAPPINGS = {"SoakConditioning": SoakConditioning}
