# SPDX-License-Identifier: Apache-2.0
"""`QuantisedLinear`: a linear layer whose weight is packed in fp8 or int8, in the place of a torch.nn.Linear.

Its forward is plain operators, so it runs eager, in torch.export and in artefacts alike, and packed weight and scales
are arguments of an artefact like any weights. The packed numbers are kept as whole numbers of eight bits: whoever casts
a model, or asks for the dtype of its weights (diffusers and peft do), goes by weights in floating point and leaves
these alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from ..weights.subclass_unwrap import is_plain
from .matmul import narrowed, times
from .quant_types import QuantType

SCALE = "weight_scale"


class QuantisedLinear(nn.Linear):
    """A torch.nn.Linear with another weight.

    weight: (out_features, in_features), the bits of the packed numbers; weight_scale: (out_features, 1), or (1, 1).
    state_dict has the names of the original's and weight_scale; what is loaded may be either's, and is packed on its
    way if it is not. In float64 the product is computed in full, with the weight as it is packed: see
    dispatch/verify.py.
    """

    kind: QuantType
    weight_scale: torch.Tensor

    def __init__(self, like: nn.Linear, kind: QuantType) -> None:
        """Pack the weight of `like`, which stays as it is; the bias is shared."""
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.kind = like.in_features, like.out_features, kind
        self.training = like.training
        bits, scale = _packed(like.weight.detach(), kind)
        self.weight = nn.Parameter(bits, requires_grad=False)
        self.register_buffer(SCALE, scale)
        self.bias = like.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # torch names it so
        kind = self.kind
        if kind.activation is None or input.dtype == torch.float64:
            bias = self.bias.to(input.dtype) if self.bias is not None else None
            return linear(input, self.full_weight(input.dtype), bias)
        rows = input.reshape(-1, self.in_features)
        x = narrowed(rows, kind.activation, per_tensor=kind.per_tensor)
        result = times(x, (self._numbers(), self.weight_scale), self.bias, input, per_tensor=kind.per_tensor)
        return result.reshape(*input.shape[:-1], self.out_features)

    def full_weight(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight as it is packed, in full."""
        wide = torch.promote_types(dtype, torch.float32)
        return (self._numbers().to(wide) * self.weight_scale.to(wide)).to(dtype)

    def _numbers(self) -> torch.Tensor:
        return self.weight.view(self.kind.weight) if self.kind.weight != torch.int8 else self.weight

    def extra_repr(self) -> str:
        """What repr says."""
        return f"{super().extra_repr()}, {self.kind.name}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Moves as any module does; scales stay in float32 when a model is cast, as products take them."""
        scale = self.weight_scale
        super()._apply(fn, recurse)
        if self.weight_scale.dtype != scale.dtype:
            self.weight_scale = scale.to(self.weight_scale.device)
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        name = f"{prefix}weight"
        given = state_dict.get(name)
        if isinstance(given, torch.Tensor) and given.is_floating_point() and given.shape == self.weight.shape:
            bits, scale = _packed(given.to(self.weight.device), self.kind)
            state_dict = {**state_dict, name: bits, f"{prefix}{SCALE}": scale}
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _packed(weight: torch.Tensor, kind: QuantType) -> tuple[torch.Tensor, torch.Tensor]:
    """The bits and the scales of a full weight."""
    numbers, scale = narrowed(weight, kind.weight, per_tensor=kind.per_tensor)
    return (numbers if kind.weight == torch.int8 else numbers.view(torch.uint8)), scale


def holds_quantised(modules: Iterable[nn.Module]) -> bool:
    """Whether one of some networks has weights that are packed, by this engine or by others."""
    return any(
        isinstance(sub, QuantisedLinear)
        or any(not is_plain(weight) for weight in sub._parameters.values() if weight is not None)
        for module in modules
        for sub in module.modules()
    )
