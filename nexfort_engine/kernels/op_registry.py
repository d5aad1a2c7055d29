# SPDX-License-Identifier: Apache-2.0
"""Operators made known to torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .layouts import empty_laid_out

_LIBRARIES: list[torch.library.Library] = []  # an operator goes with its library


def registered(schema: str, reference: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """The operator `nexfort::<name>` of this schema. Once a process and name.

    reference: what it computes on any device. fake: the same for tensors without numbers.
    """
    name = schema.partition("(")[0]
    library = torch.library.Library("nexfort", "FRAGMENT")
    library.define(schema)
    library.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"nexfort::{name}", fake, lib=library)
    _LIBRARIES.append(library)
    return getattr(torch.ops.nexfort, name).default


def registered_attention(name: str, reference: Callable[..., Any], check: Callable[..., None] | None = None) -> Any:
    """The operator of a kernel for attention: of q, k and v, scale and the order of its result, which is as q is.

    reference: as in `registered`. check: raises what it raises for tensors without numbers as well.
    """

    def fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, order: Sequence[int]) -> torch.Tensor:
        if check is not None:
            check(q, k, v)
        return empty_laid_out(q, order)

    return registered(f"{name}(Tensor q, Tensor k, Tensor v, float scale, int[] order) -> Tensor", reference, fake)
