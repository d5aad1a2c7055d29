# SPDX-License-Identifier: Apache-2.0
"""What Triton's interpreter lacks here."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

Case = TypeVar("Case")


def some(cases: Iterable[Case]) -> list[Case]:
    """A fifth of the cases, or those that are there where a script is called with "all"."""
    return list(cases)[:: 1 if "all" in sys.argv[1:] else 5]


def with_numbers(patch: Any = interpreter._patch_lang_tensor) -> None:
    """Triton 3.6 asks an array of one dimension for its number, which numpy 2.4 refuses."""

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


_NARROW = {tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8), tl.bfloat16: (torch.bfloat16, torch.uint16)}


def with_rounding(convert: Any = interpreter._convert_float) -> None:
    """Triton 3.6 loses the carry where rounding to fp8 reaches a power of 2, and cuts what is below normal.

    What it brings to bfloat16 it cuts off, where a card rounds.
    """

    def converted(numbers: Any, given: Any, wanted: Any, rounding: Any) -> Any:
        if wanted not in _NARROW or given != tl.float32:
            return convert(numbers, given, wanted, rounding)
        dtype, bits = _NARROW[wanted]
        return torch.from_numpy(np.ascontiguousarray(numbers).view(np.float32)).to(dtype).view(bits).numpy()

    interpreter._convert_float = converted


def with_bfloat16(multiply: Any = interpreter.InterpreterBuilder.create_dot) -> None:
    """Triton 3.6 multiplies the bits of bfloat16 as whole numbers."""

    def wide(factor: Any) -> Any:
        if factor.dtype.scalar != tl.bfloat16:
            return factor
        return interpreter.TensorHandle((factor.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def multiplied(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        return multiply(builder, wide(a), wide(b), *rest)

    interpreter.InterpreterBuilder.create_dot = multiplied
