# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels for every card that has products in fp8, which takes none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ahead import Case, cards, run

from nexfort_engine.kernels.low_precision_attention import triton_kernel as kernels
from nexfort_engine.kernels.low_precision_attention.gluon_kernel import attend_in_groups
from nexfort_engine.kernels.low_precision_attention.op import KEYS, QUERIES, QUERIES_IN_GROUPS, WIDTHS

_KINDS = {"k8": "*i8", "v8": "*fp8e4nv", "k_scale": "*fp32", "v_scale": "*fp32"}
_KINDS |= dict.fromkeys(("queries", "keys", "blocks", "heads"), "i32")
_KINDS |= dict.fromkeys(("kb", "kh", "kn", "vb", "vh", "vn", "qb", "qh", "ql", "ob", "oh", "ol"), "i64")


def check(made: Any, card: int, width: int) -> None:
    if card == 90:  # both products are the card's own
        assert "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8" in made.asm["ptx"]
        assert f"wgmma.mma_async.sync.aligned.m64n{width}k32.f32.e4m3.e4m3" in made.asm["ptx"]


def cases(every: bool) -> Iterator[Case]:
    def case(kernel: Any, card: int, dtype: str, stages: int, attends: bool = True, **constants: Any) -> Case:
        return Case(
            *(kernel, card, _KINDS, constants),
            rest=f"*{dtype}",
            options={"num_warps": 4, "num_stages": stages},
            check=(lambda made: check(made, card, constants["W"])) if attends else None,
        )

    for card in cards(every, since=89):
        for dtype, width, e in zip(("fp16", "bf16"), WIDTHS, (64, 72), strict=True):
            sizes = {"E": e, "W": width, "N": KEYS}
            narrow = width == WIDTHS[0]  # of few, each kernel is for heads of one width
            if every or narrow:
                yield case(kernels.narrow_keys_values, card, dtype, 3, attends=False, **sizes, SAMPLE=64)
            if every or not narrow:
                yield case(kernels.attend, card, dtype, 3, **sizes, SCALE=0.125, M=QUERIES)
            if card == 90 and (every or narrow):
                yield case(attend_in_groups, card, dtype, 1, **sizes, SCALE=0.125, M=QUERIES_IN_GROUPS)


if __name__ == "__main__":
    run(cases)
