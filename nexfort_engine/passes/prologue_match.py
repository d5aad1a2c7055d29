# SPDX-License-Identifier: Apache-2.0
"""What stands before a layer that brings its input to 8 bits, and that the kernel for it computes on its way.

A norm with or without modulation, GELU, or SwiGLU: `nexfort::quantize_rows` reads what they read. What others read
too is in memory anyway, and is read from there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..graph.alias_analysis import Aliases
from ..graph.fx_builder import fixed

aten = torch.ops.aten
_SAYS = aten._assert_tensor_metadata.default  # export writes it beside a cast; its result is nothing
_NORMS = {aten.rms_norm.default: "rms_norm", aten.layer_norm.default: "layer_norm"}
_MODULATED = {"comfy_kitchen::adaln": "layer_norm", "comfy_kitchen::rms_adaln": "rms_norm"}
Factor = tuple[Node, bool]  # what is multiplied with, and whether one more is meant


@dataclass(frozen=True)
class Prologue:
    """What the kernel is given, as its operator takes it. nodes: what it computes, a reader before what it reads."""

    x: Node
    second: Node | None = None
    weight: Node | None = None
    bias: Node | None = None
    factor: Node | None = None
    shift: Node | None = None
    kind: str = ""
    eps: float = 0.0
    plus_one: bool = False
    nodes: list[Node] = field(default_factory=list)

    def arguments(self, group: int) -> tuple[Any, ...]:
        """Of `nexfort::quantize_rows`."""
        tensors = (self.x, self.second, self.weight, self.bias, self.factor, self.shift)
        return (*tensors, self.kind, self.eps, self.plus_one, group)


def name_of(node: Any) -> str:
    """The operator that a node calls, by its name; nothing for what calls none."""
    schema = getattr(node.target, "_schema", None) if getattr(node, "op", "") == "call_function" else None
    return schema.name if schema is not None else ""


def calls_of(module: GraphModule, name: str) -> list[Any]:
    """The nodes that call the operator of this name."""
    return [node for node in module.graph.nodes if name_of(node) == name]


def readers(node: Node) -> list[Node]:
    """Who reads a value's numbers."""
    return [user for user in node.users if user.target is not _SAYS]


def passed_on(node: Any) -> Any:
    """What a node gives as it is, or None: dropout that drops nothing."""
    if node.target is aten.dropout.default and (node.args[2] is False or node.args[1] == 0):
        return node.args[0]
    return None


def prologue(x: Node, layers: Collection[Node], aliases: Aliases, taken: Collection[Node]) -> Prologue:
    """What is before `x`, which these layers read. taken: nodes that something else computes."""
    found = _prologue(x, layers)
    if found is None:
        return Prologue(x)
    parts = [found.x, found.second, found.weight, found.bias, found.factor, found.shift]
    read = [part for part in parts if part is not None]
    if not all(isinstance(node, Node) and isinstance(node.meta["val"], torch.Tensor) for node in [*found.nodes, *read]):
        return Prologue(x)
    if set(read) & set(found.nodes):  # a norm times itself, say
        return Prologue(x)
    # what is read is read where the first layer stands from here on
    stays = not any(map(aliases.is_written, [*found.nodes, *read[1:]]))
    stays &= not aliases.is_written_between(found.x, min(found.nodes), min(layers))
    return found if stays and not set(found.nodes) & set(taken) and _fits(found) else Prologue(x)


def _prologue(x: Node, layers: Collection[Node]) -> Prologue | None:
    nodes: list[Node] = []
    inside = set(layers)
    value: Any = x

    def alone(node: Any) -> bool:
        """Whether nothing but what was found so far reads it. Notes it."""
        if not isinstance(node, Node) or node.op != "call_function" or not set(readers(node)) <= inside:
            return False
        inside.add(node)
        nodes.append(node)
        return True

    if not alone(value):
        return None
    while (given := passed_on(value)) is not None:
        value = given
        if not alone(value):
            return None
    if value.target is aten.gelu.default:
        kind = "gelu_tanh" if value.kwargs.get("approximate", "none") == "tanh" else "gelu"
        return Prologue(value.args[0], kind=kind, nodes=nodes)
    return _swiglu(value, alone, nodes) or _normed(value, alone, nodes)


