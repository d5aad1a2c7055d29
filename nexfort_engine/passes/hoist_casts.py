# SPDX-License-Identifier: Apache-2.0
"""What is brought to a dtype for several libraries' kernels that each read a part of it, brought to it once.

Queries, keys and values of a product in fp8 are parts of one result, in bfloat16. In a model of another dtype attention
wants them in that, and Inductor writes a kernel for each part, because it computes pointwise operators where they are
read: 3.6, 3.8 and 4.1 microseconds and two launches more for each of SDXL's 60 layers (H200, torch 2.11, 2026-11).
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from ..graph.alias_analysis import Aliases
from ..graph.fx_builder import fill, keep, lies_as_its_copy
from ..graph.repeated_sequences import is_library, looked_at

aten = torch.ops.aten
_CASTS = (aten.to.dtype, aten._to_copy.default)
_PARTS = ("slice", "select", "split", "chunk", "unbind", "narrow")
_LEAST = 2  # kernels that read it


def casts_once(module: GraphModule) -> int:
    """Have such a value in memory before its parts are read; gives how many."""
    fill(module.graph.nodes)  # with what passes before put in
    found, aliases = 0, Aliases(module.graph)
    for node in list(module.graph.nodes):
        pointwise = node.target in _CASTS or torch.Tag.pointwise in getattr(node.target, "tags", ())
        if not pointwise or aliases.is_written(node):
            continue
        if lies_as_its_copy(node.meta["val"]) and _is_read_in_parts(node):
            keep(node)
            found += 1
    return found


def _is_read_in_parts(node: Node) -> bool:
    """Whether nobody reads a value but libraries' kernels, several of them, each a part of it."""
    count, left = 0, [(node, False)]
    while left:
        value, is_part = left.pop()
        for user in value.users:
            if isinstance(user.meta.get("val"), (int, torch.SymInt)):
                continue  # asks for a size
            if user.op == "call_function" and looked_at(user) is value:
                left.append((user, is_part or any(name in str(user.target) for name in _PARTS)))
            elif is_part and user.op == "call_function" and is_library(user):
                count += 1
            else:
                return False
    return count >= _LEAST
