# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernel in Gluon for the card that it is for, as an artefact does, which takes none."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ahead import SHARED_OF_90, Case, run

from nexfort_engine.kernels.odd_head_dim_attention import gluon_kernel
from nexfort_engine.kernels.odd_head_dim_attention.gluon_kernel import attend_unpadded_in_groups as kernel
from nexfort_engine.kernels.odd_head_dim_attention.op import WIDTHS

SIZES = ("batch", "heads", "queries", "keys")
TENSORS = ("q", "k", "v", "out")
KINDS = (("fp16", "i64"), ("bf16", "i32"))


def check(made: Any, dtype: str) -> None:
    text = made.asm["ptx"]
    assert made.metadata.shared <= SHARED_OF_90
    assert made.metadata.global_scratch_size == gluon_kernel.SCRATCH
    assert "cp.async.bulk.tensor.4d" in text, "the card copies"
    for columns in (128, 64, 16):  # scores, and both pieces of a result
        assert f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{dtype.replace('p', '')}" in text
    # without it strides are multiples of nothing, and each number is read and written by itself
    moved = re.findall(r"(?:ld|st)\.global\S*", text)
    assert moved and all(".v4" in one for one in moved), moved


def cases(every: bool) -> Iterator[Case]:
    for width in WIDTHS if every else WIDTHS[1:]:  # lowered blocks of the tests have the other
        for dtype, stride in KINDS if every else KINDS[1:]:
            yield Case(
                kernel,
                90,
                {**dict.fromkeys(TENSORS, f"*{dtype}"), **dict.fromkeys(SIZES, "i32")},
                {"SCALE": 0.1, "E": width, "PROGRAMS": 132, "scratch": None},
                rest=stride,
                options={"num_warps": 4, "num_stages": 1},
                check=lambda made, dtype=dtype: check(made, dtype),
            )


if __name__ == "__main__":
    run(cases)
