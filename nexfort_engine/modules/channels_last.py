# SPDX-License-Identifier: Apache-2.0
"""Images: in regions and between them they lie in memory with channels innermost, as convolutions take them.

Videos (N, C, T, H, W) in half precision are images as well: there their convolutions take them so
(passes/video_convolutions.py).

Eager code leaves them as each operator happens to: a convolution as its input and its weight lie, a group norm on a GPU
and a transformer's `contiguous()` with channels outermost. Then blocks transpose what they read, and two parts that are
concatenated lie differently. So a block is captured with weights of convolutions that have channels innermost, which
its graph makes of those that the module holds (`laid`), with such images (`as_taken`), and its results are brought to
that order in the graph, where it costs no pass of its own (`innermost`). The backbone's own result lies as its code has
it, with channels outermost (`outermost`), and so does all that runs eager: an artefact copies an image that lies
otherwise.

That is equal numbers for any code but such as looks at memory itself. `x.view(n * c, h, w)` fails; and what is written
to `x.contiguous()` or `x.reshape(n, -1)`, which are looks at an image with channels outermost, goes to a copy of one
that lies so. A block whose code does the former is captured with its weights as they are; a plan notices both
(`LooksNoticed`), a step only the former; then no image is laid out any more (dispatch/recovery.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from .memory_format import normalised

_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)
_HALVES = (torch.float16, torch.bfloat16)
_INNERMOST = {4: torch.channels_last, 5: torch.channels_last_3d}
aten = torch.ops.aten
_CONVOLVE = (aten.conv2d.default, aten.conv2d.padding, aten.conv_transpose2d.input, aten.convolution.default)
MEASURED = ("cuda",)  # the types of devices on which this was measured to win; elsewhere images lie as they do
_LEAST = 1 << 16  # numbers of a weight: smaller ones Inductor copies in each call
_LOOKS = ("contiguous", "reshape", "reshape_as", "flatten", "ravel")  # at an image with channels outermost
_WRITES = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ipow__")
_RANDOM = (
    *("rand_like", "randn_like", "randint_like", "bernoulli", "bernoulli_", "normal_", "uniform_", "exponential_"),
    *("log_normal_", "cauchy_", "geometric_", "random_"),
)
_OF_ORDER = (
    "view size is not compatible",
    "contiguous",
    "stride",
)  # in errors of code that cannot take a tensor as it lies


def holds_images(module: nn.Module) -> bool:
    """Whether a module computes with images (N, C, H, W) or videos: by its layers, whatever it is called."""
    return any(isinstance(layer, (*_CONVOLUTIONS, nn.Conv3d, nn.GroupNorm)) for layer in module.modules())


def win_on(device: torch.device) -> bool:
    """Whether images are laid out on a device. On cards of AMD nobody measured it."""
    return device.type in MEASURED and torch.version.hip is None


def is_of_order(error: BaseException) -> bool:
    """Whether an error may be that of code that cannot take a tensor as it lies in memory. Assertions do not say."""
    if isinstance(error, AssertionError):
        return True
    return isinstance(error, (RuntimeError, ValueError)) and any(words in str(error) for words in _OF_ORDER)


def _remember(tensor: torch.Tensor, known: dict[int, StorageWeakRef]) -> None:
    """The memory of a tensor, which is not kept for it; nothing else has its place all the same."""
    storage = tensor.untyped_storage()
    known.setdefault(storage._cdata, StorageWeakRef(storage))


def _is_among(tensor: torch.Tensor, known: dict[int, StorageWeakRef]) -> bool:
    return _is_plain(tensor) and tensor.untyped_storage()._cdata in known


def _shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def weights_for_capture(module: nn.Module, weights: list[torch.Tensor], names: list[str]) -> dict[int, torch.Tensor]:
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


def only_convolved(node: Node) -> bool:
    """Whether convolutions alone read a weight, and not other code, to which its memory may matter."""
    return all(user.target in _CONVOLVE and user.args.index(node) == 1 for user in node.users)


def copy_to_channels_last(graph: GraphModule, node: Node, weight: torch.Tensor) -> None:
    """Have a graph copy a weight of the module into the layout of `weights_for_capture`, which it was captured with."""
    seen = node.meta["val"]
    with seen.fake_mode:
        node.meta["val"] = torch.empty_strided(weight.shape, weight.stride(), dtype=seen.dtype, device=seen.device)
    first = next(other for other in graph.graph.nodes if other in node.users)
    with graph.graph.inserting_before(first):
        copy = graph.graph.call_function(aten.clone.default, (node,), {"memory_format": torch.channels_last})
    copy.meta["val"] = seen
    node.replace_all_uses_with(copy, lambda user: user is not copy)


def as_taken(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as artefacts of images take it: itself, or a copy without gaps, of an image with channels innermost."""
    return tensor.contiguous(memory_format=_INNERMOST[tensor.dim()]) if is_image(tensor) else normalised(tensor)