def _swiglu(value: Any, alone: Callable[[Any], bool], nodes: list[Node]) -> Prologue | None:
    """silu(x) * second."""
    if value.target is not aten.mul.Tensor:
        return None
    gate, up = sorted(value.args, key=lambda part: getattr(part, "target", None) is not aten.silu.default)
    if getattr(gate, "target", None) is not aten.silu.default or not alone(gate):
        return None
    return Prologue(gate.args[0], second=up, kind="swiglu", nodes=nodes)


def _normed(value: Any, alone: Callable[[Any], bool], nodes: list[Node]) -> Prologue | None:
    """A norm, perhaps times a factor plus a shift."""
    if kind := _MODULATED.get(name_of(value)):
        if len(value.args) != 4:
            return None
        x, scale, shift, eps = value.args
        return Prologue(x, factor=scale, shift=shift, kind=kind, eps=eps, plus_one=True, nodes=nodes)
    shift, norm = None, value
    factor: Factor | None = None
    if value.target is aten.addcmul.default and value.kwargs.get("value", 1) == 1:
        shift, norm, factor = value.args[0], *_norm_and_factor(value.args[1:3])
    elif value.target is aten.add.Tensor and value.kwargs.get("alpha", 1) == 1:
        product, shift = sorted(value.args, key=lambda part: getattr(part, "target", None) is not aten.mul.Tensor)
        if not isinstance(shift, Node) or getattr(product, "target", None) is not aten.mul.Tensor or not alone(product):
            return None
        norm, factor = _norm_and_factor(product.args)
    elif value.target is aten.mul.Tensor:
        norm, factor = _norm_and_factor(value.args)
    if getattr(norm, "target", None) not in _NORMS or (norm is not value and not alone(norm)):
        return None
    given = _norm(norm)
    if given is None:
        return None
    by, plus_one = factor if factor is not None else (None, False)
    return Prologue(**given, factor=by, shift=shift, plus_one=plus_one, nodes=nodes)


def _norm_and_factor(parts: Any) -> tuple[Any, Factor | None]:
    """Of two factors the norm, and the other."""
    norm, by = sorted(parts, key=lambda part: getattr(part, "target", None) not in _NORMS)
    if not isinstance(by, Node):
        return None, None
    if by.target is aten.add.Tensor and by.args[1] == 1 and isinstance(by.args[0], Node) and not by.kwargs:
        return norm, (by.args[0], True)
    return norm, (by, False)


def _norm(node: Node) -> dict[str, Any] | None:
    """The arguments of a norm over the last dimension, or None."""
    declared = node.target._schema.arguments  # type: ignore[union-attr]
    given = dict(zip((argument.name for argument in declared), node.args, strict=False)) | dict(node.kwargs)
    eps = given.get("eps", 1e-5 if node.target is aten.layer_norm.default else None)
    if not isinstance(eps, float) or len(given["normalized_shape"]) != 1:
        return None
    return {"x": given["input"], "weight": given.get("weight"), "bias": given.get("bias"), "eps": eps} | {
        "kind": _NORMS[node.target]  # type: ignore[index]
    }


def _fits(found: Prologue) -> bool:
    """Whether the kernel takes what was found: sizes and dtypes of all that it reads."""
    value = found.nodes[0].meta["val"]
    width, x = fixed(value.shape[-1]), found.x.meta["val"]
    alike = [part.meta["val"] for part in (found.x, found.second) if part is not None]
    if any(part.dtype != value.dtype or not same_sizes(part.shape, value.shape) for part in alike):
        return False
    rows = [part.meta["val"] for part in (found.weight, found.bias) if part is not None]
    if any([*map(fixed, part.shape)] != [width] for part in rows):
        return False
    per_token = [part.meta["val"] for part in (found.factor, found.shift) if part is not None]
    floats = all(part.is_floating_point() and part.device == x.device for part in (*rows, *per_token))
    return floats and (not per_token or x.dim() <= 3) and all(is_per_token(part, x, width) for part in per_token)


def same_sizes(one: Any, other: Any) -> bool:
    """Whether two shapes are equal in every call."""
    return len(one) == len(other) and all(statically_known_true(a == b) for a, b in zip(one, other, strict=True))


def is_per_token(part: torch.Tensor, x: torch.Tensor, width: int | None) -> bool:
    """Whether there is a row of this width for each of x, or one for several of them."""
    if part.dim() > x.dim() or part.dim() < 1 or fixed(part.shape[-1]) != width:
        return False
    pairs = zip(part.shape[:-1], x.shape[x.dim() - part.dim() : -1], strict=True)
    return all(fixed(mine) == 1 or statically_known_true(mine == other) for mine, other in pairs)
