# SPDX-License-Identifier: Apache-2.0
"""What the passes write graphs with, and what they ask of a value's sizes and layout."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.fx import Node, Proxy
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg
from torch.fx.proxy import GraphAppendingTracer

aten = torch.ops.aten
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def replace(node: Node, written: Proxy) -> None:
    """Put what was written in a node's place."""
    written.node.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(written.node)
    node.graph.erase_node(node)


def fill(nodes: Iterable[Node]) -> None:
    """Give calls that passes put in their values without numbers. nodes: in order."""
    empty = [node for node in nodes if node.op == "call_function" and "val" not in node.meta]
    inputs = empty[0].graph.find_nodes(op="placeholder") if empty else []
    mode = next((node.meta["val"].fake_mode for node in inputs if isinstance(node.meta["val"], FakeTensor)), None)
    with mode or nullcontext(), torch.no_grad():
        for node in empty:
            args, kwargs = map_arg((node.args, node.kwargs), lambda part: part.meta["val"])
            node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


def fixed(size: Any) -> int | None:
    """A size that is the same in every call, or None."""
    return size if isinstance(size, int) else size.node.maybe_as_int()


def is_channels_last(like: torch.Tensor) -> bool:
    # the strides and not `is_contiguous`, which knows nothing of sizes that are symbols
    strides = like.stride()
    return like.dim() in CHANNELS_LAST and fixed(strides[1]) == 1 and fixed(strides[-1]) != 1


def in_memory(x: Any, sizes: list[Any]) -> Any:
    """x of these sizes as a contiguous tensor in memory: otherwise Inductor may compute it again for each reader."""
    kept = aten.clone.default(x, memory_format=torch.contiguous_format)
    return aten.as_strided.default(kept, sizes, without_gaps(sizes))  # which asks for a tensor in memory


def sizes_of(x: Any, shape: Iterable[Any]) -> list[Any]:
    """The sizes of a value of the graph: numbers where they are the same in every call, else what asks for them."""
    known = map(fixed, shape)
    return [size if size is not None else aten.sym_size.int(x, at) for at, size in enumerate(known)]


def keep(node: Node) -> None:
    """Have a value in memory before its readers read it. It has to lie as its copy does."""
    value, readers = node.meta["val"], list(node.users)
    with node.graph.inserting_before(node.next):
        given = Proxy(node, GraphAppendingTracer(node.graph))
        kept = in_memory(given, sizes_of(given, value.shape)).node
    kept.meta["val"] = value
    for reader in readers:
        reader.replace_input_with(node, kept)


def lies_as_its_copy(value: Any) -> bool:
    """Whether a value is a contiguous tensor, for those that look at it otherwise. Single numbers need no memory."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return False
    lies = zip(value.stride(), without_gaps(value.shape), strict=True)
    return all(statically_known_true(one == other) for one, other in lies)


def without_gaps(sizes: Sequence[Any]) -> list[Any]:
    """The strides of a contiguous tensor of these sizes."""
    strides: list[Any] = [1]
    for size in sizes[:0:-1]:
        strides.insert(0, operator.mul(strides[0], size))
    return strides[: len(sizes)]
