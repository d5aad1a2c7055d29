# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernel for every card, which takes none."""

from __future__ import annotations

import triton
from cards import cards, combined
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nexfort_engine.kernels.quantize_rows import op
from nexfort_engine.kernels.quantize_rows.triton_kernel import quantize

SHARED = 101376  # bytes of shared memory that a block may have on the cards that have the least
# kind, group, numbers of a row, and whether it is modulated
CASES = (("layer_norm", 256, 3072, True), ("swiglu", 256, 10240, False), ("rms_norm", 64, 3840, True), ("", 16, 48, 0))

for (kind, group, inner, modulated), dtype in combined(CASES, ("fp16", "bf16")):
    for architecture in cards():
        block, rest = op.blocks_of(inner)
        constants = {"KIND": op.KINDS[kind], "GROUP": group, "INNER": inner, "BLOCK": block, "REST": rest, "EPS": 1e-6}
        constants |= {"WEIGHTED": kind == "rms_norm", "BIASED": False, "PLUS_ONE": bool(modulated)}
        constants |= dict.fromkeys(("FACTOR", "SHIFTED"), bool(modulated))
        kinds = {"out": "*i8", "scales": "*fp32", "tokens": "i32", **dict.fromkeys(constants, "constexpr")}
        kinds |= {name: "i32" for name in quantize.arg_names if name.endswith(("_batch", "_token"))}
        signature = {name: kinds.get(name, f"*{dtype}") for name in quantize.arg_names}
        places = [i for i, kind_ in enumerate(signature.values()) if kind_.startswith("*") or kind_ == "i32"]
        source = ASTSource(quantize, signature, constants, {(i,): [["tt.divisibility", 16]] for i in places})
        options = {"num_warps": op.warps(block), "num_stages": 1}
        made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
        assert made.asm["cubin"] and f".target sm_{architecture}" in made.asm["ptx"]
        assert made.metadata.shared <= SHARED, (architecture, inner, made.metadata.shared)
        assert "st.local" not in made.asm["ptx"], "registers hold a row"
