# SPDX-License-Identifier: Apache-2.0
"""What the passes over attention read off a graph: one call of torch's operator, and how its result lies."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..graph.fx_builder import fixed
from ..graph.layouts import memory_order
from ..graph.sizes import hint

aten = torch.ops.aten
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Attention:
    """One call on query (B, H, L, E), key (B, H, S, E) and value (B, H, S, F). shares: heads share keys.

    order: of the result's dimensions in memory, the outermost first; None where only a call knows it.
    """

    node: Node
    query: Node
    key: Node
    value: Node
    mask: Node | None
    causal: bool
    scale: float | None
    shares: bool
    order: tuple[int, ...] | None

    @property
    def values(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value as they are at the captured call."""
        return self.query.meta["val"], self.key.meta["val"], self.value.meta["val"]

    def factor(self, width: int) -> float:
        """What scores of heads of so many numbers are multiplied by."""
        return 1 / math.sqrt(width) if self.scale is None else float(self.scale)

    def keeps_order(self, width: int) -> bool:
        """Whether the largest score is still the largest when multiplied: some kernels look for it before that."""
        return 0 < self.factor(width) < math.inf

    @property
    def is_plain(self) -> bool:
        """Whether every query sees every key of its own head."""
        return self.mask is None and not self.causal and not self.shares


def attentions(module: GraphModule) -> Iterator[Attention]:
    """Those of a graph that drop out nothing, have four dimensions, and whose scale is a number of the graph's.

    The graph may be changed meanwhile.
    """
    for node in list(module.graph.nodes):
        if node.target is aten.scaled_dot_product_attention.default and (found := _read(node)) is not None:
            yield found


def _read(node: Node) -> Attention | None:
    said: dict[str, Any] = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
    said |= {**dict(zip(_NAMES, node.args, strict=False)), **node.kwargs}
    scale = said["scale"]
    if said["dropout_p"] or not (scale is None or isinstance(scale, (int, float))):
        return None
    if any(said[name].meta["val"].dim() != 4 for name in _NAMES[:3]):
        return None
    result = node.meta["val"]
    lies = [hint(n) for n in (*result.shape, *result.stride())]
    known = [n for n in lies if n is not None]
    order = memory_order(known[:4], known[4:]) if len(known) == len(lies) else None
    query, key, value, mask = (said[name] for name in _NAMES[:4])
    return Attention(node, query, key, value, mask, said["is_causal"], scale, said["enable_gqa"], order)


def takes_any_kernel(given: Attention) -> bool:
    """Whether torch has more than one fast kernel for it, and any of them can lay its result as the graph does."""
    values = given.values
    if torch.version.hip is not None or given.order is None:
        return False
    if any(t.dtype not in HALVES or t.dtype != values[0].dtype for t in values):  # for others torch has one fast kernel
        return False
    # not a query that is one for all of a batch
    return all(statically_known_true(given.node.meta["val"].shape[i] == values[0].shape[i]) for i in range(3))


def plain_width(given: Attention, device: str) -> int | None:
    """Numbers of each head of query, key and value, where a kernel on this type of device can compute it.

    It takes attention in 16 bits in which every query sees every key of its own row and head, and gives results whose
    heads lie side by side.
    """
    q, k, v = given.values
    if not given.is_plain or q.device.type != device:
        return None
    if given.order is None or given.order[-1] != 3:
        return None
    if q.dtype not in HALVES or not q.dtype == k.dtype == v.dtype:
        return None
    # not keys that are one row's for all of a batch
    if not all(statically_known_true(q.shape[i] == x.shape[i]) for x in (k, v) for i in (0, 1)):
        return None
    width, *others = (fixed(x.shape[-1]) for x in (q, k, v))
    return width if all(other == width for other in others) else None


def put_kernel(given: Attention, operator: Any, width: int) -> None:
    """Have an attention of heads of so many numbers computed by a kernel's operator (kernels/op_registry.py)."""
    order = list(given.order or ())
    put(given.node, operator, (given.query, given.key, given.value, given.factor(width), order))


def put(node: Node, operator: Any, arguments: tuple[Any, ...]) -> None:
    """Put a call of an operator, whose result lies as the node's, in a node's place."""
    with node.graph.inserting_before(node):
        written = node.graph.call_function(operator, arguments)
    written.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(written)
    node.graph.erase_node(node)
