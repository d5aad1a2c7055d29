# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernel for every card, which takes none."""

from __future__ import annotations

import re

import triton
from cards import cards, combined
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nexfort_engine.kernels.grouped_gemm import op as grouped_gemm
from nexfort_engine.kernels.grouped_gemm.triton_kernel import multiply_rows

ARCHITECTURES = cards()
SHARED = 101376  # bytes of shared memory that a block may have on the cards that have the least

for architecture in ARCHITECTURES:
    for dtype, count in combined(("fp16", "bf16"), (2, grouped_gemm.MOST)):
        constants = {"COLUMNS": 1280, "INNER": 2048, **grouped_gemm.blocks(count, 1280, 2048), "P": count}
        kinds = {"rows": "i32", **dict.fromkeys(constants, "constexpr")}
        signature = {name: kinds.get(name, f"*{dtype}") for name in multiply_rows.arg_names}
        places = [i for i, kind in enumerate(signature.values()) if kind.startswith("*")]
        aligned = {(i,): [["tt.divisibility", 16]] for i in places}
        source = ASTSource(multiply_rows, signature, constants, aligned)
        made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": 4})
        assert made.asm["cubin"] and f".target sm_{architecture}" in made.asm["ptx"]
        assert made.metadata.shared <= SHARED, (architecture, made.metadata.shared)
        # numbers are copied to shared memory 16 bytes at a time: the choice among weights keeps that they lie so
        copies = [line for line in made.asm["ptx"].splitlines() if re.search(r"cp\.async\.c[ag]\.", line)]
        assert copies and all("0x10" in line for line in copies), (architecture, copies)
