# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's weights on loan: offloaded, cast and patched by its own code, layer by layer, just before a region's call.

ComfyUI's layers (comfy.ops) decide on every call: where `comfy_cast_weights` is set or functions are attached, they
copy their weights to the device of their input, cast them, and run LoRA patches over them (`cast_bias_weight`). That
very function is called here, so that the result is ComfyUI's for whatever state its patcher left the layer in.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from ..loans import NotLent

_PLAIN = "disable_weight_init."  # the layers whose forward, with nothing to cast, is torch's own


class ComfyWeights:
    """The lender of one BaseModel."""

    hidden: ClassVar[Mapping[str, Any]] = {"comfy_cast_weights": False, "weight_function": [], "bias_function": []}
    signs = (*hidden, "_v")  # the last is dynamic VRAM's

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)

    def lends(self, layer: nn.Module) -> bool:
        """Layers of comfy.ops that cast in the plain way. Others have code of their own, which is traced as it is."""
        kind = type(layer)
        for base in kind.__mro__:
            if base.__module__ == "comfy.ops" and base.__qualname__.startswith(_PLAIN):
                same = ("forward", "forward_comfy_cast_weights")
                return "Embedding" not in base.__qualname__ and all(getattr(kind, n) is getattr(base, n) for n in same)
        return False

    def due(self, layer: nn.Module) -> bool:
        """As the layer's own forward asks. Raises NotLent under dynamic VRAM."""
        own = layer.__dict__
        if "_v" in own:
            raise NotLent(
                "its weights are kept by ComfyUI's dynamic VRAM, from which nothing is borrowed yet; to compile, start "
                "ComfyUI with --disable-dynamic-vram"
            )
        if own.get("weight_function") or own.get("bias_function"):
            return True
        return bool(layer.comfy_cast_weights) and layer.weight is not None

    def dtype(self) -> torch.dtype | None:
        """The dtype that ComfyUI computes in where it is not that of the weights."""
        return getattr(self._model(), "manual_cast_dtype", None)

    def lend(self, layer: nn.Module, device: torch.device, dtype: torch.dtype | None) -> dict[str, Any]:
        """Copy, cast and patch as ComfyUI does."""
        import comfy.ops

        weight: Any = layer.weight
        bias: Any = layer.bias if hasattr(layer, "bias") else None
        *found, ticket = comfy.ops.cast_bias_weight(
            layer,
            dtype=dtype or weight.dtype,
            device=device,
            bias_dtype=dtype or (bias.dtype if bias is not None else weight.dtype),
            offloadable=True,
        )
        kept = found
        if ticket is not None and ticket[0] is not None:
            # what went over a stream may lie in a buffer that the next layer overwrites
            kept = [tensor.clone() if tensor is not None else None for tensor in found]
            comfy.ops.uncast_bias_weight(layer, *found, ticket)
        return dict(zip(("weight", "bias"), kept, strict=True))
