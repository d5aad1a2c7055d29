# SPDX-License-Identifier: Apache-2.0
"""Calls of submodules that carry code of others, while a block is captured: each becomes a call in the graph.

The graph calls the submodule as it is at that moment, hooks and all (guards/callbacks.py). What a trace needs to know
is what comes back: as many tensors, of the sizes and dtypes that the submodule's own forward gives. That is run for
shapes alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from ..guards.call_spec import Flat, Leaves, flatten_result, spec_text, unflatten
from ..guards.callback_sites import Sites, called, result_of
from ..guards.callbacks import describe_target, module_row
from ..guards.option_recorder import Refused
from ..modules.memory_format import Unsupported
from ..modules.tree import tensors_of

CHANGES_ITSELF = "code of others is around a submodule that changes its own attributes"


def call_as_it_is(
    sites: Sites,
    path: str,
    child: nn.Module,
    kind: type[nn.Module],
    called_as_module: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """What the submodule at a path gives, as a result of a call in the graph. Raises Refused.

    child: what stands for it in the capture. kind: its class.
    """
    if sites.shaping:  # inside another one
        return kind.forward(child, *args, **kwargs)
    target, flat = module_row(path, called=called_as_module), Flat()
    spec: Any = None

    def expected(first: torch.Tensor) -> list[torch.Tensor]:
        nonlocal spec
        try:
            spec = flatten_result(_own_result(sites, child, kind, args, kwargs, first), flat)
        except Unsupported as reason:
            raise Refused(f"{describe_target(target)} gives back {reason}") from None
        except Refused:
            raise
        except Exception as error:
            raise Refused(f"it cannot be told what {describe_target(target)} gives back: {error}") from error
        if flat.ints or not flat.tensors:
            raise Refused(f"{describe_target(target)} gives back {'a number' if flat.ints else 'no tensor'}")
        return flat.tensors

    results = called(sites, target, args, kwargs, expected, lambda: [spec_text(spec)])
    return unflatten(spec, Leaves(results))


def _own_result(
    sites: Sites, child: nn.Module, kind: type[nn.Module], args: Any, kwargs: Any, first: torch.Tensor
) -> Any:
    """What its own forward gives. Its weights may lie elsewhere, or in a dtype that its hooks take them out of."""

    def own(given: tuple[Any, ...], words: dict[str, Any]) -> Any:
        lists = [(found, list(found)) for found in _lists_in((given, words))]
        with _left_alone(child), _weights_for(child, first, all_alike):
            result = kind.forward(child, *given, **words)
        if any(len(now) != len(was) or not all(map(is_, now, was)) for now, was in lists):
            raise Refused("code of others is between the block and a list that a submodule changes")
        memory, before = _memory_in(result), set(_memory_in((given, words)))
        if len(set(memory)) < len(memory) or not before.isdisjoint(memory):
            raise Refused("code of others is around a submodule that gives back memory which it is given")
        return result

    with sites.for_shapes():
        all_alike = False
        try:
            return result_of(own, args, kwargs, first)
        except (RuntimeError, NotImplementedError, TypeError):
            all_alike = True
            return result_of(own, args, kwargs, first)


def _memory_in(value: Any) -> list[StorageWeakRef]:
    """The memory of each tensor in containers of Python's."""
    return [StorageWeakRef(leaf.untyped_storage()) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _lists_in(value: Any) -> Iterator[list[Any]]:
    """The lists among arguments, and in one another."""
    if isinstance(value, list):
        yield value
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _lists_in(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _lists_in(part)


@contextlib.contextmanager
def _left_alone(child: nn.Module) -> Iterator[None]:
    """Raises Refused where code inside the block changes what a module, or one below it, has as attributes."""
    before = [(vars(sub), dict(vars(sub))) for sub in child.modules()]
    yield
    for now, was in before:
        if now.keys() != was.keys() or not all(now[name] is was[name] for name in was):
            raise Refused(CHANGES_ITSELF)


@contextlib.contextmanager
def _weights_for(child: nn.Module, first: torch.Tensor, all_alike: bool) -> Iterator[None]:
    """Inside the block all weights below a module are without data, where an argument of it is.

    Those of a narrower dtype than the argument's have that dtype, because a hook casts what is stored so; with
    `all_alike` so have all.
    """
    kept = [(table, name, tensor) for sub in child.modules() for table, name, tensor in tensors_of(sub)]
    made = []
    for table, name, tensor in kept:
        both = tensor.is_floating_point() and first.is_floating_point()
        cast = both and (all_alike or tensor.element_size() < first.element_size())
        dtype = first.dtype if cast else tensor.dtype
        table[name] = torch.empty(tuple(tensor.shape), dtype=dtype, device=first.device)
        made.append(table[name])
    try:
        yield
        if any(table.get(name) is not one for (table, name, _), one in zip(kept, made, strict=True)):
            raise Refused(CHANGES_ITSELF)
    finally:
        for table, name, tensor in kept:
            table[name] = tensor
