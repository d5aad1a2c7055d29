# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernel in Gluon for the card that it is for, as an artefact does, which takes none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ahead import SHARED_OF_90, Case, run

from nexfort_engine.kernels.geglu_linear import gluon_kernel
from nexfort_engine.kernels.geglu_linear.gluon_kernel import multiply_gated_in_groups as kernel

FORMS = (
    ("fp16", "fp16", True, 5120, 1280),
    ("fp8e4nv", "bf16", False, 1280, 320),
    ("bf16", "bf16", False, 128, 64),
    ("fp8e4nv", "fp16", True, 5120, 1280),
)


def check(made: Any, narrow: bool) -> None:
    text = made.asm["ptx"]
    assert made.metadata.shared <= SHARED_OF_90
    assert made.metadata.global_scratch_size == gluon_kernel.SCRATCH
    product = "m64n256k32.f32.e4m3.e4m3" if narrow else "m64n256k16.f32"
    assert f"wgmma.mma_async.sync.aligned.{product}" in text
    assert "cp.async.bulk.tensor.2d" in text, "the card copies"
    assert "local" not in text.partition(".visible .entry")[2].partition("{")[2], "registers hold all"


def cases(every: bool) -> Iterator[Case]:
    for given, dtype, biased, columns, inner in FORMS if every else FORMS[:2]:
        narrow = given != dtype
        constants = {"COLUMNS": columns, "INNER": inner, "PROGRAMS": 132, "BIASED": biased, "SCALED": narrow}
        kinds = {"rows": "i32", **dict.fromkeys(("x", "weight"), f"*{given}")}
        yield Case(
            kernel,
            90,
            kinds | dict.fromkeys(("x_scale", "weight_scale"), "*fp32" if narrow else f"*{given}"),
            {**constants, "scratch": None},
            rest=f"*{dtype}",
            options={"num_warps": 4, "num_stages": 1},
            check=lambda made, narrow=narrow: check(made, narrow),
        )


if __name__ == "__main__":
    run(cases)
