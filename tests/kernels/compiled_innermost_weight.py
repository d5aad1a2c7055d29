# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernel for every card, which takes none."""

from __future__ import annotations

import triton
from cards import cards
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nexfort_engine.kernels.channels_last_weight import op as channels_last_weight
from nexfort_engine.kernels.channels_last_weight import triton_kernel as kernels

for architecture in cards():
    for dtype, places in (("fp16", 9), ("bf16", 3), ("fp32", 49)):
        types = {"weight": f"*{dtype}", "laid": f"*{dtype}", "channels": "i32"}
        sizes = channels_last_weight.blocks(places)
        signature = {name: types.get(name, "constexpr") for name in kernels.lay_innermost.arg_names}
        source = ASTSource(kernels.lay_innermost, signature, sizes)
        made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": 4})
        assert made.asm["cubin"] and f".target sm_{architecture}" in made.asm["ptx"]
