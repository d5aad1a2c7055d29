# SPDX-License-Identifier: Apache-2.0
"""Linear layers of one input with few rows, together: torch's products -> `nexfort::grouped_linear` (kernels/).

Layers of attention to a prompt are given the same rows each, so few that a product of them does not fill a card. A
prompt is told from an image, which may have few rows in one call and many in the next, by who reads it: an input of the
block that nothing but linear layers reads.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..graph.alias_analysis import Aliases
from ..graph.fx_builder import fixed
from ..graph.sizes import rows_of
from ..kernels.grouped_gemm import op as kernel

aten = torch.ops.aten
FEW = 512  # rows at the captured call
_LEAST = 2  # layers
_DEVICE = "cuda"  # elsewhere the operator is as many products


def grouped_linears(module: GraphModule) -> int:
    """Compute linear layers of equal sizes and one input in one call; gives how many layers.

    Not where the code writes to that input, to weights or to results, which may be between the layers.
    """
    found = 0
    for group in list(_groups(module)):
        first = group[0]
        with module.graph.inserting_before(first):
            together = module.graph.call_function(kernel.operator(), (first.args[0], [node.args[1] for node in group]))
            together.meta["val"] = [node.meta["val"] for node in group]
            parts = [module.graph.call_function(operator.getitem, (together, i)) for i in range(len(group))]
        for node, part in zip(group, parts, strict=True):
            part.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(part)
            module.graph.erase_node(node)
        found += len(group)
    return found


def _groups(module: GraphModule) -> Iterator[list[Node]]:
    groups: dict[Any, list[Node]] = {}
    aliases = Aliases(module.graph)
    for node in module.graph.nodes:
        if _is_fit(node) and not any(map(aliases.is_written, (node, *node.args[:2]))):
            sizes = tuple(map(fixed, node.args[1].meta["val"].shape))
            groups.setdefault((node.args[0], sizes), []).append(node)
    return (group for group in groups.values() if len(group) >= _LEAST)


def _is_fit(node: Any) -> bool:
    """Whether a node is a layer without a bias, of few rows, as the kernel takes them."""
    if node.target is not aten.linear.default or (len(node.args) > 2 and node.args[2] is not None):
        return False
    # a weight that is computed on the way may not be there yet where the first of them stands
    if any(argument.op != "placeholder" for argument in node.args[:2]) or _is_read_elsewhere(node.args[0]):
        return False
    x, weight = (argument.meta["val"] for argument in node.args[:2])
    rows, sizes = rows_of(x), [fixed(size) for size in weight.shape]
    if rows is None or len(sizes) != 2 or x.device.type != _DEVICE:
        return False
    whole = all(size is not None and size % kernel.SMALLEST == 0 for size in sizes)
    same = x.dtype == weight.dtype and x.dtype in kernel.DTYPES
    return whole and same and weight.is_contiguous() and 0 < rows <= FEW


def _is_read_elsewhere(x: Node) -> bool:
    """Whether something besides linear layers reads more of a value than a size."""
    others = [user for user in x.users if user.target is not aten.linear.default]
    return any(not isinstance(user.meta.get("val"), (int, torch.SymInt)) for user in others)
