# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernel for every card, which takes none."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ahead import SHARED, SHARED_OF_AMD, Case, amd, cards, combined, run

from nexfort_engine.kernels.grouped_gemm import op as grouped_gemm
from nexfort_engine.kernels.grouped_gemm.triton_kernel import multiply_rows


def check(made: Any, card: int | str) -> None:
    if isinstance(card, str):
        assert made.metadata.shared <= SHARED_OF_AMD, (card, made.metadata.shared)
        assert re.search("v_mfma_|v_wmma_", made.asm["amdgcn"]), "the card's own products"
        return
    assert made.metadata.shared <= SHARED, (card, made.metadata.shared)
    # numbers are copied to shared memory 16 bytes at a time: the choice among weights keeps that they lie so
    copies = [line for line in made.asm["ptx"].splitlines() if re.search(r"cp\.async\.c[ag]\.", line)]
    assert copies and all("0x10" in line for line in copies), (card, copies)


def cases(every: bool) -> Iterator[Case]:
    for card in (*cards(every), *amd(every)):
        for dtype, count in combined(every, ("fp16", "bf16"), (2, grouped_gemm.MOST)):
            yield Case(
                multiply_rows,
                card,
                {"rows": "i32"},
                {"COLUMNS": 1280, "INNER": 2048, **grouped_gemm.blocks(count, 1280, 2048), "P": count},
                rest=f"*{dtype}",
                options={"num_warps": 4},
                check=lambda made, card=card: check(made, card),
            )


if __name__ == "__main__":
    run(cases)
