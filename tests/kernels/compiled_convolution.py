# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernel in Gluon for the card that it is for, as an artefact does, which takes none."""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from nexfort_engine.kernels import gluon_convolution
from nexfort_engine.kernels.convolution import WIDTHS
from nexfort_engine.kernels.gluon_convolution import convolve_in_groups as kernel

SHARED = 232448  # bytes of shared memory that a block may have on such a card

for dtype, biased in (("fp16", True), ("bf16", False)):
    for every, (n, rest, stages) in WIDTHS.items():
        assert n + rest == every and (rest == 0 or n % rest == 0)
        constants = {"BIASED": biased, "CHANNELS": 64, "COLUMNS": 2 * every, "N": n, "R": rest, "STAGES": stages}
        constants |= {"PROGRAMS": 132, "scratch": None}
        kinds = {**dict.fromkeys(("images", "height", "width"), "i32"), **dict.fromkeys(constants, "constexpr")}
        signature = {name: kinds.get(name, f"*{dtype}") for name in kernel.arg_names}
        aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
        source = GluonASTSource(kernel, signature, constants, aligned)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 1})
        assert made.asm["cubin"] and made.metadata.shared <= SHARED, (every, made.metadata.shared)
        assert made.metadata.global_scratch_size == gluon_convolution.SCRATCH
        assert all(f"wgmma.mma_async.sync.aligned.m64n{width}k16" in made.asm["ptx"] for width in (n, rest) if width)
        assert "cp.async.bulk.tensor.4d" in made.asm["ptx"], "the card copies parts of images"
        assert "local" not in made.asm["ptx"].partition(".visible .entry")[2].partition("{")[2], "registers hold all"
