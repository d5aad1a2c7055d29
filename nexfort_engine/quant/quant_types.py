# SPDX-License-Identifier: Apache-2.0
"""The names of quantisation, those of the old engine: fp8_<activations>_<weights>_<kind>, and int8_dynamic."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..config.options import check_name

_FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class QuantType:
    """How a linear layer is packed. activation: what its input is brought to in each call; None: it stays as it is.

    per_tensor: one scale for a whole factor, in the place of one for each of its rows.
    """

    name: str
    weight: torch.dtype
    activation: torch.dtype | None
    per_tensor: bool = False


def _types() -> dict[str, QuantType]:
    found = [QuantType("int8_dynamic", torch.int8, torch.int8)]
    for act, activation in _FP8.items():
        for wgt, weight in _FP8.items():
            for scale in ("", "_per_tensor"):
                name = f"fp8_{act}_{wgt}"
                found.append(QuantType(f"{name}_dynamic{scale}", weight, activation, bool(scale)))
                found.append(QuantType(f"{name}_weightonly{scale}", weight, None, bool(scale)))
    return {kind.name: kind for kind in found}


TYPES = _types()


def quant_type(name: str) -> QuantType:
    """The type of a name. Raises ValueError with the nearest name and all of them."""
    check_name(name, TYPES, "quant_type")
    return TYPES[name]
