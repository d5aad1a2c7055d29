# SPDX-License-Identifier: Apache-2.0
"""One call of a whole backbone, taken apart: what a CUDA graph of it is fed with, and how it is put together again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..guards.call_spec import Flat, Leaves, flatten, unflatten_call
from ..guards.option_recorder import Path, Refused, look, where
from ..modules.tree import PLAIN


@dataclass
class StepCall:
    """A call's parts. fed: where in its options tensors lie that the backbone uses. tensors: its own, then those.

    lasting: names of some of its own by their places; calls with equal names have tensors of equal bits there, and
    weights that are the same. modes: of torch, in which it is made.
    """

    spec: Any
    flat: Flat
    fed: list[Path]
    tensors: list[torch.Tensor]
    step_invariant: dict[int, Hashable]
    modes: Hashable = None

    @classmethod
    def of(
        cls,
        spec: Any,
        flat: Flat,
        fed: list[Path],
        step_invariant: dict[int, Hashable] | None = None,
        modes: Hashable = None,
    ) -> StepCall:
        """Of the places `fed` only those are kept where this call has a tensor: its key says which."""
        found = [(path, look(flat.mappings, path)) for path in fed]
        there = [(path, value) for path, value in found if isinstance(value, torch.Tensor)]
        tensors = [*flat.tensors, *(separate(value) for _, value in there)]
        return cls(spec, flat, [path for path, _ in there], tensors, step_invariant or {}, modes)

    @property
    def made_of(self) -> Hashable:
        """A name for what is made of the tensors that have one."""
        return tuple(self.step_invariant.values())

    def key(self) -> Any:
        """What calls that may share a graph have in common."""
        sizes = tuple(map(_laid, self.tensors)), tuple(self.flat.ints)
        return self.spec, *sizes, tuple(self.fed), tuple(self.step_invariant), self.modes

    def arguments(self, tensors: list[torch.Tensor], mappings: Sequence[dict[Any, Any]]) -> Any:
        """(args, kwargs) of the call with others in the place of its own tensors and mappings."""
        return unflatten_call(self.spec, Leaves(tensors, self.flat.ints, list(mappings)))

    def plainly(self, plain: Callable[..., Any]) -> Any:
        """What `plain` gives for the call as it was made."""
        args, kwargs = self.arguments(self.flat.tensors, self.flat.mappings)
        return plain(*args, **kwargs)

    def with_tensors(self, tensors: list[torch.Tensor]) -> Any:
        """(args, kwargs) of the call with others in the place of `tensors`; the caller's mappings stay as they are."""
        mappings, own = [dict(mapping) for mapping in self.flat.mappings], len(self.flat.tensors)
        for path, tensor in zip(self.fed, tensors[own:], strict=True):
            inner = mappings[path[0]]
            for key in path[1:-1]:
                inner[key] = inner = dict(inner[key])
            inner[path[-1]] = tensor
        return self.arguments(tensors[:own], mappings)


def places_of(tensors: list[Any], mappings: list[dict[Any, Any]]) -> list[Path] | None:
    """Every place in mappings where one of these very tensors lies; None where one lies in none."""
    found: dict[int, list[Path]] = {}
    left: list[tuple[Path, Any]] = [((number,), mapping) for number, mapping in enumerate(mappings)]
    while left:
        path, value = left.pop()
        if isinstance(value, dict):
            left += [((*path, key), inner) for key, inner in value.items()]
        elif isinstance(value, torch.Tensor):
            found.setdefault(id(value), []).append(path)
    wanted = dict.fromkeys(map(id, tensors))
    return [path for one in wanted for path in found[one]] if wanted.keys() <= found.keys() else None


def _laid(tensor: torch.Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, _attributes(tensor) if vars(tensor) else ()


def _attributes(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Attributes that others set on a tensor, which code may ask for; plain ones with their values."""
    return tuple((name, repr(one) if type(one) in PLAIN else type(one)) for name, one in vars(tensor).items())


def separate(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with a place in memory for each number: an expanded one, such as a batch of one timestep, copied."""
    return tensor.contiguous() if overlaps(tensor) else tensor


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether one place in memory is several of the tensor's numbers, so that it cannot be written to."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def empty_as(tensors: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Tensors laid out as these are, with nothing in them and the same attributes."""
    made = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device) for t in tensors]
    for one, like in zip(made, tensors, strict=True):
        vars(one).update(vars(like))
    return made


def used_options(looked_up: list[torch.Tensor], flat: Flat, before: dict[Path, torch.Tensor]) -> list[Path]:
    """Where those tensors of a call's options lie that a step used.

    looked_up: those that its regions used. before: what those that the backbone itself used held. Raises Refused where
    a graph cannot be fed with them.
    """
    by_regions = places_of(looked_up, flat.mappings)
    if by_regions is None:
        raise Refused("a block uses a tensor that the backbone puts into its options")
    for path, held in before.items():
        if not _equal(look(flat.mappings, path), held):  # a slot would be written to, not what the caller has
            raise Refused(f"the backbone writes to the tensor {where(path)}")
    return list(dict.fromkeys([*before, *by_regions]))


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all numbers are the same, those that are none too."""
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())


def write_result(result: Any, outputs: list[torch.Tensor], output: Any) -> bool:
    """Copy what a step returns to where it is read after each replay. False: it is not what it was.

    The tensors that the step made belong to the graph, and go with this call.
    """
    made = Flat()
    if flatten(result, made) != output or [t.shape for t in made.tensors] != [t.shape for t in outputs]:
        return False
    for place, tensor in zip(outputs, made.tensors, strict=True):
        place.copy_(tensor)
    return True
