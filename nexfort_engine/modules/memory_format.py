# SPDX-License-Identifier: Apache-2.0
"""How a tensor lies in memory, as far as code depends on it."""

from __future__ import annotations

import torch


class Unsupported(Exception):
    """A call or a result that cannot be expressed as tensors, ints, mappings and plain values. Its text is why."""


def format_of(tensor: torch.Tensor) -> str:
    """The memory format an artefact is made for: "c" (contiguous, what every other layout is brought to) or "l".

    "l" is channels_last or channels_last_3d of a tensor of rank 4 or 5 that is not contiguous as well.
    """
    if tensor.is_contiguous():
        return "c"
    ndim = tensor.ndim
    if ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return "l"
    if ndim == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d):
        return "l"
    return "c"


def normalised(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the memory format that `format_of` names: itself, or a contiguous copy."""
    if tensor.is_neg() or tensor.is_conj():  # views that lowered code takes for what they are views of
        tensor = tensor.resolve_neg().resolve_conj()
    return tensor if tensor.is_contiguous() or format_of(tensor) == "l" else tensor.contiguous()


def kind_of(tensor: torch.Tensor) -> tuple[str, int, str]:
    """dtype, rank and device type of a tensor: what code is lowered for, besides sizes and memory format."""
    return (str(tensor.dtype), tensor.ndim, tensor.device.type)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is strided data and of no subclass."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


def tensor_meta(tensor: torch.Tensor) -> tuple[str, int, str, str]:
    """What of a tensor is in the signature: dtype, rank, device type, memory format. Sizes are conditions, not keys.

    Raises Unsupported for tensors that are not plain strided data.
    """
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        raise Unsupported(f"a tensor of the subclass {type(tensor).__qualname__}")
    if tensor.layout is not torch.strided:
        raise Unsupported(f"a tensor of layout {tensor.layout}")
    return (*kind_of(tensor), format_of(tensor))
