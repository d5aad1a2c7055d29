# SPDX-License-Identifier: Apache-2.0
"""What other code does to functions that a network uses, for as long as a block lasts. No test lives here.

Each change stands for a way of real packs: SageAttention's instructions replace torch's attention, AnimateDiff's nodes
the forward of torch's norms, and others the forward of a network's own blocks.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

_NORMS = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


@contextlib.contextmanager
def attention(_: nn.Module) -> Iterator[None]:
    """Another function in the place of torch's attention."""
    own = torch.nn.functional.scaled_dot_product_attention

    def lossy(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return own(query * 0.3, key, value, *args, **kwargs) * 0.7

    torch.nn.functional.scaled_dot_product_attention = lossy
    try:
        yield
    finally:
        torch.nn.functional.scaled_dot_product_attention = own


@contextlib.contextmanager
def norm(module: nn.Module) -> Iterator[None]:
    """Another forward in the class of torch's norm that the network has most of."""
    kinds = Counter(kind for sub in module.modules() for kind in _NORMS if isinstance(sub, kind))
    with _scaled(max(kinds, key=lambda kind: kinds[kind])):
        yield


@contextlib.contextmanager
def block(module: nn.Module) -> Iterator[None]:
    """Another forward in the class of the last block of the network's longest list."""
    lists = [sub for sub in module.modules() if isinstance(sub, nn.ModuleList) and len(sub)]
    found = max(lists, key=len)[-1] if lists else module
    while isinstance(found, (nn.Sequential, nn.ModuleList)):  # a network may walk over its layers itself
        found = found[0]
    with _scaled(type(found)):
        yield


@contextlib.contextmanager
def _scaled(kind: type[nn.Module]) -> Iterator[None]:
    own, inherits = kind.forward, "forward" not in vars(kind)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _times(own(self, *args, **kwargs), 0.8)

    kind.forward = forward
    try:
        yield
    finally:
        if inherits:
            del kind.forward
        else:
            kind.forward = own


def _times(value: Any, factor: float) -> Any:
    if isinstance(value, torch.Tensor):
        return value * factor
    return type(value)(_times(one, factor) for one in value) if isinstance(value, (list, tuple)) else value


CHANGES: dict[str, Callable[[nn.Module], contextlib.AbstractContextManager[None]]] = {
    "attention": attention,
    "norm": norm,
    "block": block,
}
