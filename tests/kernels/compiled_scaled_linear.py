# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernel in every form for every card that multiplies such factors, which takes none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ahead import SHARED, SHARED_OF_90, Case, cards, run

from nexfort_engine.kernels.scaled_linear import choice
from nexfort_engine.kernels.scaled_linear.triton_kernel import multiply

LARGER = {80: 166912, 90: SHARED_OF_90, 100: 232448}
PRODUCTS = {("i8", 80): "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32"}
PRODUCTS |= {("i8", 90): "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8"}
PRODUCTS |= {("fp8e4nv", 90): "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3"}


def check(made: Any, factor: str, card: int, form: choice.Form, plain: bool) -> None:
    told = (factor, card, form, plain, made.metadata.shared)
    most = SHARED if form in choice.FORMS + choice.WITH_UP + (choice.FEW_ROWS,) else LARGER[card]
    assert made.metadata.shared <= most, told
    assert "st.local" not in made.asm["ptx"], told
    if form == choice.FORMS[0] and plain:
        assert PRODUCTS.get((factor, card), "mma") in made.asm["ptx"], told


def case(factor: str, dtype: str, card: int, form: choice.Form, up: bool, plain: bool) -> Case:
    constants = {"COLUMNS": 3840, "INNER": 10240 if plain else 3872, "ROW_SCALES": True, "COLUMN_SCALES": not plain}
    constants |= {"ACTIVATION": 0 if plain else 3, "UP": up, **form.blocks(), "PROGRAMS": 0}
    constants |= dict.fromkeys(("BIASED", "UP_BIASED", "GATED", "ADDED"), not plain)
    kinds = {**dict.fromkeys(("rows", "tokens", "gate_batch", "gate_token"), "i32"), "out": f"*{dtype}"}
    kinds |= dict.fromkeys(("x", "weight", "up"), f"*{factor}")
    return Case(
        multiply,
        card,
        kinds | dict.fromkeys(("x_scale", "weight_scale", "up_scale"), "*fp32"),
        constants,
        rest=f"*{dtype}",
        options={"num_warps": form.warps, "num_stages": form.stages},
        check=lambda made: check(made, factor, card, form, plain),
    )


def cases(every: bool) -> Iterator[Case]:
    for card in cards(every):
        for factor in ("i8", "fp8e4nv"):
            if factor != "i8" and card < 89:
                continue
            some = choice.forms(divmod(card, 10)) if every else choice.FORMS[:1]
            some = [form for form in some if not form.grouped]
            for number, form in enumerate((*some, choice.FEW_ROWS)):
                yield case(factor, ("fp16", "bf16")[number % 2], card, form, False, number % 2 == 0)
            for number, form in enumerate(choice.WITH_UP if every else choice.WITH_UP[:1]):
                yield case(factor, "bf16", card, form, True, number % 2 == 0)


if __name__ == "__main__":
    run(cases)
