# SPDX-License-Identifier: Apache-2.0
"""Layers in int8 of a host's package by kernels of the engine's own: comfy_kitchen's operator ->
`nexfort::quantize_rows` and `nexfort::scaled_linear` (kernels/).

The operator rotates and rounds its input, multiplies and scales, and nothing fuses with it. Layers of one input do the
first each. Here the input is brought to int8 once, on the way of the norm or activation before (prologue_match.py), and
the product computes what is behind it (epilogue_match.py). The operator is known by its name, as in rotary.py. `plan`
says which layers stay the host's, and why.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..graph.alias_analysis import Aliases
from ..graph.fx_builder import fill, fixed
from ..graph.sizes import rows_of
from ..kernels.quantize_rows import op as quantize_rows
from ..kernels.scaled_linear import choice
from ..kernels.scaled_linear import op as scaled_linear
from .epilogue_match import Epilogue, epilogue, swiglu
from .prologue_match import Prologue, calls_of, prologue, readers

aten = torch.ops.aten
LEAST = 32  # rows at the captured call: the host has kernels for fewer
NAME = "comfy_kitchen::int8_linear"
_DEVICE = "cuda"  # elsewhere the operators are what they are written for
_TENSORS = ("x", "weight", "weight_scale")
_KNOWN = {*_TENSORS, "bias", "output_dtype_code", "convrot", "convrot_groupsize", "input_act"}
_ACTIVATIONS = {None: "", "none": "", "gelu_tanh": "gelu_tanh", "swiglu": "swiglu"}


@dataclass(frozen=True)
class Layer:
    """One such operator of a graph. given: its arguments by name. reason: why it stays the host's."""

    node: Node
    given: dict[str, Any]
    reason: str | None = None

    @property
    def group(self) -> int:
        """How many numbers are rotated together; 0: none are."""
        return int(self.given["convrot_groupsize"]) if self.given["convrot"] else 0

    @property
    def weights(self) -> list[Node]:
        """What it has beside its input."""
        found = [self.given[name] for name in ("weight", "weight_scale", "bias")]
        return [part for part in found if part is not None]

    @property
    def kind(self) -> str:
        """What the operator computes of its input first, as the kernel names it."""
        return _ACTIVATIONS[self.given["input_act"]]


@dataclass
class _Group:
    """Layers that read the same input in the same way, in their order. rows: the calls that bring it to int8."""

    layers: list[Layer]
    before: Prologue
    rows: list[Node] = field(default_factory=list)


def plan(module: GraphModule) -> list[Layer]:
    """The layers in int8 of a graph, with a reason for those that stay."""
    found = [Layer(node, _given(node)) for node in calls_of(module, NAME)]
    return [replace(layer, reason=_odd(layer) or _unfit(layer)) for layer in found]


def left(module: GraphModule) -> list[str]:
    """Of the layers that stay the host's, what people are told."""
    stay = [layer.reason for layer in plan(module) if layer.reason is not None]
    return [f"a layer in int8 stays {NAME}: {reason}" for reason in dict.fromkeys(stay)]


def int8_linears(module: GraphModule) -> int:
    """Compute the layers of the plan by the engine's kernels; gives how many."""
    layers = [layer for layer in plan(module) if layer.reason is None]
    aliases, taken = Aliases(module.graph), set[Node]()
    behind = dict(_pairs(layers, aliases))
    for found in behind.values():
        taken.update(found.nodes)
    groups = list(_groups(layers, aliases))
    for group in groups:
        first = group.layers[0]
        if not first.kind:
            group.before = prologue(first.given["x"], [layer.node for layer in group.layers], aliases, taken)
            taken.update(group.before.nodes)
    ups = {found.up for found in behind.values()}
    for layer in layers:
        if layer.node not in ups and layer.node not in behind:
            stays = not any(aliases.is_written(part) for part in layer.weights)
            behind[layer.node] = epilogue(layer.node, aliases, taken) if stays else Epilogue(layer.node)
            taken.update(behind[layer.node].nodes)
    for group in groups:
        _put_rows(group)
    _put_products(layers, {layer.node: group for group in groups for layer in group.layers}, behind)
    for group in groups:
        _erase([*(layer.node for layer in group.layers), *group.before.nodes])
    fill(module.graph.nodes)
    return len(layers)


