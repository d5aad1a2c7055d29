# SPDX-License-Identifier: Apache-2.0
"""Collectives: operators by which a block speaks with the same block in other processes, from inside an artefact.

A process group has a name that another process, or the next run, gives to another group. So an artefact knows a group
by where the block holds it: the number of that place among those of the block (`group_names`). The operator looks up
the name that the group has now. Whatever is left out of an artefact's description because it differs from rank to rank
is looked at once more where code names it (`Ranks`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from ..system.process_group import distributed

WHOLE = -1  # the number of the group of all processes, where the block holds it nowhere
_DEPTH = 5  # of objects in each other, in which groups are looked for
_TORCH = torch.__file__.rpartition("/")[0]


# ---- groups that a block holds ---------------------------------------------------------------------------------------


def is_group(value: Any) -> bool:
    """Whether a value is a process group, or a mesh of processes."""
    found = distributed()
    if found is None:
        return False
    meshes = sys.modules.get("torch.distributed.device_mesh")
    return isinstance(value, found.ProcessGroup) or (meshes is not None and isinstance(value, meshes.DeviceMesh))


def describe_group(value: Any) -> list[Any]:
    """A group or mesh as JSON that is the same on all its ranks and in every run."""
    if isinstance(value, distributed().ProcessGroup):
        return ["process group", value.size()]
    return ["mesh of processes", value.device_type, list(value.shape), list(value.mesh_dim_names or ())]


def of_ranks(fields: dict[str, Any]) -> set[str]:
    """Names among the fields of an object whose values differ from rank to rank: it holds a group beside them."""
    if not any(map(is_group, fields.values())):
        return set()
    return {name for name, value in fields.items() if "rank" in name or isinstance(value, torch.device)}


def group_names(module: nn.Module, reads: Iterable[Sequence[Any]]) -> list[str]:
    """The names of the process groups that attributes of a block hold, each once.

    reads: rows that begin with a module's dotted name and an attribute's, those that code of the block reads.
    """
    if distributed() is None:
        return []
    names: dict[str, None] = {}
    seen: dict[int, Any] = {}
    for path, name in sorted({(row[0], row[1]) for row in reads}):
        value = module.get_submodule(path).__dict__.get(name)
        names.update(dict.fromkeys(_names_in(value, _DEPTH, seen)))
    return list(names)


def _names_in(value: Any, depth: int, seen: dict[int, Any]) -> Iterator[str]:
    other = (nn.Module, torch.Tensor, type, types.ModuleType)
    if id(value) in seen or isinstance(value, other) or inspect.isroutine(value):
        return
    if is_group(value):
        seen[id(value)] = value
        groups = [value] if isinstance(value, distributed().ProcessGroup) else value.get_all_groups()
        yield from (str(group.group_name) for group in groups)
    elif depth and type(value) in (list, tuple, dict):
        for item in list(value.values() if isinstance(value, dict) else value):
            yield from _names_in(item, depth - 1, seen)
    elif depth and type(fields := getattr(value, "__dict__", None)) is dict:
        seen[id(value)] = value
        for _, item in sorted(fields.items()):
            yield from _names_in(item, depth - 1, seen)


def number_of(name: str, held: list[str]) -> int | None:
    """The number that an artefact knows a group by; None where the block does not hold it."""
    if name in held:
        return held.index(name)
    return WHOLE if name == _whole() else None


def _whole() -> str:
    return str(distributed().group.WORLD.group_name)


def facts_of(numbers: Iterable[int], names: list[str], *, ranks: bool) -> list[list[int]] | None:
    """[number, size, rank or -1] for groups, as an artefact rests on them; None where one is not there now.

    ranks: what the artefact computes depends on the rank.
    """
    if (found := distributed()) is None:
        return None
    facts = []
    for number in sorted(set(numbers)):
        if number >= len(names):
            return None
        group = found.distributed_c10d._resolve_process_group(names[number] if number != WHOLE else _whole())
        facts.append([number, group.size(), group.rank() if ranks else -1])
    return facts


def names_a_rank(codes: Iterable[types.CodeType]) -> bool:
    """Whether code that ran may have asked for a rank, so that what it computes differs from rank to rank."""
    own = (code for code in codes if not code.co_filename.startswith(_TORCH))
    return any("rank" in name or "coordinate" in name for code in own for name in code.co_names)


# ---- the operator ----------------------------------------------------------------------------------------------------

_current: ContextVar[list[str]] = ContextVar("nexfort_groups")


@contextlib.contextmanager
def speaking_in(names: list[str]) -> Iterator[None]:
    """Inside the block an artefact's groups are those of these names."""
    token = _current.set(names)
    try:
        yield
    finally:
        _current.reset(token)


def _collective(
    given: torch.Tensor,
    kind: str,
    sizes: list[int],
    more: list[int],
    how: str,
    group: int,
    after: list[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    name = _whole() if group == WHOLE else _current.get()[group]
    operators = torch.ops._c10d_functional
    arguments = _arguments(kind, sizes, more, how)
    result = operators.wait_tensor(getattr(operators, kind)(given.contiguous(), *arguments, name))
    return result, given.new_empty(1)


def _arguments(kind: str, sizes: list[int], more: list[int], how: str) -> list[Any]:
    """What torch's operator takes between the tensor and the group's name."""
    if kind == "all_to_all_single":
        return [sizes, more]
    return [how, *sizes] if how else list(sizes)


def taken_apart(kind: str, args: tuple[Any, ...]) -> tuple[list[Any], list[Any], str] | None:
    """`sizes`, `more` and `how` of a call of torch's operator; None for one that is not known."""
    if kind == "all_to_all_single":
        return list(args[1]), list(args[2]), ""
    if kind in ("all_gather_into_tensor", "broadcast"):
        return [args[1]], [], ""
    if kind == "reduce_scatter_tensor":
        return [args[2]], [], args[1]
    return ([], [], args[1]) if kind == "all_reduce" else None


def _fake(given: Any, kind: str, sizes: Any, _more: Any, _how: str, _group: int, _after: Any) -> Any:
    first, *rest = given.shape
    if kind == "all_to_all_single" and sizes:
        first = sum(sizes)
    elif kind == "all_gather_into_tensor":
        first = first * sizes[0]
    elif kind == "reduce_scatter_tensor":
        first = first // sizes[0]
    return given.new_empty([first, *rest]), given.new_empty(1)


@functools.cache
def operator() -> Any:
    """`nexfort::collective`: one of torch's functional collectives, and the wait for it, in a group by its number.

    after: what the call before this one gave besides its result, so that calls stay in the order in which eager code
    makes them: another rank may run this block eager. What loads or unpacks code that calls it asks for it first.
    """
    library = torch.library.Library("nexfort", "FRAGMENT")
    library.define(
        "collective(Tensor given, str kind, SymInt[] sizes, SymInt[] more, str how, int group, Tensor[] after) "
        "-> (Tensor, Tensor)"
    )
    library.impl("collective", _collective, "CompositeExplicitAutograd")
    torch.library.register_fake("nexfort::collective", _fake, lib=library)
    operator.library = library  # type: ignore[attr-defined]  # the operator goes with it
    return torch.ops.nexfort.collective.default
