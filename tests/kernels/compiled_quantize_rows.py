# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernel for every card, which takes none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ahead import SHARED, Case, cards, combined, run

from nexfort_engine.kernels.quantize_rows import op
from nexfort_engine.kernels.quantize_rows.triton_kernel import quantize

# kind, group, numbers of a row, and whether it is modulated
ROWS = (("layer_norm", 256, 3072, True), ("swiglu", 256, 10240, False), ("rms_norm", 64, 3840, True), ("", 16, 48, 0))


def check(made: Any, card: int, inner: int) -> None:
    assert made.metadata.shared <= SHARED, (card, inner, made.metadata.shared)
    assert "st.local" not in made.asm["ptx"], "registers hold a row"


def cases(every: bool) -> Iterator[Case]:
    for (kind, group, inner, modulated), dtype in combined(every, ROWS, ("fp16", "bf16")):
        for card in cards(every):
            block, rest = op.blocks_of(inner)
            constants = {"KIND": op.KINDS[kind], "GROUP": group, "INNER": inner, "BLOCK": block, "REST": rest}
            constants |= {"WEIGHTED": kind == "rms_norm", "BIASED": False, "PLUS_ONE": bool(modulated), "EPS": 1e-6}
            constants |= dict.fromkeys(("FACTOR", "SHIFTED"), bool(modulated))
            kinds = {"out": "*i8", "scales": "*fp32", "tokens": "i32"}
            kinds |= {name: "i32" for name in quantize.arg_names if name.endswith(("_batch", "_token"))}
            yield Case(
                *(quantize, card, kinds, constants),
                rest=f"*{dtype}",
                even=quantize.arg_names,
                options={"num_warps": op.warps(block), "num_stages": 1},
                check=lambda made, card=card, inner=inner: check(made, card, inner),
            )


if __name__ == "__main__":
    run(cases)
