# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels for every card that has products in fp8, which takes none."""

from __future__ import annotations

import triton
from cards import cards
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from nexfort_engine.kernels.low_precision_attention import gluon_kernel
from nexfort_engine.kernels.low_precision_attention import triton_kernel as kernels
from nexfort_engine.kernels.low_precision_attention.op import KEYS, QUERIES, QUERIES_IN_GROUPS, WIDTHS

ARCHITECTURES = cards(89)
_NARROW = {"k8": "*i8", "v8": "*fp8e4nv", "k_scale": "*fp32", "v_scale": "*fp32"}
_SIZES = dict.fromkeys(("queries", "keys", "blocks", "heads"), "i32")
_STRIDES = dict.fromkeys(("kb", "kh", "kn", "vb", "vh", "vn", "qb", "qh", "ql", "ob", "oh", "ol"), "i64")


def compiled(kernel: triton.JITFunction, constants: dict[str, object], dtype: str, architecture: int) -> None:
    types = {**dict.fromkeys(("q", "k", "v", "out"), f"*{dtype}"), **_NARROW, **_SIZES, **_STRIDES}
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    grouped = kernel is gluon_kernel.attend_in_groups
    aligned = {
        (at,): [["tt.divisibility", 16]] for at, name in enumerate(kernel.arg_names) if signature[name][0] == "*"
    }
    source = (GluonASTSource if grouped else ASTSource)(kernel, signature, constants, aligned)
    options = {"num_warps": 4, "num_stages": 1 if grouped else 3}
    made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    assert made.asm["cubin"] and f".target sm_{architecture}" in made.asm["ptx"]
    if kernel is not kernels.narrow_keys_values and architecture == 90:  # both products are the card's own
        assert "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8" in made.asm["ptx"]
        assert f"wgmma.mma_async.sync.aligned.m64n{constants['W']}k32.f32.e4m3.e4m3" in made.asm["ptx"]


for architecture in ARCHITECTURES:
    for dtype, (width, e) in zip(("fp16", "bf16"), zip(WIDTHS, (64, 72), strict=True), strict=True):
        sizes = {"E": e, "W": width, "N": KEYS}
        compiled(kernels.narrow_keys_values, {**sizes, "SAMPLE": 64}, dtype, architecture)
        compiled(kernels.attend, {**sizes, "SCALE": 0.125, "M": QUERIES}, dtype, architecture)
        if architecture == 90:
            constants = {**sizes, "SCALE": 0.125, "M": QUERIES_IN_GROUPS}
            compiled(gluon_kernel.attend_in_groups, constants, dtype, architecture)
