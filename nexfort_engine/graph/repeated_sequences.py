# SPDX-License-Identifier: Apache-2.0
"""Repeats: where a sequence of operators is there several times in a row, and where it is best cut.

Operators are compared by what they are, by their options, and by kind and layout of what they give; then by how they
are wired: each takes either what its own time gave, at the same place, or something from outside of the same kind.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

_LEAST_PERIOD = 8
_LEAST_TIMES = 2
_NEVER = 1_000_000  # the cost of a cut that may not be
_LOOKS = set(
    "alias chunk contiguous detach dropout expand flatten getitem movedim permute reshape select slice split squeeze t "
    "to transpose unflatten unsqueeze view".split()
)
Nodes = Sequence[Node]


def segments_of(nodes: Nodes) -> list[list[Nodes]]:
    """The operators in order as stretches: each is a list of equal sequences, one after another; of one, if alone."""
    return _segments(nodes, _crossing_costs(nodes))


def _segments(nodes: Nodes, costs: dict[Node, int]) -> list[list[Nodes]]:
    """The calls in order as stretches: each is a list of equal sequences, one after another; of one, if it is alone."""
    if not nodes:
        return []
    found = _repeated(nodes, costs)
    if found is None:
        return [[nodes]]
    begin, period, times = found
    calls = [nodes[at : at + period] for at in range(begin, begin + period * times, period)]
    return [*_segments(nodes[:begin], costs), calls, *_segments(nodes[begin + period * times :], costs)]


def _repeated(nodes: Nodes, costs: dict[Node, int]) -> tuple[int, int, int] | None:
    """Where the longest repetition begins, how long what is repeated is, and how often it is there."""
    known: dict[Any, int] = {}
    names = [known.setdefault(_name(node), len(known)) for node in nodes]
    best: tuple[int, int, int] | None = None  # operators covered, begin, period
    for period in range(_LEAST_PERIOD, len(names) // _LEAST_TIMES + 1):
        begin, length = _longest([a == b for a, b in zip(names, names[period:], strict=False)])
        if length + period >= period * _LEAST_TIMES and (best is None or length + period > best[0]):
            best = length + period, begin, period
    if best is None:
        return None
    covered, begin, period = best
    places = {node: i for i, node in enumerate(nodes)}
    kinds = functools.cache(lambda node: _kind(node.meta["val"]))  # sizes as texts: most of the time goes there
    found = []
    for first in range(begin, begin + period):
        times = (begin + covered - first) // period
        # the first time may be fed otherwise than the others, from what is before the repetition
        while times >= _LEAST_TIMES and not _fits(nodes, places, kinds, first, period, times):
            times -= 1
        if times < _LEAST_TIMES:
            continue
        cuts = [costs[nodes[at - 1]] for at in range(first, first + period * times + 1, period) if at]
        if max(cuts) < _NEVER:
            found.append((costs[nodes[first + period - 1]], -times, first))
    if not found:
        return None
    _, times, first = min(found)
    return first, period, -times


def _longest(equal: list[bool]) -> tuple[int, int]:
    """Begin and length of the longest stretch of True."""
    best, begin = (0, 0), 0
    for i, same in enumerate([*equal, False]):
        if not same:
            best = max(best, (i - begin, -begin))
            begin = i + 1
    return -best[1], best[0]


def _name(node: Node) -> Any:
    """What is equal for the same operator with the same options on values of the same kind."""
    return node.target, repr(map_arg((node.args, node.kwargs), _plain)), _kind(node.meta.get("val"))


def _plain(node: Node) -> Any:
    """What stands for a value in a name: a size itself, any tensor as such."""
    value = node.meta.get("val")
    return str(value) if isinstance(value, (int, torch.SymInt)) else "tensor"


def _kind(value: Any) -> Any:
    """Dtype, device, sizes and strides of a tensor, or of several."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_kind, value))
    if not isinstance(value, torch.Tensor):
        return str(type(value)), str(value)
    return value.dtype, value.device, str(list(value.shape)), str(list(value.stride())), str(value.storage_offset())


def _fits(
    nodes: Nodes, places: dict[Node, int], kinds: Callable[[Node], Any], first: int, period: int, times: int
) -> bool:
    """Whether the sequences are wired alike inside, and what they take from outside is of the same kind (`kinds`)."""
    for offset in range(period):
        rows = [tensors_of(nodes[first + offset + period * time]) for time in range(times)]
        for parts in zip(*rows, strict=True):
            inside = {_inside(places, part, first + period * time, period) for time, part in enumerate(parts)}
            if len(inside) != 1 or (inside == {None} and len(set(map(kinds, parts))) != 1):
                return False
            if inside == {None} and not isinstance(parts[0].meta["val"], torch.Tensor):
                return False
    return True


def _inside(places: dict[Node, int], part: Node, begin: int, period: int) -> int | None:
    at = places.get(part, -1) - begin
    return at if 0 <= at < period else None


def tensors_of(node: Node) -> list[Node]:
    """What a call takes, but for sizes, in order and as often as it takes it."""
    found: list[Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return [part for part in found if not isinstance(part.meta.get("val"), (int, torch.SymInt))]


def _crossing_costs(nodes: Nodes) -> dict[Node, int]:
    """What a cut behind each call costs: the more, the more values would be kept in memory for it alone.

    A value that a library's kernel gives is in memory anyway, and so is one that was used before the cut and is again.
    One whose only readers come after the cut would have been computed where it is read. What is no plain matrix is not
    handed on: Inductor chooses how images and heads lie in memory, and a cut would choose for it.
    """
    places = {node: i for i, node in enumerate(nodes)}
    made_by: dict[Node, Node] = {}  # where the numbers come from that a call only looks at
    spans: dict[Node, list[int]] = {}  # of each of those: its place, its first reader's, its last one's
    for at, node in enumerate(nodes):
        seen = looked_at(node)
        root = made_by[node] = node if seen is None else made_by.get(seen, seen)
        readers = [places[user] for user in node.users if user in places]
        own = [reader for reader in readers if looked_at(nodes[reader]) is not node]
        span = spans.setdefault(root, [places.get(root, at), len(nodes), at])
        span[1], span[2] = min([span[1], *own]), max([span[2], *readers])
    costs = [0] * len(nodes)
    for root, (made, read, last) in spans.items():
        cheap = root in places and is_library(root)
        for at in range(made, last):
            costs[at] += 1 + (100 if at < read and not cheap else 0)
    for node in nodes:
        if not may_cross(node.meta.get("val")):
            for at in range(places[node], max((places[user] for user in node.users if user in places), default=0)):
                costs[at] += _NEVER
    return {node: costs[i] for i, node in enumerate(nodes)}


def may_cross(value: Any) -> bool:
    """Whether a value is handed from piece to piece: a plain matrix, or several."""
    if not isinstance(value, torch.Tensor) or value.dim() > 3:
        return False
    wanted: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if str(stride) != str(wanted):
            return False
        wanted = wanted * size
    return True


def looked_at(node: Node) -> Node | None:
    """What a call only looks at, or brings to another layout; None if it computes something."""
    name = node.target.__name__ if node.target is operator.getitem else str(node.target).split(".")[1]
    return node.all_input_nodes[0] if name in _LOOKS and node.all_input_nodes else None


def is_library(node: Node) -> bool:
    """Whether a call is a product, a convolution or attention, which Inductor leaves to somebody else's kernel."""
    name = str(node.target)
    words = ("linear", "mm", "matmul", "conv", "attention", "einsum", "substitute", "collective")
    return any(word in name for word in words)
