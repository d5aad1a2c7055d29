# SPDX-License-Identifier: Apache-2.0
"""A layer and the gate between its halves as one launch: linear -> u * gelu(v) is `nexfort::gated_linear` (kernels/).

The layer's result is written and read again otherwise, which is twice as much as what comes of it. A layer that is a
product in fp8 (scaled_mm_match.py) -> u * gelu(v) is `nexfort::narrow_gated_linear`.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..graph.fx_builder import fill, fixed
from ..graph.sizes import rows_of
from ..kernels.geglu_linear import fp8_op
from ..kernels.geglu_linear import op as kernel
from .scaled_mm_match import ScaledProduct, scaled_product

aten = torch.ops.aten
LEAST = 512  # rows at the captured call: fewer do not fill a card
_DEVICE = "cuda"  # elsewhere the operator is what it is written for
_PARTED = (aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default)


def gated_linears(module: GraphModule) -> int:
    """Write layers whose halves nothing but such a gate reads as one call, where the layer stands; gives how many."""
    found = 0
    for node in list(module.graph.nodes):
        chain = _chain(node)
        if not chain:
            continue
        layer = chain[-1]
        product = scaled_product(layer)
        with module.graph.inserting_before(layer):
            if product is not None and _is_fit_narrow(product, layer.meta["val"]):
                written = _narrow(layer, product)
                chain += [part for part in product.nodes if part is not layer]
            elif product is None and _is_fit(layer):
                written = module.graph.call_function(kernel.operator(), (*layer.args, None)[:3])
            else:
                continue
        written.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(written)
        for gone in chain:
            module.graph.erase_node(gone)
        found += 1
    return found


def _narrow(layer: Node, product: ScaledProduct) -> Node:
    """The call for a product in fp8, in the layer's shape but for the last size, which is half of its."""
    graph, dtype = layer.graph, layer.meta["val"].dtype
    factors = (product.x, product.weight, product.x_scale, product.weight_scale)
    flat = graph.call_function(fp8_op.operator(), (*factors, product.bias, dtype))
    before: Any = layer.args[1]
    sizes = [*before[:-1], product.weight.meta["val"].shape[0] // 2]
    fill([flat])
    return graph.call_function(aten.reshape.default, (flat, sizes))


def _chain(node: Any) -> list[Any]:
    """The nodes from a product of a value's first half with GELU of its second to that value, none of which is read by
    others, a reader before what it reads; or none."""
    if node.target is not aten.mul.Tensor:
        return []
    gate, value = sorted(node.args, key=lambda part: getattr(part, "target", None) is not aten.gelu.default)
    if getattr(gate, "target", None) is not aten.gelu.default or gate.kwargs.get("approximate", "none") != "none":
        return []
    halves = [value, gate.args[0]]
    whole, same = (_source(half, i) for i, half in enumerate(halves))
    if whole is None or same is not whole:
        return []
    between: list[Any] = [half.args[0] for half in halves if half.target is operator.getitem]
    chain = [node, gate, *halves, *dict.fromkeys(between), whole]
    alone = all(set(part.users) <= set(chain) for part in chain[1:])
    return chain if alone else []


def _source(half: Any, i: int) -> Any:
    """What a node is the first (i = 0) or second half of, along the last dimension; None where it is no half."""
    target = getattr(half, "target", None)
    sliced = target is aten.slice.Tensor and len(half.args) == 4
    if not sliced and not (target is operator.getitem and half.args[0].target in _PARTED):
        return None
    narrow = fixed(half.meta["val"].shape[-1])
    if narrow is None:
        return None
    if sliced:
        whole, dim, start, _ = half.args
        starts = start == i * narrow
    else:
        parted, at = half.args
        whole, dim = parted.args[0], (*parted.args, *parted.kwargs.values(), 0)[2]
        starts = at == i
    last = dim in (-1, whole.meta["val"].dim() - 1)
    return whole if starts and last and fixed(whole.meta["val"].shape[-1]) == 2 * narrow else None


def _is_fit(linear: Node) -> bool:
    """Whether a value is a layer's that the kernel takes."""
    if linear.target is not aten.linear.default:
        return False
    values = [part.meta["val"] for part in linear.args if isinstance(part, Node)]
    x, weight = values[:2]
    rows, (columns, inner) = rows_of(x), map(fixed, weight.shape)
    if rows is None or columns is None or inner is None or x.device.type != _DEVICE or not weight.is_contiguous():
        return False
    same = x.dtype in kernel.DTYPES and all(value.dtype == x.dtype for value in values)
    whole = columns % (2 * kernel.COLUMNS) == 0 and inner % kernel.INNER == 0
    return same and whole and rows >= LEAST


def _is_fit_narrow(product: ScaledProduct, like: torch.Tensor) -> bool:
    """Whether the kernel for fp8 takes a product. like: its result in its shape."""
    x, weight, x_scale, weight_scale, bias = product.values()
    rows, (columns, inner) = rows_of(like), map(fixed, weight.shape)
    if rows is None or columns is None or inner is None or like.device.type != _DEVICE:
        return False
    by_row = x_scale.dim() == 2 and tuple(map(fixed, weight_scale.shape)) == (columns, 1)  # torch has both so or none
    narrow = x.dtype == weight.dtype == fp8_op.FP8
    added = bias is None or ([*map(fixed, bias.shape)] == [columns] and bias.dtype == like.dtype)
    whole = columns % (2 * kernel.COLUMNS) == 0 and inner % kernel.INNER == 0 and fixed(like.shape[-1]) == columns
    return by_row and narrow and added and whole and like.dtype in kernel.DTYPES and rows >= LEAST
