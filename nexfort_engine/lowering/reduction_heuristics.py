# SPDX-License-Identifier: Apache-2.0
"""Choices: how Inductor shapes a kernel, where its rule of thumb leaves time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..system.process_settings import replaced

LONGEST_ROW = 16384
_SHORTEST_ROW = 1025  # of those whose warps are chosen here; for shorter ones Inductor's rule does the same
_PER_WARP = 2048  # numbers of a row, 64 for each thread: the fewer warps, the fewer have to wait for each other
_PER_WARP_OF_TWO = 1280  # of each tensor, where there are several
_SIDE_BY_SIDE = {"XBLOCK": 32, "R0_BLOCK": 16, "num_warps": 2, "num_stages": 1}
_FEWEST = 64  # numbers of a sum that is looked at; of fewer Inductor keeps all in registers
_MANY_ROWS, _NARROW = 2048, 64
_ROWS_BY_WARPS = {"XBLOCK": 4, "R0_BLOCK": 128, "num_warps": 1, "num_stages": 1}  # rows of a picture
_TILE = {"YBLOCK": 64, "XBLOCK": 32, "num_warps": 4, "num_stages": 1}
_NARROW_ROWS = {"XBLOCK": 64, "R0_BLOCK": 32, "num_warps": 4, "num_stages": 1}


@contextmanager
def whole_rows(*, measured: bool = False) -> Iterator[None]:
    """Inside the block sums over rows and over columns have a shape of their own.

    A sum over one row of at most LONGEST_ROW numbers keeps the row in registers. Inductor does so up to 1024 and reads
    longer rows twice, and what is computed of them is computed twice. It also gives a row eight warps that wait for
    each other. Microseconds so and otherwise (bfloat16, H200, torch 2.11, 2026-11): a layer norm with modulation of
    8192 rows of 1152: 10.3 and 19.3; 4608 rows of 3072: 18.9 and 22.7; such a norm brought to fp8: 13.0 and 24.4; GELU
    of 4608 rows of 15360 brought to fp8: 80 and 254.

    Where a kernel also reads one number for each row of the batch, or the partners of pairs, Inductor does so for none,
    though a row's numbers are read side by side all the same: a layer norm of a sum with modulation took 61 instead of
    116 to 160 microseconds (2 x 14040 rows of 1536), and 68 with one warp: a kernel that reads two long tensors has
    twice as many, where a warp would have more than 1280 numbers of each (8192 rows of 1152: 18.5 and 21.1). Not so
    where the result is brought to fp8, for which all wait once more (4096 rows of 3072: 26.6 with two warps and 31.1
    with four). A table of numbers for each row of the batch is no such tensor: a norm with modulation that is brought
    to fp8 takes 20.1 with one warp and 33.4 with two (8192 rows of 1152), 51.9 and 73.3 (2 x 14040 rows of 1536).
    Norms of 24 x 4096 heads with rotary embeddings took 60 and 89 (as above).

    Sums whose numbers lie side by side with their neighbours', as columns of a matrix do, are made many at once. Where
    there are many of them Inductor shapes them as sums over rows: 2 x 96 x 320 sums of 96 numbers took 9.1 microseconds
    so and 24.1 by its rule (fp16, H200, torch 2.11, 2026-11).

    Many rows of any length, as those of pictures, are summed by single warps, which wait for no other, or 64 together
    where they are narrow; Inductor gives two rows two warps. A group norm's sums of 2 x 320 x 96 rows of 96 took 11.5
    microseconds so and 20.7 by its rule, of 2 x 1280 x 24 rows of 24 10.0 and 20.0 (as above).

    measured: all of these are left to Inductor, which tries several shapes. So it is on cards of AMD, whose warps are
    wider.
    """
    import torch
    from torch._inductor import choices
    from torch._inductor.codegen.triton import FixedTritonConfig, TritonKernel
    from torch._inductor.dependencies import MemoryDep
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V
    from torch.utils._sympy.functions import FloorDiv, ModularIndexing

    def joins(features: Any) -> bool:
        """Whether a kernel reads more than one tensor of all its rows, each number by itself; see above."""
        whole = features.numel * features.reduction_numel
        nodes = features.scheduler_nodes()
        made = {dep.name for node in nodes for dep in node.read_writes.writes}
        reads = {dep for node in nodes for dep in node.read_writes.reads if isinstance(dep, MemoryDep)}
        equal = V.graph.sizevars.statically_known_equals
        all_rows = [dep for dep in reads if dep.name not in made and equal(dep.get_numel(), whole)]
        own = {dep.name for dep in all_rows if not dep.index.has(FloorDiv)}
        kinds = {getattr(getattr(node.node, "data", None), "reduction_type", None) for node in nodes}
        return len(own) > 1 and "max" not in kinds and not any(dep.index.has(ModularIndexing) for dep in all_rows)

    def length_of(features: Any, scores: dict[str, Any] | None = None) -> int | None:
        """Numbers of the row that a kernel sums over; None where it is no such kernel."""
        length = features.reduction_numel
        known = getattr(length, "is_number", False) and features.get_reduction_hint(scores) == ReductionHint.INNER
        return int(length) if known and int(length) <= LONGEST_ROW else None

    def are_side_by_side(features: Any, scores: dict[str, Any] | None) -> bool:
        """Whether many long sums are read across. scores: bytes that lie side by side along each dimension."""
        length = features.reduction_numel
        short = getattr(length, "is_number", False) and int(length) <= _FEWEST
        across = scores is not None and bool(scores.get("r0_", 0) == 0) and bool(scores.get("x", 0) != 0)
        return across and not short and features.get_reduction_hint() == ReductionHint.DEFAULT

    def rows_of_pictures(features: Any) -> dict[str, int] | None:
        """The shape for many rows of any length, known by the sizes it is lowered with; None for other sums."""
        length = features.reduction_numel
        if getattr(length, "is_number", False) or features.get_reduction_hint() != ReductionHint.INNER:
            return None
        rows, width = (V.graph.sizevars.optimization_hint(n, fallback=0) for n in (features.numel, length))
        if rows < _MANY_ROWS or not 0 < width <= _MANY_ROWS:
            return None
        return _NARROW_ROWS if width <= _NARROW else _ROWS_BY_WARPS

    def transposes(features: Any, sizes: dict[str, Any]) -> bool:
        """Whether a kernel reads along one dimension and writes along another, both long: it lays out an image."""
        if features.is_reduction() or not {"x", "y"} <= set(sizes) <= {"x", "y", "r0_"}:
            return False
        return all(V.graph.sizevars.optimization_hint(sizes[name], fallback=0) >= _NARROW for name in ("x", "y"))

    class WholeRows(choices.InductorChoices):
        @staticmethod
        def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
            if length_of(features) is not None:
                return True
            return choices.InductorChoices.should_use_persistent_reduction(features, cooperative_reduction)

        def triton_kernel_kwargs(self, kernel_cls: Any, features: Any, groups: list[Any], kernel_kwargs: Any) -> Any:
            theirs = measured or torch.version.hip is not None or kernel_kwargs.get("mix_order_reduction")
            if not theirs and transposes(features, groups[0]):
                return {**kernel_kwargs, "fixed_config": FixedTritonConfig(_TILE)}
            if theirs or set(groups[0]) != {"x", "r0_"} or any(map(features.contains_op, ("scan", "sort"))):
                return kernel_kwargs
            length = length_of(features, kernel_kwargs.get("tiling_scores")) or 0
            if length >= _SHORTEST_ROW:
                warps = max(1, (1 << (length - 1).bit_length()) // _PER_WARP)
                warps *= 2 if length > warps * _PER_WARP_OF_TWO and joins(features) else 1
                shape = {"XBLOCK": 1, "num_warps": warps, "num_stages": 1}
                kernel_kwargs = {**kernel_kwargs, "override_persistent_reduction": True}
            elif self.should_use_persistent_reduction(features, False):
                return kernel_kwargs  # such a kernel has no block of the sum to give a size to
            elif length > _FEWEST:
                shape = {"XBLOCK": max(1, 1024 // (1 << (length - 1).bit_length())), "num_warps": 1, "num_stages": 1}
                kernel_kwargs = {**kernel_kwargs, "override_persistent_reduction": True}
            elif are_side_by_side(features, kernel_kwargs.get("tiling_scores")):
                shape = _SIDE_BY_SIDE
            elif (found := rows_of_pictures(features)) is not None:
                shape = found
            else:
                return kernel_kwargs
            return {**kernel_kwargs, "fixed_config": FixedTritonConfig(shape)}

    # for one row at a time Inductor would leave a dimension out, and fail where a kernel computes with indices
    with V.set_choices_handler(WholeRows()), replaced(TritonKernel, "want_no_x_dim", lambda _: False):
        yield
