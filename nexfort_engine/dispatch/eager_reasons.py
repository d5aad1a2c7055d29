# SPDX-License-Identifier: Apache-2.0
"""Why a call runs eager for the modes of torch in which it is made: no artefact can follow them."""

from __future__ import annotations

from typing import Any

import torch

from ..capture.side_effects import tensors_held
from ..cudagraphs.host_constants import tensors_in
from ..runtime.engine_state import EngineState
from ..system import torch_modes


def unfit_modes(state: EngineState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why no artefact can follow the modes of torch in which a call is made, or None."""
    if torch.is_grad_enabled() and _may_need_gradients(state, args, kwargs):
        return "gradients are on; run it under torch.no_grad() or torch.inference_mode()"

    def device_types() -> set[str]:
        return {tensor.device.type for tensor in (*tensors_in((args, kwargs)), *state.root.parameters())}

    return torch_modes.unsupported(device_types)


def _may_need_gradients(state: EngineState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether something that a call computes with may require a gradient.

    Where a host attaches functions to weights, what trains may be anywhere in these.
    """
    if state.provider is not None:
        return True
    held = (*state.root.parameters(), *tensors_held(state.root).values())
    return any(tensor.requires_grad for tensor in (*held, *tensors_in((args, kwargs))))
