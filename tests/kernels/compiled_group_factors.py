# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels for every card, which takes none."""

from __future__ import annotations

from collections.abc import Iterator

from ahead import Case, cards, combined, run

from nexfort_engine.kernels.group_norm_scale import op as group_norm_scale
from nexfort_engine.kernels.group_norm_scale import triton_kernel as kernels

DTYPES = ("fp16", "bf16", "fp32")
LAYOUTS = ((group_norm_scale._INNER, {"stride_c": 1}), (group_norm_scale._OUTER, {"stride_p": 1}))
_SIZES = dict.fromkeys(("channels", "places", "chunk"), "i32")
_STRIDES = {"stride_n": "i64", "stride_c": "i64", "stride_p": "i32"}


def cases(every: bool) -> Iterator[Case]:
    for card in cards(every):
        for dtype, (block, stride) in combined(every, DTYPES, LAYOUTS):
            kinds = {"x": f"*{dtype}", "moments": "*fp32", **_SIZES, **_STRIDES}
            constants = {"CHUNKS": 8, **block, **stride}
            yield Case(kernels.moments_of_chunks, card, kinds, constants, even=(), options={"num_warps": 4})
        for dtype in DTYPES:
            kinds = {"moments": "*fp32", "factors": "*fp32", **_SIZES}
            constants = {"EPS": 1e-5, "GROUPS": 32, "EACH": 40, "CHUNKS": 8, **group_norm_scale._blocks(40, 8)}
            yield Case(
                *(kernels.factors_of_groups, card, kinds, constants),
                rest=f"*{dtype}",
                even=(),
                options={"num_warps": 4},
            )


if __name__ == "__main__":
    run(cases)
