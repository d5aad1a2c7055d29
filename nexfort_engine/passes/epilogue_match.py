# SPDX-License-Identifier: Apache-2.0
"""What stands behind a layer in 8 bits, and that the kernel of its product computes before it rounds.

GELU, SwiGLU of two layers of one input, a gate with a residual, or a residual: `nexfort::scaled_linear` writes their
result, and the product's is nowhere in memory. What others read, too, stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from ..graph.alias_analysis import Aliases
from ..graph.fx_builder import fixed
from .prologue_match import is_per_token, passed_on, readers, same_sizes

aten = torch.ops.aten


@dataclass(frozen=True)
class Epilogue:
    """result: the last node that is computed. up: the layer that is multiplied with. nodes: without the layers."""

    result: Node
    activation: str = ""
    up: Node | None = None
    gate: Node | None = None
    residual: Node | None = None
    nodes: list[Node] = field(default_factory=list)


def swiglu(layer: Node, partners: Collection[Node]) -> Epilogue | None:
    """silu(layer) * partner, where nothing else reads either."""
    gate = _only_reader(layer)
    product = _only_reader(gate) if gate is not None and gate.target is aten.silu.default else None
    if gate is None or product is None or product.target is not aten.mul.Tensor:
        return None
    up = _other(product.args, gate)
    if up is None or up is layer or up not in partners or _only_reader(up) is not product:
        return None
    return Epilogue(product, "silu", up, nodes=[product, gate])


def epilogue(layer: Node, aliases: Aliases, taken: Collection[Node]) -> Epilogue:
    """What is behind a layer. taken: nodes that something else computes."""
    return _residual(_activation(Epilogue(layer), taken), aliases, taken)


def _activation(found: Epilogue, taken: Collection[Node]) -> Epilogue:
    gelu = _only_reader(found.result)
    if gelu is None or gelu in taken or gelu.target is not aten.gelu.default:
        return found
    kind = "gelu_tanh" if gelu.kwargs.get("approximate", "none") == "tanh" else "gelu"
    return Epilogue(gelu, kind, nodes=[gelu])


def _residual(found: Epilogue, aliases: Aliases, taken: Collection[Node]) -> Epilogue:
    """With a residual, gated or not, or as it was."""
    value, nodes = found.result, list(found.nodes)
    after = _only_reader(value)
    while after is not None and passed_on(after) is value:
        nodes.insert(0, after)
        value, after = after, _only_reader(after)
    if after is None or after in taken:
        return found
    gate: Any = None
    residual: Any = None
    if after.target is aten.mul.Tensor:
        gate = _other(after.args, value)
        product, after = after, _only_reader(after)
        if gate is None or after is None or after in taken or after.target is not aten.add.Tensor:
            return found
        nodes.insert(0, product)
        residual = _other(after.args, product)
    elif after.target is aten.addcmul.default:
        residual, gate = after.args[0], _other(after.args[1:3], value)
        if gate is None:
            return found
    elif after.target is aten.add.Tensor:
        residual = _other(after.args, value)
    else:
        return found
    plain = after.kwargs.get("alpha", 1) == 1 and after.kwargs.get("value", 1) == 1
    if not plain or not isinstance(residual, Node) or not _fits(found.result, after, residual, gate):
        return found
    if {residual, gate} & {value, found.result, *nodes}:  # a layer plus itself, say
        return found
    if gate is not None and aliases.is_written(gate):  # it is read where the residual is from here on
        return found
    return replace(found, result=after, gate=gate, residual=residual, nodes=[after, *nodes])


def _fits(value: Node, after: Node, residual: Node, gate: Node | None) -> bool:
    """Whether the kernel takes them: a residual as the result is, and a gate as it is, or one row for several."""
    like, last, added = (node.meta["val"] for node in (value, after, residual))
    if not all(isinstance(node.meta["val"], torch.Tensor) for node in (residual, gate) if node is not None):
        return False
    if last.dtype != like.dtype or not same_sizes(like.shape, last.shape) or not same_sizes(like.shape, added.shape):
        return False
    by = None if gate is None else gate.meta["val"]
    if not all(part.is_floating_point() and part.device == like.device for part in (added, by) if part is not None):
        return False
    if by is None:
        return True
    return like.dim() <= 3 and is_per_token(by, like, fixed(like.shape[-1]))


def _other(parts: Any, value: Node) -> Node | None:
    """Of two operands the one that is not `value`, where that is a node."""
    rest = [part for part in parts if part is not value]
    return rest[0] if len(rest) == 1 and len(parts) == 2 and isinstance(rest[0], Node) else None


def _only_reader(node: Node) -> Node | None:
    found = readers(node)
    return found[0] if len(found) == 1 and found[0].op == "call_function" else None
