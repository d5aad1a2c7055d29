# SPDX-License-Identifier: Apache-2.0
"""Choices: how Inductor shapes a kernel, where its rule of thumb leaves time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .flags import replaced

LONGEST_ROW = 16384
_SHORTEST_ROW = 1025  # of those whose warps are chosen here; for shorter ones Inductor's rule does the same
_PER_WARP = 2048  # numbers of a row, 64 for each thread: the fewer warps, the fewer have to wait for each other


@contextmanager
def whole_rows(*, measured: bool = False) -> Iterator[None]:
    """Inside the block a sum over one row of at most LONGEST_ROW numbers keeps the row in registers.

    Inductor does so up to 1024 and reads longer rows twice, and what is computed of them is computed twice. It also
    gives a row eight warps that wait for each other. Microseconds so and otherwise (bfloat16, H200, torch 2.11,
    2026-11): a layer norm with modulation of 8192 rows of 1152: 10.3 and 19.3; 4608 rows of 3072: 18.9 and 22.7; such a
    norm brought to fp8: 13.0 and 24.4; GELU of 4608 rows of 15360 brought to fp8: 80 and 254.
    measured: the number of warps is left to Inductor, which tries several. So it is on cards of AMD, whose warps are
    wider.
    """
    import torch
    from torch._inductor import choices
    from torch._inductor.codegen.triton import FixedTritonConfig, TritonKernel
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    def length_of(features: Any) -> int | None:
        """Numbers of the row that a kernel sums over; None where it is no such kernel."""
        length = features.reduction_numel
        known = getattr(length, "is_number", False) and features.get_reduction_hint() == ReductionHint.INNER
        return int(length) if known and int(length) <= LONGEST_ROW else None

    class WholeRows(choices.InductorChoices):
        @staticmethod
        def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
            if length_of(features) is not None:
                return True
            return choices.InductorChoices.should_use_persistent_reduction(features, cooperative_reduction)

        def triton_kernel_kwargs(self, kernel_cls: Any, features: Any, groups: list[Any], kernel_kwargs: Any) -> Any:
            length = (length_of(features) if features.is_reduction() else None) or 0
            theirs = measured or torch.version.hip is not None
            own = theirs or length < _SHORTEST_ROW or kernel_kwargs.get("mix_order_reduction")
            if own or set(groups[0]) != {"x", "r0_"} or any(map(features.contains_op, ("scan", "sort"))):
                return kernel_kwargs
            warps = max(1, (1 << (length - 1).bit_length()) // _PER_WARP)
            fixed = FixedTritonConfig({"XBLOCK": 1, "num_warps": warps, "num_stages": 1})
            return {**kernel_kwargs, "fixed_config": fixed}

    # for one row at a time Inductor would leave a dimension out, and fail where a kernel computes with indices
    with V.set_choices_handler(WholeRows()), replaced(TritonKernel, "want_no_x_dim", lambda _: False):
        yield
