# SPDX-License-Identifier: Apache-2.0
"""Parts: weights that are not plain tensors, as the plain tensors that they hold.

A quantised weight is a tensor subclass: packed data, one or more tensors of scales, and a few words that say how they
belong together. No artefact takes such an object. It takes the plain tensors one by one, like any other weights, and
the trace puts them together again, so that the host's own code decides what is computed with them and the compiler
sees it. The words are part of the artefact's key.

torch's protocol for tensor subclasses (`__tensor_flatten__`, `__tensor_unflatten__`) says what the parts are, so that
no class is named here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..guards.module_guards import describe
from ..guards.option_recorder import Refused

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
_PLAIN_TYPES = frozenset(_PLAIN)


def is_plain(tensor: Any) -> bool:
    """Whether a tensor is all there is to it."""
    return type(tensor) in _PLAIN or type(tensor).__module__ == "torch.nn.parameter"


def places(weights: Sequence[torch.Tensor | None]) -> list[Any]:
    """Where the memory of weights lies, that of their parts included, and what is said about those; to be compared."""
    if set(map(type, weights)) <= _PLAIN_TYPES:
        return list(map(torch.Tensor.data_ptr, weights))  # type: ignore[arg-type]
    found: list[Any] = []
    for weight in weights:
        if weight is None or type(weight) in _PLAIN or not is_traceable_wrapper_subclass(weight):
            found.append(weight.data_ptr() if weight is not None else 0)
            continue
        names, context = weight.__tensor_flatten__()
        found.append(context)
        found += places([getattr(weight, name) for name in names])
    return found


class Parts:
    """How the weights of one block come apart. Those that are plain are their own only part."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        """Raises Refused, with the reason, for a weight that does not come apart into plain tensors."""
        self._wholes = [None if is_plain(weight) else _Whole(weight) for weight in weights]
        # the words as JSON, with the place of the weight that they are about
        self.text = [[i, whole.text()] for i, whole in enumerate(self._wholes) if whole is not None]

    @classmethod
    def of(cls, weights: Sequence[torch.Tensor]) -> Parts | None:
        """None where all weights are plain. Raises Refused."""
        return None if all(map(is_plain, weights)) else cls(weights)

    def take(self, weights: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """The plain tensors of all weights in turn; None where a weight does not come apart as it did."""
        found: list[torch.Tensor] = []
        for weight, whole in zip(weights, self._wholes, strict=True):
            if whole is None:
                if not is_plain(weight):
                    return None
                found.append(weight)
            elif not whole.take(weight, found):
                return None
        return found

    def each(self, values: Sequence[Any]) -> list[Any]:
        """For every plain tensor the value of the weight that it is a part of."""
        counts = (1 if whole is None else whole.count() for whole in self._wholes)
        return [value for value, count in zip(values, counts, strict=True) for _ in range(count)]

    def together(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The weights of which these are the parts."""
        rest = iter(tensors)
        return [next(rest) if whole is None else whole.together(rest) for whole in self._wholes]


class _Whole:
    """One tensor of a subclass: its class, the names of its parts, and the words."""

    def __init__(self, tensor: Any) -> None:
        if not is_traceable_wrapper_subclass(tensor):
            raise Refused(f"a weight is a {type(tensor).__qualname__}, which does not say what it is made of")
        names, self.context = tensor.__tensor_flatten__()
        self.kind: Any = type(tensor)
        self.names = list(names)
        self.size, self.stride = tensor.shape, tensor.stride()
        inner = [getattr(tensor, name) for name in self.names]
        self.inner = [None if is_plain(part) else _Whole(part) for part in inner]
        self.metas = [[list(part.shape), str(part.dtype)] for part in inner]

    def text(self) -> list[Any]:
        """All that a trace can see of it besides its parts' data, as JSON."""
        kind = f"{self.kind.__module__}.{self.kind.__qualname__}"
        inner = [part.text() if part is not None else None for part in self.inner]
        try:
            return [kind, self.names, self.metas, describe(self.context), inner]
        except Refused as reason:
            raise Refused(f"a weight is a {self.kind.__qualname__} that cannot be described: {reason}") from None

    def count(self) -> int:
        """How many plain tensors it holds."""
        return sum(1 if part is None else part.count() for part in self.inner)

    def take(self, tensor: Any, found: list[torch.Tensor]) -> bool:
        """Add its parts to `found`. False: it is not what it was."""
        if type(tensor) is not self.kind:
            return False
        names, context = tensor.__tensor_flatten__()
        if names != self.names or context != self.context:
            return False
        for name, whole in zip(names, self.inner, strict=True):
            part = getattr(tensor, name)
            if whole is not None:
                if not whole.take(part, found):
                    return False
            elif is_plain(part):
                found.append(part)
            else:
                return False
        return True

    def together(self, rest: Any) -> Any:
        """One like it, made of the next tensors of `rest`."""
        parts = [next(rest) if whole is None else whole.together(rest) for whole in self.inner]
        named, kind = dict(zip(self.names, parts, strict=True)), self.kind
        return kind.__tensor_unflatten__(named, self.context, self.size, self.stride)