def as_held(tensor: torch.Tensor, images: bool) -> torch.Tensor:
    """As `as_taken` for what lies in lists and mappings, whose memory format no key says. images: whether they are
    laid out: not where the block gives one of them back, which has to be the very tensor."""
    return as_taken(tensor) if images and is_image(tensor) else tensor.contiguous()


def to_channels_last(results: Any, given: Iterable[torch.Tensor]) -> Any:
    """Results of a block, images among them with channels innermost; in a trace too.

    given: what the block was called with, and what else others have of it. What shares memory with that, or with
    another result, stays as it is: whoever changes one in place means the other one too.
    """
    leaves = {id(leaf): leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)}.values()
    others = Counter(tensor.untyped_storage()._cdata for tensor in (*given, *leaves) if _is_plain(tensor))
    turned = [one for one in leaves if is_image(one) and others[one.untyped_storage()._cdata] == 1]
    turned = [one for one in turned if not _is_innermost(one) and not _is_expanded(one)]
    if not turned:
        return results  # the very object: a list may be one that it was given
    copies = {id(one): one.clone(memory_format=_INNERMOST[one.dim()]) for one in turned}
    return tree_map_only(torch.Tensor, lambda leaf: copies.get(id(leaf), leaf), results)


class Convolved(TorchFunctionMode):
    """Inside the block results of eager convolutions lie in memory as those of graphs do, whose weights are laid out.

    What is seen from them otherwise, such as frames of a video, then lies as behind an artefact.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is functional.conv2d or func is functional.conv_transpose2d:
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            if isinstance(result, torch.Tensor) and is_image(result) and _is_copied(weight):
                return result.contiguous(memory_format=torch.channels_last)
        return result


def is_channels_last(module: nn.Module) -> bool:
    """Whether a convolution's weight lies with channels innermost, so that eager code gives such images."""
    weights = (getattr(layer, "weight", None) for layer in module.modules() if isinstance(layer, _CONVOLUTIONS))
    return any(map(_lies_turned, weights))


def to_contiguous(result: Any, given: Iterable[torch.Tensor] = ()) -> Any:
    """A backbone's result, images among it with channels outermost; the very object where nothing is to be done.

    given: what it was called with; what is a part of that stays as it is.
    """
    theirs = {tensor.untyped_storage()._cdata for tensor in given if _is_plain(tensor)}

    def turned(leaf: torch.Tensor) -> torch.Tensor:
        own = _is_turned(leaf) and leaf.untyped_storage()._cdata not in theirs
        return leaf.contiguous() if own else leaf

    if not any(map(_is_turned, tree_leaves(result))):
        return result
    return tree_map_only(torch.Tensor, turned, result)


def _is_copied(weight: torch.Tensor) -> bool:
    """Whether a convolution would copy it to read it, and the copy is worth a place in the graph."""
    large = weight.dim() == 4 and weight.numel() >= _LEAST
    return large and weight.is_contiguous() and not weight.is_contiguous(memory_format=torch.channels_last)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether some of its numbers are there once for several places."""
    return any(statically_known_true(stride == 0) for stride in tensor.stride())


def is_image(tensor: torch.Tensor) -> bool:
    """Whether a tensor may be an image (N, C, H, W), or a video in half precision: by its rank and dtype."""
    rank = tensor.dim() == 4 or (tensor.dim() == 5 and tensor.dtype in _HALVES)
    return rank and _is_plain(tensor) and tensor.is_floating_point()


def _is_innermost(tensor: torch.Tensor) -> bool:
    """Whether it lies so without gaps. By its strides: `is_contiguous` asks for sizes that are symbols in a trace."""
    _, channels, *sizes = tensor.shape
    strides = [1, channels]  # of channels, and of what lies around them from the inside out
    for size in reversed(sizes):
        strides.append(strides[-1] * size)
    order = (1, *range(tensor.dim() - 1, 1, -1), 0)
    return all(statically_known_true(tensor.stride(d) == one) for d, one in zip(order, strides, strict=True))


def _lies_turned(tensor: Any) -> bool:
    """Whether it is an image that lies with channels innermost, and not both ways at once."""
    image = isinstance(tensor, torch.Tensor) and is_image(tensor)
    return image and _is_innermost(tensor) and not tensor.is_contiguous()


def _is_turned(tensor: Any) -> bool:
    """Whether it lies so on a device where images are laid out."""
    return _lies_turned(tensor) and win_on(tensor.device)
