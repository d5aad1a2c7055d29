# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernel in Gluon for the card that it is for, as an artefact does, which takes none."""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from nexfort_engine.kernels import gluon_gated_linear
from nexfort_engine.kernels.gluon_gated_linear import multiply_gated_in_groups as kernel

SHARED = 232448  # bytes of shared memory that a block may have on such a card

for dtype, biased, columns, inner in (("fp16", True, 5120, 1280), ("bf16", False, 128, 64)):
    constants = {"COLUMNS": columns, "INNER": inner, "PROGRAMS": 132, "BIASED": biased, "scratch": None}
    kinds = {"rows": "i32", **dict.fromkeys(constants, "constexpr")}
    signature = {name: kinds.get(name, f"*{dtype}") for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = GluonASTSource(kernel, signature, constants, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 1})
    assert made.asm["cubin"] and made.metadata.shared <= SHARED
    assert made.metadata.global_scratch_size == gluon_gated_linear.SCRATCH
    assert "wgmma.mma_async.sync.aligned.m64n256k16.f32" in made.asm["ptx"]
    assert "cp.async.bulk.tensor.2d" in made.asm["ptx"], "the card copies"
    assert "local" not in made.asm["ptx"].partition(".visible .entry")[2].partition("{")[2], "registers hold all"
