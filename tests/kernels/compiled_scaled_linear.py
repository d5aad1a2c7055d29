# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernel in every form for every card that multiplies such factors, which takes none."""

from __future__ import annotations

import sys

import triton
from cards import cards
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nexfort_engine.kernels.scaled_linear import choice
from nexfort_engine.kernels.scaled_linear.triton_kernel import multiply

SHARED = 101376  # bytes of shared memory that a block may have on the cards that have the least
LARGER = {80: 166912, 90: 232448, 100: 232448}
PRODUCTS = {("i8", 80): "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32"}
PRODUCTS |= {("i8", 90): "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8"}
PRODUCTS |= {("fp8e4nv", 90): "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3"}


def check(factor: str, dtype: str, architecture: int, form: choice.Form, up: bool, plain: bool) -> None:
    constants = {"COLUMNS": 3840, "INNER": 10240 if plain else 3872, "ROW_SCALES": True, "COLUMN_SCALES": not plain}
    constants |= {"ACTIVATION": 0 if plain else 3, "UP": up, **form.blocks(), "PROGRAMS": 0}
    constants |= dict.fromkeys(("BIASED", "UP_BIASED", "GATED", "ADDED"), not plain)
    kinds = {"rows": "i32", "tokens": "i32", "gate_batch": "i32", "gate_token": "i32", "out": f"*{dtype}"}
    kinds |= dict.fromkeys(("x", "weight", "up"), f"*{factor}") | dict.fromkeys(constants, "constexpr")
    kinds |= dict.fromkeys(("x_scale", "weight_scale", "up_scale"), "*fp32")
    signature = {name: kinds.get(name, f"*{dtype}") for name in multiply.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = ASTSource(multiply, signature, constants, aligned)
    options = {"num_warps": form.warps, "num_stages": form.stages}
    made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    told = (factor, architecture, form, up, plain, made.metadata.shared)
    assert made.asm["cubin"] and f".target sm_{architecture}" in made.asm["ptx"]
    most = SHARED if form in choice.FORMS + choice.WITH_UP + (choice.FEW_ROWS,) else LARGER[architecture]
    assert made.metadata.shared <= most, told
    assert "st.local" not in made.asm["ptx"], told
    if form == choice.FORMS[0] and plain:
        assert PRODUCTS.get((factor, architecture), "mma") in made.asm["ptx"], told


for card in cards():
    for each in ("i8", "fp8e4nv"):
        if each != "i8" and card < 89:
            continue
        some = choice.forms(divmod(card, 10)) if "all" in sys.argv[1:] else choice.FORMS[:1]
        some = [form for form in some if not form.grouped]
        for number, form in enumerate((*some, choice.FEW_ROWS)):
            check(each, ("fp16", "bf16")[number % 2], card, form, False, number % 2 == 0)
        for number, form in enumerate(choice.WITH_UP if "all" in sys.argv[1:] else choice.WITH_UP[:1]):
            check(each, "bf16", card, form, True, number % 2 == 0)
