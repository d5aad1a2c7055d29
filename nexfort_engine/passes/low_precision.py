# SPDX-License-Identifier: Apache-2.0
"""Low precision: which products of a graph are computed in 8 bits, and how. Asked for by the user, never by default.

Both factors are brought to fp8 (e4m3), or to int8, in the graph itself, each row with a scale of its own. What is
computed of the weights alone is taken out afterwards and kept where the host says when a weight changes
(weights/prepack_entry.py), so a LoRA or another model is seen as it is in full precision. Layers of one input are one
product: it is narrowed once, and one large product fills a card better than three small ones; not where the block's
code writes to that input or to their results, which may be between the layers. Narrowing the input costs a pass over
it, so a product is taken only if it is large enough to pay for that; `plan` says which, and why not.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer

from ..graph.alias_analysis import Aliases
from ..graph.sizes import hint
from ..quant.card_figures import card_of
from ..quant.cost_model import narrowing
from ..quant.matmul import FP8, MULTIPLE, NAMES, narrowed, times_rows, times_whole_rows, with_zeros

aten = torch.ops.aten


@dataclass(frozen=True)
class Product:
    """One linear layer of a graph. rows, inner, columns: sizes at the captured call. reason: why it stays as it is."""

    node: Node
    rows: int
    inner: int
    columns: int
    reason: str | None = None


def plan(module: GraphModule, dtype: torch.dtype = FP8) -> list[Product]:
    """All linear layers of a captured graph, with a reason for those that stay as they are."""
    return [product for group in _groups(module, dtype) for product in group]


def describe_plan(module: GraphModule, dtype: torch.dtype = FP8) -> list[dict[str, Any]]:
    """The plan for people, as JSON: {"count", "rows", "inner", "columns", "reason", "type"}, those alike in one line.

    rows: at the captured call. reason: why they stay as they are; None: they are computed in `type`.
    """
    alike = Counter((p.rows, p.inner, p.columns, p.reason) for p in plan(module, dtype))
    names = ("rows", "inner", "columns", "reason", "count", "type")
    return [dict(zip(names, (*key, count, NAMES[dtype]), strict=True)) for key, count in alike.items()]


def _groups(module: GraphModule, dtype: torch.dtype) -> list[list[Product]]:
    """The linear layers of a graph; those together that are computed in 8 bits as one product."""
    groups: dict[Any, list[Product]] = {}
    aliases = Aliases(module.graph)
    for node in module.graph.nodes:
        if node.target is aten.linear.default:
            product = _product(node)
            # what is computed on the way may not be there yet where the first of them stands
            given = all(part.op == "placeholder" for part in node.args[1:] if isinstance(part, Node))
            changed = any(aliases.is_written(part) for part in (node, *node.args) if isinstance(part, Node))
            together = product.reason is None and given and not changed
            groups.setdefault((node.args[0], _biased(node)) if together else node, []).append(product)
    return [_worth_it(group, dtype) for group in groups.values()]


def _biased(node: Node) -> bool:
    return len(node.args) > 2 and node.args[2] is not None


def _product(node: Node) -> Product:
    x, weight = (argument.meta["val"] for argument in node.args[:2])  # type: ignore[union-attr]
    sizes = [hint(size) for size in (*x.shape[:-1], *weight.shape)]
    if weight.dim() != 2 or None in sizes:
        return Product(node, 0, 0, 0, "a size is not known before the call, or the weight is no matrix")
    *before, columns, inner = (size or 0 for size in sizes)
    rows = math.prod(before)
    reason = None
    if x.dtype not in (torch.float16, torch.bfloat16) or weight.dtype != x.dtype:
        reason = f"computed in {x.dtype}, with a weight in {weight.dtype}; expected float16 or bfloat16"
    elif columns % MULTIPLE or inner % MULTIPLE:
        reason = f"a weight of {columns}x{inner}; expected multiples of {MULTIPLE}"
    return Product(node, rows, inner, columns, reason)


def _worth_it(group: list[Product], dtype: torch.dtype) -> list[Product]:
    """The group as it is, or its layers with the reason why they would gain nothing."""
    first = group[0]
    if first.reason is not None or gain(first.rows, first.inner, sum(p.columns for p in group), dtype) > 0:
        return group
    reason = "{0.rows} rows times {0.columns}x{0.inner} would take as long or longer"
    return [replace(product, reason=reason.format(product)) for product in group]


def gain(rows: int, inner: int, columns: int, dtype: torch.dtype = FP8) -> float:
    """Seconds that a product of (rows, inner) and (inner, columns) is estimated to save. Negative: it loses.

    Of narrowing that of the input counts; weights are kept. What is multiplied in int8 is written in 32 bits and read
    again to be scaled.
    """
    card = card_of(dtype)
    found = 2.0 * rows * inner * columns * (1 / card.half - 1 / card.narrow) - narrowing(rows, inner, card)
    return found if dtype == FP8 else found - 8.0 * rows * columns / card.memory - card.kernel


def low_precision(module: GraphModule, dtype: torch.dtype = FP8) -> int:
    """Compute the products of the plan in fp8, or int8; gives how many."""
    groups = [group for group in _groups(module, dtype) if group[0].reason is None]
    tracer, aliases = GraphAppendingTracer(module.graph), Aliases(module.graph)
    narrow: dict[Node, tuple[Any, Any]] = {}  # of inputs, which layers with and without a bias may share
    joined = any(len(group) > 1 for group in groups)
    for node in module.graph.nodes if joined else ():
        if node.target is aten.view.default and not aliases.is_written(node):
            node.target = aten.reshape.default  # a layer's part of a product for several does not lie in one piece
    for group in groups:
        x: Any = group[0].node.args[0]
        with module.graph.inserting_before(group[0].node):
            results = _narrow(tracer, group, {} if aliases.is_written(x) else narrow, dtype)
        for product, result in zip(group, results, strict=True):
            result.node.meta["val"] = product.node.meta["val"]
            product.node.replace_all_uses_with(result.node)
            module.graph.erase_node(product.node)
    return sum(map(len, groups))


def low_precision_int8(module: GraphModule) -> int:
    """As `low_precision`, in int8."""
    return low_precision(module, torch.int8)


def _narrow(
    tracer: GraphAppendingTracer, group: list[Product], narrow: dict[Node, tuple[Any, Any]], dtype: torch.dtype
) -> list[Any]:
    """The results of layers that have one input."""
    first = group[0]
    x = first.node.args[0]
    assert isinstance(x, Node)

    def given(product: Product, at: int) -> Any:
        return Proxy(product.node.args[at], tracer)  # type: ignore[arg-type]

    def joined(parts: list[Any]) -> Any:
        return parts[0] if len(parts) == 1 else aten.cat.default(parts)

    if x not in narrow:
        rows = aten.reshape.default(Proxy(x, tracer), [-1, first.inner])
        narrow[x] = narrowed(rows if dtype == FP8 else with_zeros(rows), dtype)
    weight = narrowed(joined([given(product, 1) for product in group]), dtype)
    bias = joined([given(product, 2) for product in group]) if _biased(first.node) else None
    like = x.meta["val"]
    sizes = [aten.sym_size.int(Proxy(x, tracer), i) for i in range(like.dim() - 1)]
    whole = (times_rows if dtype == FP8 else times_whole_rows)(narrow[x], weight, bias, like)
    results, start = [], 0
    for product in group:
        part = whole if len(group) == 1 else aten.slice.Tensor(whole, 1, start, start + product.columns)
        results.append(aten.reshape.default(part, [*sizes, product.columns]))
        start += product.columns
    return results
