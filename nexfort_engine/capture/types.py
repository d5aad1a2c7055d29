# SPDX-License-Identifier: Apache-2.0
"""What a capture is asked for and what it gives, and the lock that captures take."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..guards import option_recorder
from ..guards.call_spec import Flat
from ..guards.scalar_inputs import Place
from ..guards.shape_guards import Conditions
from ..guards.tensor_answers import Answers, Snapshot
from ..modules.module_keys import Named

LOCK = threading.RLock()  # export's and Inductor's settings are process-wide: one at a time


@dataclass
class Example:
    """One call of a block, enough to capture it: the structure, and sizes in place of tensors."""

    spec: Any
    tensors: list[tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]]
    ints: list[int]
    mappings: list[dict[Any, Any]]

    changes: bool = False  # the block may change lists and mappings among them
    own: tuple[tuple[str, str, str], ...] = ()  # where the last of them are on the block itself
    thread: int = 0  # that made the call
    answers: Answers = field(default_factory=Answers)  # to what its code asks besides sizes

    @classmethod
    def of(cls, spec: Any, flat: Flat, laid: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor) -> Example:
        """The example of a call. laid: gives a tensor as artefacts are given it; it sees tensors without data."""
        strides = [laid(t.new_empty_strided(t.shape, t.stride(), device="meta")).stride() for t in flat.tensors]
        metas = [(t.shape, stride, t.dtype, t.device) for t, stride in zip(flat.tensors, strides, strict=True)]
        named = Named(flat.mappings.root)
        given = [_as_it_is_now(m, named) if flat.lists else dict(named.within(m)) for m in flat.mappings]
        answers = Answers.kept(flat.tensors, given)
        return cls(spec, metas, list(flat.ints), given, flat.lists, flat.own, threading.get_ident(), answers)


def _as_it_is_now(value: Any, named: Named) -> Any:
    """What a container holds now, without the data of its tensors: their sizes, dtype and device."""
    if type(value) in (list, tuple):
        return type(value)(_as_it_is_now(item, named) for item in value)
    if isinstance(value, dict):
        return {named.key(key): _as_it_is_now(item, named) for key, item in value.items()}
    if type(value) is torch.Tensor and value.layout is torch.strided:
        return Snapshot.of(value).stood_for_by(value.new_empty(()).expand(value.shape))
    return value


@dataclass
class Captured:
    """A graph and everything that must be checked before its artefact is used.

    graph inputs, in order: the weights in `weights` (indices of WeightSlots' tensors, those that are not plain taken
    apart), `constants`, the tensors in `tensors` (indices of the call's), the option tensors in `options` (paths), the
    ints in `ints` (indices), the numbers at `strengths` (float32, on the CPU, without dimensions). lasting: for each of
    the weights whether it is a parameter's, which the host alone changes. option_kinds: `kind_of` each option tensor.
    sites: where it calls code of others (guards/callback_sites.py). boundaries: dotted names of the submodules that
    carry such code. groups: of processes that it speaks with (guards/collectives.py). images: as it was captured for.
    lays_held: whether images in lists lie so as well. names: what its code reached by name (guards/name_guards.py).
    only_here: the first of these that no other process can compare, or "". changes: what it
    does to lists and mappings of the call (guards/given_changes.py), with results of the graph that come after those
    that `output` takes. by_strides: those of `mutated` that code changes where they are contiguous, and copies where
    not. asked: besides sizes (guards/tensor_answers.py).
    """

    graph: torch.fx.GraphModule
    weights: list[int]
    constants: list[torch.Tensor]
    tensors: list[int]
    options: list[option_recorder.Path]
    ints: list[int]
    strengths: list[Place]
    conditions: Conditions
    guards: list[list[Any]]
    reads: list[list[Any]]
    output: Any
    mutated: list[int]
    writes: list[list[Any]]
    sources: dict[str, str]
    modules: list[str] = field(default_factory=list)
    lasting: list[bool] = field(default_factory=list)
    option_kinds: list[tuple[str, int, str]] = field(default_factory=list)
    sites: list[list[list[Any]]] = field(default_factory=list)
    boundaries: list[str] = field(default_factory=list)
    groups: list[list[int]] = field(default_factory=list)
    images: bool = False
    lays_held: bool = False
    names: list[list[Any]] = field(default_factory=list)
    only_here: str = ""
    changes: list[list[Any]] = field(default_factory=list)
    by_strides: list[int] = field(default_factory=list)
    asked: list[list[Any]] = field(default_factory=list)
