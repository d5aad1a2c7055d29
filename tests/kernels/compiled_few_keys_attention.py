# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernel for every card, which takes none."""

from __future__ import annotations

import re

import triton
from cards import cards
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nexfort_engine.kernels.short_kv_attention.op import KEYS, QUERIES, WIDTH
from nexfort_engine.kernels.short_kv_attention.triton_kernel import attend_few

ARCHITECTURES = cards()
SHARED = 101376  # bytes of shared memory that a block may have on the cards that have the least
STRIDES = ("qb", "qh", "ql", "kb", "kh", "kn", "vb", "vh", "vn", "ob", "oh", "ol")

for architecture in ARCHITECTURES:
    for dtype, stride in (("fp16", "i64"), ("bf16", "i32")):
        constants = {"SCALE": 0.125, "E": WIDTH, "M": QUERIES, "N": KEYS}
        kinds = {**dict.fromkeys(("q", "k", "v", "out"), f"*{dtype}"), **dict.fromkeys(STRIDES, stride)}
        kinds |= {**dict.fromkeys(("queries", "keys", "heads"), "i32"), **dict.fromkeys(constants, "constexpr")}
        signature = {name: kinds[name] for name in attend_few.arg_names}
        # numbers of a head lie side by side, and those of all heads of a token as a rule
        places = [i for i, name in enumerate(signature) if name in STRIDES or signature[name] == f"*{dtype}"]
        source = ASTSource(attend_few, signature, constants, {(i,): [["tt.divisibility", 16]] for i in places})
        made = triton.compile(source, target=GPUTarget("cuda", architecture, 32))
        text = made.asm["ptx"]
        assert made.asm["cubin"] and f".target sm_{architecture}" in text
        assert made.metadata.shared <= SHARED, (architecture, made.metadata.shared)
        # the next keys and values are copied meanwhile, 16 bytes at a time
        copies = [line for line in text.splitlines() if re.search(r"cp\.async\.c[ag]\.", line)]
        assert copies and all("0x10" in line for line in copies), (architecture, copies)
        if architecture == 90:  # both products are the card's own
            kind = dtype.replace("fp", "f")
            assert f"wgmma.mma_async.sync.aligned.m64n{KEYS}k16.f32.{kind}.{kind}" in text
            assert f"wgmma.mma_async.sync.aligned.m64n{WIDTH}k16.f32.{kind}.{kind}" in text
