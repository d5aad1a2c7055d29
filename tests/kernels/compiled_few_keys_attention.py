# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernel for every card, which takes none."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ahead import SHARED, Case, cards, run

from nexfort_engine.kernels.short_kv_attention.op import KEYS, QUERIES, WIDTH
from nexfort_engine.kernels.short_kv_attention.triton_kernel import attend_few

TENSORS = ("q", "k", "v", "out")
STRIDES = ("qb", "qh", "ql", "kb", "kh", "kn", "vb", "vh", "vn", "ob", "oh", "ol")


def check(made: Any, card: int, dtype: str) -> None:
    text = made.asm["ptx"]
    assert made.metadata.shared <= SHARED, (card, made.metadata.shared)
    # the next keys and values are copied meanwhile, 16 bytes at a time
    copies = [line for line in text.splitlines() if re.search(r"cp\.async\.c[ag]\.", line)]
    assert copies and all("0x10" in line for line in copies), (card, copies)
    if card == 90:  # both products are the card's own
        kind = dtype.replace("fp", "f")
        assert f"wgmma.mma_async.sync.aligned.m64n{KEYS}k16.f32.{kind}.{kind}" in text
        assert f"wgmma.mma_async.sync.aligned.m64n{WIDTH}k16.f32.{kind}.{kind}" in text


def cases(every: bool) -> Iterator[Case]:
    for card in cards(every):
        for dtype, stride in (("fp16", "i64"), ("bf16", "i32")):
            yield Case(
                attend_few,
                card,
                {**dict.fromkeys(STRIDES, stride), **dict.fromkeys(("queries", "keys", "heads"), "i32")},
                {"SCALE": 0.125, "E": WIDTH, "M": QUERIES, "N": KEYS},
                rest=f"*{dtype}",
                even=TENSORS + STRIDES,  # numbers of a head lie side by side, and those of all heads of a token
                check=lambda made, card=card, dtype=dtype: check(made, card, dtype),
            )


if __name__ == "__main__":
    run(cases)
