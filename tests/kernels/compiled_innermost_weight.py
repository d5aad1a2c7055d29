# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernel for every card, which takes none."""

from __future__ import annotations

from collections.abc import Iterator

from ahead import Case, amd, cards, run

from nexfort_engine.kernels.channels_last_weight import op as channels_last_weight
from nexfort_engine.kernels.channels_last_weight.triton_kernel import lay_innermost


def cases(every: bool) -> Iterator[Case]:
    for card in (*cards(every), *amd(every)):
        for dtype, places in (("fp16", 9), ("bf16", 3), ("fp32", 49)):
            kinds = {"weight": f"*{dtype}", "laid": f"*{dtype}", "channels": "i32"}
            sizes = channels_last_weight.blocks(places)
            yield Case(lay_innermost, card, kinds, sizes, even=(), options={"num_warps": 4})


if __name__ == "__main__":
    run(cases)
