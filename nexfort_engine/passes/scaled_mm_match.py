# SPDX-License-Identifier: Apache-2.0
"""A product in fp8 as it stands in a graph, found again: what `quant.products.times_rows` writes, in a layer's shape.

rows of e4m3 with scales -> torch's product -> the dtype of the layer -> bias -> sizes before the last. It is told by
its operators alone, so it is found whoever wrote it: low precision, or a layer whose weight was packed ahead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..graph.fx_builder import fill

aten = torch.ops.aten
_SHAPED = (aten.reshape.default, aten.view.default)
_SAYS = aten._assert_tensor_metadata.default  # export writes it beside a cast; its result is nothing


@dataclass(frozen=True)
class ScaledProduct:
    """(x * x_scale) @ (weight * weight_scale).T + bias, where x is (rows, K), weight (columns, K), scales (..., 1).

    nodes: all that computes it of these, a reader before what it reads; nothing else reads any but the first.
    """

    x: Node
    weight: Node
    x_scale: Node
    weight_scale: Node
    bias: Node | None
    nodes: list[Node]

    def values(self) -> list[Any]:
        """What it is made of, the bias last, as values without numbers."""
        fill(self.x.graph.nodes)
        made_of = (self.x, self.weight, self.x_scale, self.weight_scale, self.bias)
        return [None if part is None else part.meta["val"] for part in made_of]


def scaled_product(result: Node) -> ScaledProduct | None:
    """The product of which a value is the result, or None."""
    if result.target not in _SHAPED:
        return None
    nodes: list[Any] = [result]
    part: Any = result.args[0]
    added = None
    if part.target is aten.add.Tensor and not part.kwargs and all(isinstance(one, Node) for one in part.args):
        nodes.append(part)
        part, added = part.args
    if part.target is aten.to.dtype and len(part.args) == 2:
        nodes.append(part)
        part = part.args[0]
    if part.target is not aten._scaled_mm.default or len(part.args) != 8:
        return None
    x, weight, x_scale, weight_scale, bias, scale, _, fast = part.args
    transposed = (weight, weight_scale)
    # sums that are to be more exact than the card's products have them are another kernel's
    if scale is not None or not fast or any(factor.target is not aten.t.default for factor in transposed):
        return None
    if None not in (bias, added):
        return None
    nodes.append(part)
    says = [user for node in nodes for user in node.users if user.target is _SAYS]
    if any(not set(node.users) <= {*nodes, *says} for node in nodes[1:]):
        return None
    looks = [look for look in dict.fromkeys(transposed) if set(look.users) == {part}]
    bias = added if bias is None else bias
    return ScaledProduct(x, weight.args[0], x_scale, weight_scale.args[0], bias, [*says, *nodes, *looks])
