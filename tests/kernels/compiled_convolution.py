# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernel in Gluon for the card that it is for, as an artefact does, which takes none; sums for all."""

from __future__ import annotations

import itertools
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ahead import SHARED_OF_90, Case, cards, combined, run
from triton.backends.nvidia.compiler import get_ptxas

from nexfort_engine.kernels.conv3x3 import gluon_kernel
from nexfort_engine.kernels.conv3x3.gluon_kernel import convolve_in_groups as kernel
from nexfort_engine.kernels.conv3x3.op import WIDTHS
from nexfort_engine.kernels.conv3x3.triton_kernel import sum_places

SIZES = ("images", "height", "width", "channels", "columns")


def check(made: Any, n: int, rest: int) -> None:
    text = made.asm["ptx"]
    assert made.metadata.shared <= SHARED_OF_90, (n, rest, made.metadata.shared)
    assert made.metadata.global_scratch_size == gluon_kernel.SCRATCH
    assert all(f"wgmma.mma_async.sync.aligned.m64n{width}k16" in text for width in (n, rest) if width)
    assert "cp.async.bulk.tensor.4d" in text, "the card copies parts of images"
    assert "st.global.v4" in text and "st.global.b16" not in text, "eight channels at once"
    with tempfile.TemporaryDirectory() as folder:
        (written := Path(folder, "kernel.ptx")).write_text(text)
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(written), "-o", f"{folder}/kernel.o"]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    assert " 0 bytes spill stores" in told and "spill" in told, f"registers hold all: {told}"


def cases(every: bool) -> Iterator[Case]:
    # of few, one form with a rest and one without
    for (dtype, biased, side), (width, (n, rest, stages)) in combined(
        every, (("fp16", True, 2), ("bf16", False, 3)), [*WIDTHS.items()][: None if every else 2]
    ):
        assert n + rest == width and (rest == 0 or n % rest == 0)
        constants = {"BIASED": biased, "SIDE": side, "N": n, "R": rest, "STAGES": stages, "PROGRAMS": 132}
        yield Case(
            kernel,
            90,
            dict.fromkeys(SIZES, "i32"),
            {**constants, "scratch": None},
            rest=f"*{dtype}",
            even=("x", "weight", "bias", "unread", "out", "channels", "columns"),
            options={"num_warps": 4, "num_stages": 1},
            check=lambda made, n=n, rest=rest: check(made, n, rest),
        )
    for card, dtype in itertools.product(cards(every), ("fp16", "bf16")):
        kinds = {"weight": f"*{dtype}", "sums": f"*{dtype}", "rows": "i32", "channels": "i32"}
        yield Case(sum_places, card, kinds, {"BLOCK": 128}, even=())


if __name__ == "__main__":
    run(cases)
