# SPDX-License-Identifier: Apache-2.0
"""What code asks about tensors and modes besides sizes: `x.requires_grad`, `x.is_contiguous()`, `getattr(x, "tag", 1)`.

A trace runs without gradients, outside of inference mode, and with tensors that have no data and no attributes. So it
answers as the call would (capture/tensor_questions.py), and what was asked is a guard. Code that asks nothing has one
artefact for all callers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..modules.memory_format import format_of
from ..modules.tree import PLAIN
from .option_guards import from_json_path, same_value
from .option_recorder import look

# whom code asks: the process, a tensor of the call by its number, one of its mappings by its path, a weight by its name
MODE, GIVEN, OPTION, WEIGHT = "mode", "tensor", "option", "weight"
SAME = "same"  # which of the call's tensors are one and the same object
Row = list[Any]  # JSON: one of those, and the answer

NAMES = "names of attributes"
LIES = "lies as artefacts take it"
ORDER = "its dimensions lie in their order"
_ATTRIBUTE = "."  # begins the name of an attribute that a tensor may have
IS_PARAMETER = "._is_param"  # what `isinstance` asks for
_OTHER = object()  # in the place of a value of an attribute that no artefact can hold
_OWN = "_nexfort_answers"  # of a tensor that stands for another one, what that answers


def _is_in_order(tensor: torch.Tensor) -> bool:
    """Whether a contiguous copy has its numbers in the order of memory: a slice of a contiguous tensor has."""
    steps = [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
    return all(step > 0 for step in steps) and steps == sorted(steps, reverse=True)


MODES: Mapping[str, Callable[[], bool]] = {
    name: getattr(torch, name) for name in ("is_grad_enabled", "is_inference_mode_enabled")
}
TENSORS: Mapping[str, Callable[[torch.Tensor], Any]] = {
    "requires_grad": lambda tensor: tensor.requires_grad,
    "is_inference": lambda tensor: tensor.is_inference(),
    "is_leaf": lambda tensor: tensor.is_leaf,
    "is_conj": lambda tensor: tensor.is_conj(),
    "is_neg": lambda tensor: tensor.is_neg(),
    "is_pinned": lambda tensor: tensor.is_pinned(),
    "is_shared": lambda tensor: tensor.is_shared(),
    "is_contiguous": lambda tensor: tensor.is_contiguous(),
    NAMES: lambda tensor: sorted(vars(tensor)),
    LIES: lambda tensor: (tensor.is_contiguous() or format_of(tensor) == "l") and not tensor.storage_offset(),
    ORDER: _is_in_order,
}


def attribute(name: str) -> str:
    """The question for an attribute of a tensor. Its answer is a list of the value, an empty one where it has none."""
    return _ATTRIBUTE + name


class Snapshot(dict[str, Any]):
    """What a tensor answered, without the tensor. identity: its `id` then."""

    identity = 0

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Snapshot:
        """Of a tensor, or of the one that it stands for."""
        own = getattr(tensor, _OWN, None)
        if isinstance(own, Snapshot):
            return own
        strided = tensor.layout is torch.strided
        found = cls({name: strided and ask(tensor) for name, ask in TENSORS.items()})
        own = vars(tensor).items()  # what cannot be a guard is not kept alive
        found.update({attribute(name): [value if type(value) in PLAIN else _OTHER] for name, value in own})
        found[IS_PARAMETER] = [True] if isinstance(tensor, nn.Parameter) else []
        found.identity = id(tensor)
        return found

    def stood_for_by(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that answers so from now on."""
        setattr(tensor, _OWN, self)
        return tensor


@dataclass
class Answers:
    """What the modes of a thread and the tensors of a call answer. given: tensors, or what they answered."""

    modes: Mapping[str, bool] = field(default_factory=dict)
    given: Sequence[torch.Tensor | Snapshot] = ()
    mappings: Sequence[Any] = ()
    own: Callable[[], Sequence[Any]] = tuple  # gives the tensors of the block

    @classmethod
    def kept(cls, tensors: Sequence[torch.Tensor], mappings: Sequence[Any]) -> Answers:
        """Of this thread and of tensors as they are now."""
        return cls(_modes(), list(map(Snapshot.of, tensors)), mappings)

    @classmethod
    def now(
        cls, tensors: Sequence[torch.Tensor], mappings: Sequence[Any], own: Callable[[], Sequence[Any]] = tuple
    ) -> Answers:
        """Of this thread and of tensors, which are asked as far as somebody wants to know."""
        return cls(_modes(), tensors, mappings, own)

    def of(self, kind: str, place: Any, name: str, module: nn.Module) -> Any:
        """The answer to one question; None where nobody is there to answer."""
        if kind == MODE:
            return self.modes[name]
        if kind == SAME:
            return self.same(place, self.own())
        if kind == GIVEN:
            return answer(self.given[place], name)
        return answer(self.at(place) if kind == OPTION else weight_of(module, place), name)

    def at(self, path: list[Any]) -> Any:
        """What lies at a path of the call's mappings, as JSON has it."""
        return look(list(self.mappings), from_json_path(path))

    def same(self, paths: Sequence[list[Any]], own: Iterable[Any]) -> list[int]:
        """For each of the call's tensors, and of those at paths, the place of the first that is the same object.

        Behind them the number of tensors in `own`, those of the block, that are there twice or among the call's.
        """
        given = list(map(_identity, [*self.given, *map(self.at, paths)]))
        known, again = set(given), 0
        for one in own:
            again += (identity := _identity(one)) in known
            known.add(identity)
        return [*map(given.index, given), again]


def _modes() -> dict[str, bool]:
    return {name: ask() for name, ask in MODES.items()}


def _identity(one: Any) -> int:
    own = getattr(one, _OWN, one)
    return own.identity if isinstance(own, Snapshot) else id(one)


def answer(one: Any, name: str) -> Any:
    """What a tensor, or a snapshot of one, answers; None where there is none."""
    if isinstance(one, torch.Tensor):
        one = getattr(one, _OWN, one)
    if isinstance(one, Snapshot):
        return one.get(name, [])
    if not isinstance(one, torch.Tensor):
        return None
    if name == IS_PARAMETER:
        return [True] if isinstance(one, nn.Parameter) else []
    if name.startswith(_ATTRIBUTE):
        own = vars(one)
        return [own[name[1:]]] if name[1:] in own else []
    return TENSORS[name](one)


def weight_of(module: nn.Module, name: str) -> Any:
    """A weight of a module tree by its dotted name, None where there is none."""
    path, _, last = name.rpartition(".")
    try:
        own = module.get_submodule(path)
    except AttributeError:
        return None
    return next((held[last] for held in (own._parameters, own._buffers, own.__dict__) if last in held), None)


def fits(rows: Sequence[Row], answers: Answers, module: nn.Module) -> bool:
    """Whether a call and the weights of a module answer as captured."""
    return all(same_value(answers.of(kind, place, name, module), wanted) for kind, place, name, wanted in rows)
