# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernel in Gluon for the card that it is for, as an artefact does, which takes none."""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from nexfort_engine.kernels.scaled_linear import choice, gluon_kernel
from nexfort_engine.kernels.scaled_linear.gluon_kernel import multiply_in_groups as kernel

SHARED = 232448  # bytes of shared memory that a block may have on such a card

for factor, dtype, up, rest, columns, inner in (
    ("i8", "bf16", False, (0, False), 3840, 10240),
    ("i8", "fp16", True, (3, True), 10240, 3840),
    ("i8", "bf16", False, (1, True), 200, 144),
    ("fp8e4nv", "bf16", False, (2, True), 3072, 3072),
):
    activation, more = rest
    constants = {"COLUMNS": columns, "INNER": inner, "ROW_SCALES": True, "COLUMN_SCALES": factor == "i8"}
    constants |= {"ACTIVATION": activation, "UP": up, **choice.GROUPED.blocks(), "PROGRAMS": 132}
    constants |= dict.fromkeys(("BIASED", "UP_BIASED", "GATED", "ADDED"), more) | {"scratch": None}
    kinds = {"rows": "i32", "tokens": "i32", "gate_batch": "i32", "gate_token": "i32"}
    kinds |= dict.fromkeys(("x", "weight", "up"), f"*{factor}") | dict.fromkeys(constants, "constexpr")
    kinds |= dict.fromkeys(("x_scale", "weight_scale", "up_scale"), "*fp32")
    signature = {name: kinds.get(name, f"*{dtype}") for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = GluonASTSource(kernel, signature, constants, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 1})
    told = (factor, dtype, up, rest, columns, inner, made.metadata.shared)
    assert made.asm["cubin"] and made.metadata.shared <= SHARED, told
    assert made.metadata.global_scratch_size in (256, gluon_kernel.SCRATCH), told
    product = "m64n128k32.s32.s8.s8" if factor == "i8" else "m64n256k32.f32.e4m3.e4m3"
    assert f"wgmma.mma_async.sync.aligned.{product}" in made.asm["ptx"], told
    assert "cp.async.bulk.tensor.2d" in made.asm["ptx"], "the card copies"
    assert "local" not in made.asm["ptx"].partition(".visible .entry")[2].partition("{")[2], "registers hold all"
