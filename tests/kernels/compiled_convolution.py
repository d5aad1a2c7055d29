# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernel in Gluon for the card that it is for, as an artefact does, which takes none; sums for all."""

from __future__ import annotations

import itertools
import subprocess
import tempfile
from pathlib import Path

import triton
from cards import cards, combined
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from nexfort_engine.kernels.conv3x3 import gluon_kernel
from nexfort_engine.kernels.conv3x3.gluon_kernel import convolve_in_groups as kernel
from nexfort_engine.kernels.conv3x3.op import WIDTHS
from nexfort_engine.kernels.conv3x3.triton_kernel import sum_places

SHARED = 232448  # bytes of shared memory that a block may have on such a card
SIZES = ("images", "height", "width", "channels", "columns")
CARDS = cards()

folder = Path(tempfile.mkdtemp())
for (dtype, biased, side), (every, (n, rest, stages)) in combined(
    (("fp16", True, 2), ("bf16", False, 3)), WIDTHS.items()
):
    assert n + rest == every and (rest == 0 or n % rest == 0)
    constants = {"BIASED": biased, "SIDE": side, "N": n, "R": rest, "STAGES": stages, "PROGRAMS": 132, "scratch": None}
    kinds = {**dict.fromkeys(SIZES, "i32"), **dict.fromkeys(constants, "constexpr")}
    signature = {name: kinds.get(name, f"*{dtype}") for name in kernel.arg_names}
    even = [kind.startswith("*") or name in ("channels", "columns") for name, kind in signature.items()]
    aligned = {(i,): [["tt.divisibility", 16]] for i, is_even in enumerate(even) if is_even}
    source = GluonASTSource(kernel, signature, constants, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 1})
    assert made.asm["cubin"] and made.metadata.shared <= SHARED, (every, made.metadata.shared)
    assert made.metadata.global_scratch_size == gluon_kernel.SCRATCH
    assert all(f"wgmma.mma_async.sync.aligned.m64n{width}k16" in made.asm["ptx"] for width in (n, rest) if width)
    assert "cp.async.bulk.tensor.4d" in made.asm["ptx"], "the card copies parts of images"
    assert "st.global.v4" in made.asm["ptx"] and "st.global.b16" not in made.asm["ptx"], "eight channels at once"
    (text := folder / "kernel.ptx").write_text(made.asm["ptx"])
    command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(text), "-o", str(folder / "kernel.o")]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    assert " 0 bytes spill stores" in told and "spill" in told, f"registers hold all: {told}"

for card, dtype in itertools.product(CARDS, ("fp16", "bf16")):
    signature = {"weight": f"*{dtype}", "sums": f"*{dtype}", "rows": "i32", "channels": "i32", "BLOCK": "constexpr"}
    made = triton.compile(ASTSource(sum_places, signature, {"BLOCK": 128}), target=GPUTarget("cuda", card, 32))
    assert made.asm["cubin"]
