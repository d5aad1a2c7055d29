# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernel in Gluon for the card that it is for, as an artefact does, which takes none."""

from __future__ import annotations

import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from nexfort_engine.kernels.odd_head_dim_attention import gluon_kernel
from nexfort_engine.kernels.odd_head_dim_attention import op as odd_head_dim_attention
from nexfort_engine.kernels.odd_head_dim_attention.gluon_kernel import attend_unpadded_in_groups as kernel

SHARED = 232448  # bytes of shared memory that a block may have on such a card
SIZES = ("batch", "heads", "queries", "keys")
TENSORS = ("q", "k", "v", "out")

KINDS = (("fp16", "i64"), ("bf16", "i32"))
for number, width in enumerate(odd_head_dim_attention.WIDTHS):
    for dtype, stride in KINDS if "all" in sys.argv[1:] else (KINDS[number % 2],):
        constants = {"SCALE": 0.1, "E": width, "PROGRAMS": 132, "scratch": None}
        kinds = {**dict.fromkeys(TENSORS, f"*{dtype}"), **dict.fromkeys(SIZES, "i32")}
        kinds |= dict.fromkeys(constants, "constexpr")
        signature = {name: kinds.get(name, stride) for name in kernel.arg_names}
        aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind[0] == "*"}
        source = GluonASTSource(kernel, signature, constants, aligned)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 1})
        text = made.asm["ptx"]
        assert made.asm["cubin"] and made.metadata.shared <= SHARED
        assert made.metadata.global_scratch_size == gluon_kernel.SCRATCH
        assert "cp.async.bulk.tensor.4d" in text, "the card copies"
        for columns in (128, 64, 16):  # scores, and both pieces of a result
            assert f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{dtype.replace('p', '')}" in text
        # without it strides are multiples of nothing, and each number is read and written by itself
        moved = re.findall(r"(?:ld|st)\.global\S*", text)
        assert moved and all(".v4" in one for one in moved), moved
