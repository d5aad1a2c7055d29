# SPDX-License-Identifier: Apache-2.0
"""Attention by the kernel that is measured to be the fastest: torch's operator -> `nexfort::attention`.

The result lies in memory as it does in the captured graph, whose code may look at it so, whichever kernel is chosen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..attention import operator
from ..attention.choice import memory_order
from .writing import hint

aten = torch.ops.aten
DTYPES = (torch.float16, torch.bfloat16)  # for others torch has one fast kernel


def measured_attentions(module: GraphModule, *, quantised: bool = False) -> int:
    """Write attention in 16 bits as the operator that chooses; gives how many. quantised: among kernels that quantise.

    Those stay that drop out, that have no four dimensions, and whose scale or layout only a call knows.
    """
    found = 0
    for node in list(module.graph.nodes):
        if node.target is not aten.scaled_dot_product_attention.default or (given := _given(node)) is None:
            continue
        with module.graph.inserting_before(node):
            written = module.graph.call_function(operator(), (*given, quantised))
        written.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(written)
        module.graph.erase_node(node)
        found += 1
    return found


def quantised_attentions(module: GraphModule) -> int:
    """As `measured_attentions`, among kernels that quantise too."""
    return measured_attentions(module, quantised=True)


def _given(node: Node) -> tuple[Any, ...] | None:
    """What the operator is called with, but for `quantised`; None if the node stays."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    said: dict[str, Any] = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
    said |= {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    scale = said["scale"]
    if said["dropout_p"] or not (scale is None or isinstance(scale, (int, float))) or torch.version.hip is not None:
        return None
    tensors = [said[name].meta["val"] for name in names[:3]]
    if any(t.dim() != 4 or t.dtype not in DTYPES or t.dtype != tensors[0].dtype for t in tensors):
        return None
    result = node.meta["val"]
    if not all(statically_known_true(result.shape[i] == tensors[0].shape[i]) for i in range(3)):
        return None  # a query that is one for all of a batch
    lies = [hint(n) for n in (*result.shape, *result.stride())]
    known = [n for n in lies if n is not None]
    if len(known) < len(lies):
        return None
    order = list(memory_order(known[:4], known[4:]))
    return (*(said[name] for name in names[:4]), said["is_causal"], scale, said["enable_gqa"], order)
