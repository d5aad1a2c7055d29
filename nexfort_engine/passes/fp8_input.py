# SPDX-License-Identifier: Apache-2.0
"""Inputs of layers in fp8 as plain math that fuses, in the place of an operator that nothing fuses with.

ComfyUI brings the input of a layer in fp8 to fp8 by an operator of comfy_kitchen, which reads it from memory and writes
it there, once for each layer. As plain code it is part of the norm or activation before, and layers of one input have
it once. The numbers are those of comfy_kitchen's CUDA kernel: divided by the scale in 32 bits, cut off at the largest
number and rounded once. What is not a number stays so, as in comfy_kitchen's code for CPUs; its CUDA kernel makes the
least number of it. The operator is known by its name, as in rotary.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer

from ..graph.alias_analysis import Aliases
from ..graph.fx_builder import fixed, replace
from .prologue_match import calls_of

aten = torch.ops.aten
NAME = "comfy_kitchen::quantize_fp8"
_ALIKE = (aten.reshape.default, aten.view.default, aten.ones.default, aten.full.default)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def fp8_inputs(module: GraphModule) -> int:
    """Write such operators as `narrowed` has it, one for those of equal inputs; gives how many."""
    found, tracer, aliases = 0, GraphAppendingTracer(module.graph), Aliases(module.graph)
    made: dict[Any, Node] = {}
    for node in calls_of(module, NAME):
        if _reason(node) is not None:
            continue
        stays = not any(map(aliases.is_written, (node, *node.args[:2])))
        what = (*map(_key, node.args[:2]), node.meta["val"].dtype) if stays else node
        if what in made:
            node.replace_all_uses_with(made[what])
            module.graph.erase_node(node)
        else:
            with module.graph.inserting_before(node):
                x, scale = (Proxy(part, tracer) for part in node.args[:2])
                written = narrowed(x, scale, dtype=node.meta["val"].dtype)
            made[what] = written.node
            replace(node, written)
        found += 1
    return found


def _key(part: Any) -> Any:
    """What is equal for values that are computed alike of the same: looks at a tensor, and scales of one."""
    if not isinstance(part, Node):
        return str(part)
    if part.target not in _ALIKE:
        return part
    return part.target, tuple(map(str, part.args[1:])), str(part.kwargs), *map(_key, part.args[:1])


def left(module: GraphModule) -> list[str]:
    """Of such operators that stay, what people are told."""
    stay = [_reason(node) for node in calls_of(module, NAME)]
    return [f"{NAME} is not fused: {reason}" for reason in dict.fromkeys(stay) if reason is not None]


def narrowed(x: Any, scale: Any, *, dtype: torch.dtype) -> Any:
    """x divided by scale, one number in float32, in an fp8 dtype."""
    most = torch.finfo(dtype).max
    steps = aten.div.Tensor(aten.to.dtype(x, torch.float32), scale)
    return aten.to.dtype(aten.clamp.default(steps, -most, most), dtype)


def _reason(node: Node) -> str | None:
    """Why an operator stays as it is, or None."""
    if len(node.args) != 3 or node.kwargs or not all(isinstance(part, Node) for part in node.args[:2]):
        return "it is called in a way that is not known"
    x, scale = (part.meta["val"] for part in node.args[:2])  # type: ignore[union-attr]
    if x.dtype not in _FLOATS or scale.dtype != torch.float32 or node.meta["val"].dtype not in _FP8:
        return f"{node.meta['val'].dtype} of {x.dtype}, with a scale in {scale.dtype}"
    if x.device != scale.device:
        return "its scale lies on another device than its input"
    if scale.dim() > x.dim() or any(fixed(size) != 1 for size in scale.shape):
        return f"its scale has the sizes {list(scale.shape)}; expected one number"
    return None
