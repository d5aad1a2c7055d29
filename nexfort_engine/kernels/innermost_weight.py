# SPDX-License-Identifier: Apache-2.0
"""A convolution's weight of which only the compiler knows that its channels lie innermost in memory.

A captured graph goes by the weight as the module holds it: with channels innermost in its place a convolution's result
would lie so too, and what the graph looks at afterwards, or gives its caller, would be another. So the graph is told of
a contiguous weight, and Inductor is given the one that there is, which it would have made for its kernel.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .registering import registered


def reference(laid: torch.Tensor) -> torch.Tensor:
    """The weight (O, I, H, W), contiguous, of one that was laid out as (O, H, W, I)."""
    return laid.permute(0, 3, 1, 2).contiguous()


@functools.cache
def operator() -> Any:
    """The operator `nexfort::innermost_weight`, as `reference` is."""
    return registered(
        "innermost_weight(Tensor laid) -> Tensor",
        reference,
        lambda laid: laid.new_empty([laid.shape[i] for i in (0, 3, 1, 2)]),
    )


def lowerings() -> dict[Any, Any]:
    """The operator and what Inductor calls for it."""
    return {operator(): _lower}


def _lower(laid: Any) -> Any:
    """A look at the memory of `laid`, in Inductor's representation."""
    from torch._inductor.lowering import permute

    return permute(laid, [0, 3, 1, 2])
