# SPDX-License-Identifier: Apache-2.0
"""Images: in regions and between them they lie in memory with channels innermost, as convolutions take them.

Eager code leaves them as each operator happens to: a convolution as its input and its weight lie, a group norm on a GPU
and a transformer's `contiguous()` with channels outermost. Then blocks transpose what they read, and two parts that are
concatenated lie differently. So a block is captured with weights of convolutions that have channels innermost, which
its graph makes of those that the module holds (`laid`), and its results are brought to that order (`innermost`): in the
graph, where it costs no pass of its own, and by a copy where it runs eager, so that what follows is called the same
way. The backbone's own result lies as its code has it, with channels outermost (`outermost`).

That is equal numbers for any code but such as looks at memory itself: `x.view(n * c, h, w)`. A block that does so is
captured with its weights as they are; where others do, no image is laid out any more (`Engine.leave_images`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._pytree import tree_leaves, tree_map_only

_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)
_LEAST = 1 << 16  # numbers of a weight: smaller ones Inductor copies in each call
_OF_ORDER = ("view size", "contiguous", "stride")  # in errors of code that cannot take a tensor as it lies


def holds_images(module: nn.Module) -> bool:
    """Whether a module computes with images (N, C, H, W): by its layers, whatever it is called."""
    return any(isinstance(layer, (*_CONVOLUTIONS, nn.GroupNorm)) for layer in module.modules())


def is_of_order(error: BaseException) -> bool:
    """Whether an error is that of code that cannot take a tensor as it lies in memory."""
    return isinstance(error, (RuntimeError, ValueError, AssertionError)) and any(w in str(error) for w in _OF_ORDER)


def shown(module: nn.Module, weights: list[torch.Tensor], names: list[str]) -> dict[int, torch.Tensor]:
    """Weights of convolutions by their places, as a capture is to see them: with channels innermost.

    weights: of the module, called `names`. Their numbers are not in their places: a capture reads none. Weights stay
    that are read as they lie, 1x1 and those that have channels innermost.
    """
    kinds = dict(module.named_modules())
    found = {}
    for place, (weight, name) in enumerate(zip(weights, names, strict=True)):
        owner, _, own = name.rpartition(".")
        if own == "weight" and isinstance(kinds.get(owner), _CONVOLUTIONS) and _is_copied(weight):
            o, i, h, w = weight.shape
            found[place] = weight.as_strided((o, i, h, w), (h * w * i, 1, w * i, i))
    return found


def laid(graph: GraphModule, node: Node, weight: torch.Tensor) -> None:
    """Have a graph that was captured with a weight as `shown` be given that which the module holds, and copy it."""
    seen = node.meta["val"]
    with seen.fake_mode:
        node.meta["val"] = torch.empty_strided(weight.shape, weight.stride(), dtype=seen.dtype, device=seen.device)
    first = next(other for other in graph.graph.nodes if other in node.users)
    with graph.graph.inserting_before(first):
        copy = graph.graph.call_function(torch.ops.aten.clone.default, (node,), {"memory_format": torch.channels_last})
    copy.meta["val"] = seen
    node.replace_all_uses_with(copy, lambda user: user is not copy)


def innermost(results: Any, given: Iterable[torch.Tensor]) -> Any:
    """Results of a block, images among them with channels innermost; in a trace too.

    given: what the block was called with. What shares memory with that stays as it is: whoever changes it in place
    means the other one too.
    """
    theirs = {tensor.untyped_storage()._cdata for tensor in given if _is_plain(tensor)}
    images = [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor) and _is_image(leaf)]
    turned = [one for one in images if one.untyped_storage()._cdata not in theirs and not _is_innermost(one)]
    if not turned:
        return results  # the very object: a list may be one that it was given
    copies = {id(one): one.clone(memory_format=torch.channels_last) for one in turned}
    return tree_map_only(torch.Tensor, lambda leaf: copies.get(id(leaf), leaf), results)


def outermost(result: Any) -> Any:
    """A backbone's result, images among it with channels outermost; the very object where nothing is to be done."""
    if not any(isinstance(leaf, torch.Tensor) and _is_to_be_turned(leaf) for leaf in tree_leaves(result)):
        return result
    return tree_map_only(torch.Tensor, lambda leaf: leaf.contiguous() if _is_to_be_turned(leaf) else leaf, result)


def _is_copied(weight: torch.Tensor) -> bool:
    """Whether a convolution would copy it to read it, and the copy is worth a place in the graph."""
    large = weight.dim() == 4 and weight.numel() >= _LEAST
    return large and weight.is_contiguous() and not weight.is_contiguous(memory_format=torch.channels_last)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


def _is_image(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 4 and _is_plain(tensor) and tensor.is_floating_point()


def _is_innermost(tensor: torch.Tensor) -> bool:
    """Whether it lies so without gaps. By its strides: `is_contiguous` asks for sizes that are symbols in a trace."""
    _, channels, height, width = tensor.shape
    strides = (height * width * channels, 1, width * channels, channels)
    return all(statically_known_true(one == other) for one, other in zip(tensor.stride(), strides, strict=True))


def _is_to_be_turned(tensor: torch.Tensor) -> bool:
    return _is_image(tensor) and _is_innermost(tensor) and not tensor.is_contiguous()
