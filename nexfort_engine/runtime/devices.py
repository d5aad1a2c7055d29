# SPDX-License-Identifier: Apache-2.0
"""Where a call runs, by the devices of what it is given and of weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def device_of(devices: Iterable[torch.device]) -> torch.device:
    """Where a call runs, from the devices of what it is given and then of its weights. At least one is wanted."""
    first = None
    for device in devices:
        if device.type != "cpu":
            return device
        first = first or device
    assert first is not None, "a block has an input or a weight"
    return first


def weight_problem(weights: list[torch.Tensor]) -> str | None:
    """Why weights cannot be those of one call, or None."""
    if len({w.device for w in weights}) > 1:
        return "its weights are on different devices (partly offloaded)"
    if any(w.device.type == "meta" for w in weights):
        return "its weights are not loaded"
    if any(w.is_neg() or w.is_conj() for w in weights):
        return "a weight is a view that negates or conjugates what it is a view of"
    return None
