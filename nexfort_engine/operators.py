# SPDX-License-Identifier: Apache-2.0
"""Operators: those of a host that a compiler cannot look into, traced as the math that the host says they are.

A host may bring kernels of its own for what its blocks do often (rotary embeddings, norms with modulation), as custom
operators. A compiler must call them as they are: it can fuse nothing into them, and all they read and write goes over
memory. Where the host also has the same thing as plain code of torch, that is what is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

Math = Mapping[str, Callable[..., Any]]


class AsMath(TorchFunctionMode):
    """Calls functions in the place of operators.

    math: "namespace::name" of an operator -> a function with the same names of arguments that changes none of them.
    """

    def __init__(self, math: Math) -> None:
        super().__init__()
        self._math = math

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverloadPacket):
            func = func.default if "default" in func.overloads() else func
        if isinstance(func, torch._ops.OpOverload) and (function := self._math.get(func._schema.name)) is not None:
            names = [argument.name for argument in func._schema.arguments]
            return function(**dict(zip(names, args, strict=False)), **kwargs)
        return func(*args, **kwargs)
