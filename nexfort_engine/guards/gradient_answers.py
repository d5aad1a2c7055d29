# SPDX-License-Identifier: Apache-2.0
"""What code asks about gradients and inference mode: `torch.is_grad_enabled()`, `weight.requires_grad`.

A trace runs without gradients and outside of inference mode, whatever its call does. So it answers as the call would
(capture/asked_gradients.py), and what was asked is a guard. Code that asks nothing has one artefact for all callers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

MODE, GIVEN, WEIGHT = "mode", "tensor", "weight"
Asked = tuple[str, Any, str]  # what was asked: the process, a tensor of the call by its number, a weight by its name
Row = list[Any]  # JSON: one of those, and the answer

MODES: Mapping[str, Callable[[], bool]] = {
    name: getattr(torch, name) for name in ("is_grad_enabled", "is_inference_mode_enabled")
}
TENSORS: Mapping[str, Callable[[torch.Tensor], bool]] = {
    "requires_grad": lambda tensor: tensor.requires_grad,
    "is_inference": lambda tensor: tensor.is_inference(),
}
Answers = tuple[dict[str, bool], list[dict[str, bool]]]  # of the modes, and of each tensor of a call


def answers_now(tensors: Sequence[torch.Tensor]) -> Answers:
    """What this thread's modes and the tensors of a call answer now."""
    return {name: ask() for name, ask in MODES.items()}, [of_tensor(tensor) for tensor in tensors]


def of_tensor(tensor: torch.Tensor) -> dict[str, bool]:
    """What a tensor answers."""
    return {name: ask(tensor) for name, ask in TENSORS.items()}


def weight_of(module: nn.Module, name: str) -> Any:
    """A weight of a module tree by its dotted name, None where there is none."""
    path, _, last = name.rpartition(".")
    try:
        own = module.get_submodule(path)
    except AttributeError:
        return None
    return next((held[last] for held in (own._parameters, own._buffers, own.__dict__) if last in held), None)


def fits(rows: Sequence[Row], answers: Answers, module: nn.Module) -> bool:
    """Whether a call that was noted and the weights of a module answer as captured."""
    modes, given = answers
    for kind, place, name, answer in rows:
        if kind == MODE:
            found: Any = modes[name]
        elif kind == GIVEN:
            found = given[place][name]
        else:
            weight = weight_of(module, place)
            found = TENSORS[name](weight) if isinstance(weight, torch.Tensor) else None
        if found is not answer:
            return False
    return True
