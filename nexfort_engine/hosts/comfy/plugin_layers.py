# SPDX-License-Identifier: Apache-2.0
"""Layers of plugins that make their weights by code of their own: custom operations such as GGUF's.

Such a layer derives from one of comfy.ops, keeps its forward, and has a method `cast_bias_weight` that unpacks,
dequantises and patches what it stores. Borrowed weights come from that method. Whether the layer then does no more than
the one it derives from is written nowhere, so it is tried once a kind: the same input through the layer, and through
its resident self with the weights that it made, must give the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...capture.shadow_module import Shadow
from ...modules.tree import WeightSlots
from ...reporting.report import named
from ...weights.subclass_unwrap import is_plain

log = logging.getLogger("nexfort")

_METHOD = "cast_bias_weight"
_SIDE = 8  # of the picture that a convolution is tried with


def casts_itself(layer: Any) -> bool:
    """Whether a layer has the method that makes its weights, and code of its own that may use it."""
    own = type(layer).forward_comfy_cast_weights.__module__ != "comfy.ops"
    return own and callable(getattr(type(layer), _METHOD, None))


class OwnCasts:
    """Which layers of one network make their weights by themselves. hidden: what a resident layer shows."""

    def __init__(self, hidden: Mapping[str, Any]) -> None:
        self._hidden = hidden
        self._tried: dict[Any, bool] = {}

    def can_lease(self, layer: Any, dtype: torch.dtype) -> bool:
        """Whether this layer's weights can be leased for calls in `dtype`. Tried with data where its kind is new.

        A cancel that comes meanwhile (no Exception), and memory that is not there, are for ComfyUI to deal with.
        """
        weights = [value for value in layer._parameters.values() if value is not None]
        kind = (type(layer), dtype, *[(type(w), w.dtype, getattr(w, "tensor_type", None)) for w in weights])
        if kind not in self._tried:
            try:
                self._tried[kind] = self._is_plain_inside(layer, dtype)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # code of others, tried where it did not expect it: it runs as it is
                log.debug("Nexfort: %s cannot be tried: %s", type(layer).__qualname__, named(error))
                self._tried[kind] = False
        return self._tried[kind]

    @staticmethod
    def cast(layer: Any, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
        """The layer's weights, made by its own code."""
        weight, bias = layer.cast_bias_weight(dtype=dtype, device=device, bias_dtype=dtype)
        return {name: t for name, t in (("weight", weight), ("bias", bias)) if t is not None}

    def _is_plain_inside(self, layer: Any, dtype: torch.dtype) -> bool:
        given = _input(layer)
        if given is None or not layer._parameters:
            return False
        device = next(value.device for value in layer._parameters.values() if value is not None)
        given = given.to(device, dtype)
        with torch.inference_mode():
            made = self.cast(layer, dtype, device)
            if not all(is_plain(t) for t in made.values()):
                return False
            names = WeightSlots(layer).names
            if sorted(names) != sorted(made):
                return False
            resident = Shadow(layer, [made[name] for name in names], {id(layer): self._hidden}).module
            # its own code, also where the layer is a region, whose forward is a shim of ours
            return torch.equal(resident(given), type(layer).forward(layer, given))


def _input(layer: Any) -> torch.Tensor | None:
    """Something to try a layer with, by the attributes of torch's own layers; None for another kind of layer."""
    generator = torch.Generator().manual_seed(0)
    if isinstance(layer, nn.Linear):
        shape = [2, layer.in_features]
    elif isinstance(layer, nn.modules.conv._ConvNd):
        shape = [1, layer.in_channels, *[max(_SIDE, *layer.kernel_size)] * len(layer.kernel_size)]
    elif isinstance(layer, nn.GroupNorm):
        shape = [2, layer.num_channels, 4]
    elif isinstance(layer, (nn.LayerNorm, nn.RMSNorm)):
        shape = [2, *layer.normalized_shape]
    else:
        return None
    return torch.randn(shape, generator=generator)
