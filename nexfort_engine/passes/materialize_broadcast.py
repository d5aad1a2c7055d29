# SPDX-License-Identifier: Apache-2.0
"""Functions of few numbers that many rows are multiplied with, such as gates, computed once and not for each row.

Inductor computes pointwise operators where they are read, so a gate's `tanh` is computed again for each of 4096 tokens.
A norm of a sum with such a gate took 58.7 microseconds (77.1 with the warps that it takes without one), where what it
moves takes 29, and another 31.5 (41.4) of 22: Z-Image's, 4096 rows of 3840 (bfloat16, H200, torch 2.11, 2026-11).
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from ..graph.fx_builder import fill, keep, lies_as_its_copy
from ..graph.sizes import numbers_of

aten = torch.ops.aten
_COSTLY = {  # what takes many instructions
    *(aten.tanh.default, aten.sigmoid.default, aten.silu.default, aten.gelu.default, aten.softplus.default),
    *(aten.exp.default, aten.erf.default, aten.sin.default, aten.cos.default, aten.log.default),
}
_MORE = 64  # times as many numbers
_MANY = 2**21  # numbers, whose functions take as long as one launch more


def broadcasts(module: GraphModule) -> int:
    """Have such a function's result in memory before it is read; gives how many."""
    fill(module.graph.nodes)  # with what passes before put in
    found = 0
    for node in reversed(list(module.graph.nodes)):  # of functions of each other the last is enough
        if node.target in _COSTLY and lies_as_its_copy(node.meta["val"]) and _is_broadcast(node):
            keep(node)
            found += 1
    return found


def _is_broadcast(node: Node) -> bool:
    """Whether what becomes of a value, number by number, is computed with many times as many numbers."""
    few = numbers_of(node.meta["val"].shape)
    if not few:
        return False
    values, seen = [node], {node}
    for value in values:
        for user in value.users.keys() - seen:
            looks = user.target is operator.getitem or getattr(user.target, "is_view", False)
            pointwise = torch.Tag.pointwise in getattr(user.target, "tags", ())
            if user.target is aten.clone.default or not (looks or pointwise):
                continue  # it is kept already, or an operand, which is in memory anyway
            if pointwise and (numbers_of(user.meta["val"].shape) or 0) >= max(few * _MORE, _MANY):
                return True
            values.append(user)
            seen.add(user)
    return False
