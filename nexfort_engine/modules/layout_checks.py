# SPDX-License-Identifier: Apache-2.0
"""Code that looks at how an image lies is noticed."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from .channels_last import _LOOKS, _RANDOM, _WRITES, _is_among, _is_plain, _is_turned, _remember, _shares


class LooksNoticed(TorchFunctionMode):
    """Inside the block it is an error where code would do something else with an image that lies otherwise.

    It writes to a copy where it would be given a look at an image with channels outermost, or to a look at the image
    where it would be given a copy of its own (`x.permute(0, 2, 3, 1).contiguous()`); or it fills a tensor that lies so
    with random numbers, which come in the order of memory.

    any: whether there was such an image at all.
    """

    def __init__(self) -> None:
        super().__init__()
        self._turned: dict[int, StorageWeakRef] = {}
        self._copies: dict[int, StorageWeakRef] = {}
        self._same: Any = WeakIdKeyDictionary()  # tensors that are looks here alone

    @property
    def any(self) -> bool:
        return bool(self._turned)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":  # of a tensor's shape, type and the like: most of what is asked
            result = func(*args, **kwargs)
            if isinstance(result, torch.Tensor) and _is_turned(args[0]):
                _remember(args[0], self._turned)
            return result
        for one in args:
            if _is_turned(one):
                _remember(one, self._turned)
        first = args[0] if args and isinstance(args[0], torch.Tensor) and _is_plain(args[0]) else None
        in_place = name in _WRITES or (name.endswith("_") and not name.endswith("__")) or kwargs.get("inplace")
        written = [kwargs.get("out"), first if in_place else None]
        tensors = [one for one in written if isinstance(one, torch.Tensor)]
        if any(_is_among(one, self._copies) or one in self._same for one in tensors):
            raise RuntimeError(f"its code writes with {name} to an image that it takes for contiguous")
        if name in _RANDOM and first is not None and _is_turned(first):
            raise RuntimeError(f"its code draws with {name} for an image that it takes for contiguous")
        result = func(*args, **kwargs)
        if name in _LOOKS and first is not None and _is_among(first, self._turned) and _is_plain(result):
            if not _shares(first, result):
                _remember(result, self._copies)
            elif first.is_contiguous() and first.dim() > 2:
                self._same[result] = None
        return result
