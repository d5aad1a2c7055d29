# SPDX-License-Identifier: Apache-2.0
"""Low precision: which products of a graph are computed in fp8, and how. Asked for by the user, never by default.

Both factors are brought to fp8 (e4m3) in the graph itself, on every call, each row with a scale of its own: no copy of
a weight is kept, so a LoRA or another model is seen as it is in full precision. Bringing a
weight to fp8 costs a pass over it, so a product is taken only if it is large enough to pay for that; `plan` says which,
and why not. Memory: the factors of one product at a time, in fp8.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch.fx import GraphModule, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer

from .products import FP8, MULTIPLE, narrowed, times_rows

aten = torch.ops.aten
# What a product of a card of the H200 class was measured to reach (2026-11, torch 2.11): operations a second in half
# precision and in fp8, bytes a second of its memory; and seconds that the kernels which bring factors to fp8 add.
_HALF, _FP8, _MEMORY, _LAUNCHES = 700e12, 1430e12, 3.5e12, 6e-6


@dataclass(frozen=True)
class Product:
    """One linear layer of a graph. rows, inner, columns: sizes at the captured call. reason: why it is not in fp8."""

    node: Node
    rows: int
    inner: int
    columns: int
    reason: str | None = None


def plan(module: GraphModule) -> list[Product]:
    """All linear layers of a captured graph, with a reason for those that stay as they are."""
    return [_product(node) for node in module.graph.nodes if node.target is aten.linear.default]


def told(module: GraphModule) -> list[dict[str, Any]]:
    """The plan for people, as JSON: {"count", "rows", "inner", "columns", "reason"}, products alike in one line.

    rows: at the captured call. reason: why they stay as they are; None: they are computed in fp8.
    """
    alike = Counter((p.rows, p.inner, p.columns, p.reason) for p in plan(module))
    return [
        dict(zip(("rows", "inner", "columns", "reason", "count"), (*key, n), strict=True)) for key, n in alike.items()
    ]


def _product(node: Node) -> Product:
    x, weight = (argument.meta["val"] for argument in node.args[:2])  # type: ignore[union-attr]
    sizes = [_hint(size) for size in (*x.shape[:-1], *weight.shape)]
    if weight.dim() != 2 or None in sizes:
        return Product(node, 0, 0, 0, "a size is not known before the call, or the weight is no matrix")
    *before, columns, inner = (size or 0 for size in sizes)
    rows = reduce(operator.mul, before, 1)
    reason = None
    if x.dtype not in (torch.float16, torch.bfloat16) or weight.dtype != x.dtype:
        reason = f"computed in {x.dtype}, with a weight in {weight.dtype}; expected float16 or bfloat16"
    elif columns % MULTIPLE or inner % MULTIPLE:
        reason = f"a weight of {columns}x{inner}; expected multiples of {MULTIPLE}"
    elif gain(rows, inner, columns) <= 0:
        reason = f"{rows} rows times {columns}x{inner} would take as long or longer"
    return Product(node, rows, inner, columns, reason)


def gain(rows: int, inner: int, columns: int) -> float:
    """Seconds that a product of (rows, inner) and (inner, columns) is estimated to save in fp8. Negative: it loses."""
    work = 2.0 * rows * inner * columns
    moved = 3.0 * (rows * inner + columns * inner)  # read in two bytes, written in one
    return work * (1 / _HALF - 1 / _FP8) - moved / _MEMORY - _LAUNCHES


def _hint(size: Any) -> int | None:
    """A size at the captured call; None where it depends on data."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else None


def low_precision(module: GraphModule) -> int:
    """Compute the products of the plan in fp8; gives how many."""
    taken = [product for product in plan(module) if product.reason is None]
    factors: dict[Node, tuple[Any, Any]] = {}
    tracer = GraphAppendingTracer(module.graph)
    for product in taken:
        x, weight, bias = (*product.node.args, None)[:3]
        with module.graph.inserting_before(product.node):
            for factor, inner in ((x, product.inner), (weight, product.inner)):
                if factor not in factors:  # query, key and value share one
                    assert isinstance(factor, Node)
                    factors[factor] = narrowed(aten.reshape.default(Proxy(factor, tracer), [-1, inner]), FP8)
            assert isinstance(x, Node) and isinstance(weight, Node)
            like = x.meta["val"]
            sizes = [aten.sym_size.int(Proxy(x, tracer), i) for i in range(like.dim() - 1)]
            flat = times_rows(
                factors[x], factors[weight], Proxy(bias, tracer) if isinstance(bias, Node) else None, like
            )
            result = aten.reshape.default(flat, [*sizes, product.columns])
        result.node.meta["val"] = product.node.meta["val"]
        product.node.replace_all_uses_with(result.node)
        module.graph.erase_node(product.node)
    return len(taken)