# ---- what there is, and what can be written ------------------------------------------------------------------


def _given(node: Node) -> dict[str, Any]:
    given = dict(zip((a.name for a in _declared(node)), node.args, strict=False)) | dict(node.kwargs)
    return {**_defaults(node), **given}


def _declared(node: Node) -> Any:
    return node.target._schema.arguments  # type: ignore[union-attr]


def _defaults(node: Node) -> dict[str, Any]:
    return {one.name: one.default_value for one in _declared(node) if one.has_default_value()}


def _odd(layer: Layer) -> str | None:
    """Why the operator is called in a way that is not known, or None. Newer versions of it have more arguments."""
    given, defaults = layer.given, _defaults(layer.node)
    more = [name for name, value in given.items() if name not in _KNOWN and value != defaults.get(name)]
    if more or not given.keys() >= _KNOWN:
        return f"its arguments are {', '.join(given)}; expected {', '.join(sorted(_KNOWN))}"
    tensors = [given[name] for name in _TENSORS] + ([] if given["bias"] is None else [given["bias"]])
    if not all(isinstance(t, Node) and isinstance(t.meta.get("val"), torch.Tensor) for t in tensors):
        return "not all that it computes with are tensors of the graph"
    if given["input_act"] not in _ACTIVATIONS:
        return f"it computes {given['input_act']!r} of its input"
    return None


def _unfit(layer: Layer) -> str | None:
    """Why the kernels do not take a layer, or None."""
    given = layer.given
    x, weight, scale = (given[name].meta["val"] for name in _TENSORS)
    bias = None if given["bias"] is None else given["bias"].meta["val"]
    dtypes, like = quantize_rows.DTYPES, layer.node.meta["val"]
    if {t.device for t in (weight, scale, *([] if bias is None else [bias]))} != {x.device}:
        return "its weight lies on another device than its input"
    if x.device.type != _DEVICE:
        return f"it is computed on {x.device.type}"
    if x.dtype not in dtypes or like.dtype not in dtypes or weight.dtype != torch.int8 or scale.dtype != torch.float32:
        return f"{like.dtype} of {x.dtype}, a weight in {weight.dtype} with scales in {scale.dtype}"
    sizes = [fixed(size) for size in weight.shape]
    if len(sizes) != 2 or None in sizes or fixed(x.shape[-1]) is None:
        return "the size of its weight or of its input's rows is known in a call alone"
    columns, inner = (size or 0 for size in sizes)
    if fixed(x.shape[-1]) != inner * (2 if layer.kind == "swiglu" else 1):
        return f"an input of {x.shape[-1]} numbers for a weight of {columns}x{inner}"
    if inner % scaled_linear.MULTIPLE or inner > quantize_rows.LONGEST:
        most = quantize_rows.LONGEST
        return f"rows of {inner} numbers; expected a multiple of {scaled_linear.MULTIPLE}, {most} at most"
    if layer.group not in quantize_rows.GROUPS or inner % (layer.group or 1):
        return f"rows of {inner} numbers are rotated in groups of {layer.group}"
    counts = [[fixed(size) for size in part.shape] for part in (scale, bias) if part is not None]
    if counts[0] not in ([], [1], [1, 1], [columns], [columns, 1]) or counts[1:] not in ([], [[columns]]):
        return f"scales or a bias of another size than {columns}"
    rows = rows_of(x)
    if rows is None or rows < LEAST:
        return f"{rows} rows, for which the host has kernels" if rows is not None else "its rows depend on data"
    if choice.loses(_card(x.device), columns, inner):
        return f"{columns}x{inner} was measured to be no faster on this card"
    return None


