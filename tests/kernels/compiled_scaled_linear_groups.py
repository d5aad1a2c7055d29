# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernel in Gluon for the card that it is for, as an artefact does, which takes none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ahead import SHARED_OF_90, Case, run

from nexfort_engine.kernels.scaled_linear import choice, gluon_kernel
from nexfort_engine.kernels.scaled_linear.gluon_kernel import multiply_in_groups as kernel

FORMS = (
    ("i8", "fp16", True, (3, True), 10240, 3840),
    ("i8", "bf16", False, (0, False), 3840, 10240),
    ("i8", "bf16", False, (1, True), 200, 144),
    ("fp8e4nv", "bf16", False, (2, True), 3072, 3072),
)


def check(made: Any, factor: str, told: tuple[Any, ...]) -> None:
    text = made.asm["ptx"]
    assert made.metadata.shared <= SHARED_OF_90, (*told, made.metadata.shared)
    assert made.metadata.global_scratch_size in (256, gluon_kernel.SCRATCH), told
    product = "m64n128k32.s32.s8.s8" if factor == "i8" else "m64n256k32.f32.e4m3.e4m3"
    assert f"wgmma.mma_async.sync.aligned.{product}" in text, told
    assert "cp.async.bulk.tensor.2d" in text, "the card copies"
    assert "local" not in text.partition(".visible .entry")[2].partition("{")[2], "registers hold all"


def cases(every: bool) -> Iterator[Case]:
    for told in FORMS if every else FORMS[:1]:
        factor, dtype, up, (activation, more), columns, inner = told
        constants = {"COLUMNS": columns, "INNER": inner, "ROW_SCALES": True, "COLUMN_SCALES": factor == "i8"}
        constants |= {"ACTIVATION": activation, "UP": up, **choice.GROUPED.blocks(), "PROGRAMS": 132}
        constants |= dict.fromkeys(("BIASED", "UP_BIASED", "GATED", "ADDED"), more)
        kinds = dict.fromkeys(("rows", "tokens", "gate_batch", "gate_token"), "i32")
        kinds |= dict.fromkeys(("x", "weight", "up"), f"*{factor}")
        yield Case(
            kernel,
            90,
            kinds | dict.fromkeys(("x_scale", "weight_scale", "up_scale"), "*fp32"),
            {**constants, "scratch": None},
            rest=f"*{dtype}",
            options={"num_warps": 4, "num_stages": 1},
            check=lambda made, factor=factor, told=told: check(made, factor, told),
        )


if __name__ == "__main__":
    run(cases)
