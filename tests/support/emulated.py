# SPDX-License-Identifier: Apache-2.0
"""Graphs with products in fp8 run where no GPU is. No test lives here."""

from __future__ import annotations

from typing import Any

import torch

_scaled_mm = torch.ops.aten._scaled_mm.default


class Emulated(torch.fx.Interpreter):
    """Runs a graph with the one product that only a GPU has computed from its meaning: (a * scale) @ (b * scale)."""

    products = 0

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is not _scaled_mm:
            return super().call_function(target, args, kwargs)
        a, b, scale_a, scale_b, bias, _, dtype, _ = args
        assert a.dtype == b.dtype == torch.float8_e4m3fn and a.is_contiguous() and b.t().is_contiguous()
        assert scale_a.shape == (a.shape[0], 1) and scale_b.shape == (1, b.shape[1])
        assert scale_a.dtype == scale_b.dtype == torch.float32 and a.shape[1] % 16 == b.shape[1] % 16 == 0
        Emulated.products += 1
        result = (a.float() * scale_a) @ (b.float() * scale_b)
        return (result if bias is None else result + bias.float()).to(dtype)