def _card(device: torch.device) -> tuple[int, int]:
    """The compute capability; (0, 0), of which nothing was measured, where there is no such card to ask."""
    from torch._inductor.runtime.hints import DeviceProperties

    if device.type != "cuda" or not torch.cuda.is_available():
        return 0, 0
    return divmod(int(DeviceProperties.create(device).cc), 10)


def _pairs(layers: list[Layer], aliases: Aliases) -> Iterator[tuple[Node, Epilogue]]:
    """Layers that are multiplied with another one of the same input and size."""
    for layer in layers:
        alike = {other.node for other in layers if other is not layer and _alike(layer, other, aliases)}
        if (found := swiglu(layer.node, alike)) is not None:
            yield layer.node, found


def _alike(one: Layer, other: Layer, aliases: Aliases) -> bool:
    shapes = [[*map(fixed, layer.given[name].meta["val"].shape)] for name in _TENSORS[1:] for layer in (one, other)]
    shapes += [layer.node.meta["val"].dtype for layer in (one, other)]
    same = shapes[::2] == shapes[1::2]
    stays = not any(map(aliases.is_written, [one.given["x"], *one.weights, *other.weights]))
    return same and stays and _key(one) == _key(other)


def _key(layer: Layer) -> tuple[Any, ...]:
    return layer.given["x"], layer.group, layer.kind


def _groups(layers: list[Layer], aliases: Aliases) -> Iterator[_Group]:
    """Layers of one input together; alone, where something writes to it, which may be between two of them."""
    found: dict[Any, list[Layer]] = {}
    for layer in layers:
        alone = aliases.is_written(layer.given["x"])
        found.setdefault(layer.node if alone else _key(layer), []).append(layer)
    for together in found.values():
        yield _Group(together, Prologue(together[0].given["x"], kind=together[0].kind))


# ---- what is written -----------------------------------------------------------------------------------------


def _put_rows(group: _Group) -> None:
    """Bring the input of a group to int8 where its first layer stands."""
    first, before = group.layers[0], group.before
    graph = first.node.graph
    with graph.inserting_before(first.node):
        arguments = before.arguments(first.group)
        if first.kind == "swiglu":
            inner: Any = fixed(first.given["weight"].meta["val"].shape[-1])
            halves = [graph.call_function(aten.slice.Tensor, (before.x, -1, at, at + inner)) for at in (0, inner)]
            arguments = (*halves, *arguments[2:])
        both = graph.call_function(quantize_rows.operator(), arguments)
        group.rows = [graph.call_function(operator.getitem, (both, i)) for i in range(2)]


def _put_products(layers: list[Layer], groups: dict[Node, _Group], behind: dict[Node, Epilogue]) -> None:
    """The products of layers with what is behind each, where the last of that stands."""
    written: dict[Node, Node] = {}  # what was there -> what is in its place
    given = {layer.node: layer.given for layer in layers}
    for node, after in behind.items():
        group, like, own = groups[node], after.result.meta["val"], given[node]
        up = given[after.up] if after.up is not None else dict.fromkeys(own)
        x = written.get(group.before.x, group.before.x)
        graph = node.graph
        with graph.inserting_before(after.result):
            sizes = []
            for at, size in enumerate(like.shape[:-1]):
                known = fixed(size)
                sizes.append(graph.call_function(aten.sym_size.int, (x, at)) if known is None else known)
            more = [part[name] for part in (own, up) for name in ("weight", "weight_scale", "bias")]
            parts = [part and written.get(part, part) for part in (*more, after.gate, after.residual)]
            arguments = (*group.rows, *parts, after.activation, sizes, like.dtype)
            made = graph.call_function(scaled_linear.operator(), arguments)
        made.meta["val"] = like
        after.result.replace_all_uses_with(made)
        written[after.result] = made
        _erase(after.nodes)


def _erase(nodes: list[Node]) -> None:
    """Take out calls that nothing reads any more, a reader before what it reads."""
    for node in sorted(set(nodes), reverse=True):
        if not readers(node):
            for says in list(node.users):
                node.graph.erase_node(says)
            node.graph.erase_node(node)
