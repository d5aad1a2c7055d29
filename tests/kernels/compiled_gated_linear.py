# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernel in Gluon for the card that it is for, as an artefact does, which takes none."""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from nexfort_engine.kernels.geglu_linear import gluon_kernel
from nexfort_engine.kernels.geglu_linear.gluon_kernel import multiply_gated_in_groups as kernel

SHARED = 232448  # bytes of shared memory that a block may have on such a card

for given, dtype, biased, columns, inner in (
    ("fp16", "fp16", True, 5120, 1280),
    ("bf16", "bf16", False, 128, 64),
    ("fp8e4nv", "fp16", True, 5120, 1280),
    ("fp8e4nv", "bf16", False, 1280, 320),
):
    narrow = given != dtype
    constants = {"COLUMNS": columns, "INNER": inner, "PROGRAMS": 132, "BIASED": biased, "SCALED": narrow}
    constants["scratch"] = None
    kinds = {"rows": "i32", **dict.fromkeys(("x", "weight"), f"*{given}"), **dict.fromkeys(constants, "constexpr")}
    kinds |= dict.fromkeys(("x_scale", "weight_scale"), "*fp32" if narrow else f"*{given}")
    signature = {name: kinds.get(name, f"*{dtype}") for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = GluonASTSource(kernel, signature, constants, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 1})
    assert made.asm["cubin"] and made.metadata.shared <= SHARED
    assert made.metadata.global_scratch_size == gluon_kernel.SCRATCH
    product = "m64n256k32.f32.e4m3.e4m3" if narrow else "m64n256k16.f32"
    assert f"wgmma.mma_async.sync.aligned.{product}" in made.asm["ptx"]
    assert "cp.async.bulk.tensor.2d" in made.asm["ptx"], "the card copies"
    assert "local" not in made.asm["ptx"].partition(".visible .entry")[2].partition("{")[2], "registers hold all"
