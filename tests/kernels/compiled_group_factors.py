# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels for every card, which takes none."""

from __future__ import annotations

import triton
from cards import cards, combined
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nexfort_engine.kernels.group_norm_scale import op as group_norm_scale
from nexfort_engine.kernels.group_norm_scale import triton_kernel as kernels

ARCHITECTURES = cards()
DTYPES = ("fp16", "bf16", "fp32")
LAYOUTS = ((group_norm_scale._INNER, {"stride_c": 1}), (group_norm_scale._OUTER, {"stride_p": 1}))
_SIZES = dict.fromkeys(("channels", "places", "chunk"), "i32")
_STRIDES = {"stride_n": "i64", "stride_c": "i64", "stride_p": "i32"}


def compiled(
    kernel: triton.JITFunction, types: dict[str, str], constants: dict[str, object], architecture: int
) -> None:
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constants)
    made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": 4})
    assert made.asm["cubin"] and f".target sm_{architecture}" in made.asm["ptx"]


for architecture in ARCHITECTURES:
    for dtype, (block, stride) in combined(DTYPES, LAYOUTS):
        types = {"x": f"*{dtype}", "moments": "*fp32", **_SIZES, **_STRIDES}
        compiled(
            kernels.moments_of_chunks,
            {name: kind for name, kind in types.items() if name not in stride},
            {"CHUNKS": 8, **block, **stride},
            architecture,
        )
    for dtype in DTYPES:
        blocks = group_norm_scale._blocks(40, 8)
        given = dict.fromkeys(("weight", "bias", "offset", "offsets"), f"*{dtype}")
        types = {"moments": "*fp32", **given, "factors": "*fp32", **_SIZES}
        compiled(
            kernels.factors_of_groups,
            types,
            {"EPS": 1e-5, "GROUPS": 32, "EACH": 40, "CHUNKS": 8, **blocks},
            architecture,
        )
