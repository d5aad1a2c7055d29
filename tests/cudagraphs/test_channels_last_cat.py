# SPDX-License-Identifier: Apache-2.0
"""Images with channels innermost are concatenated as rows, to the same bits, and nothing else is."""

from __future__ import annotations

from typing import Any

import images_anywhere
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from images_anywhere import INNERMOST
from torch import nn

from nexfort_engine.cudagraphs import channels_last_cat
from nexfort_engine.modules import channels_last

pytestmark = pytest.mark.usefixtures("threads")
_graphs = images_anywhere.graphs  # a fixture


class _Counted(torch.overrides.TorchFunctionMode):
    """By how many dimensions what is concatenated has."""

    def __init__(self) -> None:
        super().__init__()
        self.dims: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.cat, torch.concat, torch.concatenate):
            self.dims.append((*args, *(kwargs or {}).values())[0][0].dim())
        return func(*args, **(kwargs or {}))


@given(
    channels=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    size=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5)),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    dim=st.sampled_from([1, -3, 0, 2]),
    turned=st.lists(st.booleans(), min_size=4, max_size=4),
    join=st.sampled_from([torch.cat, torch.concat, torch.concatenate]),
)
def test_images_are_concatenated_as_rows_of_channels(channels, size, dtype, dim, turned, join) -> None:
    n, h, w = size
    if dim not in (1, -3):
        channels = channels[:1] * len(channels)
    parts = [torch.randn(n, c, h, w).to(dtype) for c in channels]
    parts = [one.contiguous(memory_format=INNERMOST) if so else one for one, so in zip(parts, turned, strict=False)]
    wanted = join(parts, dim)
    with _Counted() as counted, channels_last_cat.JoinedAsRows():
        found = join(parts, dim)
    assert torch.equal(found, wanted) and found.stride() == wanted.stride()
    as_rows = dim in (1, -3) and all(map(channels_last._is_turned, parts))
    assert counted.dims == [2 if as_rows else 4]
    assert all(found.untyped_storage()._cdata != one.untyped_storage()._cdata for one in parts)


@pytest.mark.parametrize("other", ["dtype", "size", "out", "no list", "a subclass"])
def test_what_else_is_concatenated_is_left_alone(other: str) -> None:
    one, out = (torch.randn(2, c, 4, 4).contiguous(memory_format=INNERMOST) for c in (3, 6))
    with _Counted() as counted, channels_last_cat.JoinedAsRows():
        if other == "dtype":
            found = torch.cat([one, one.double()], 1)
        elif other == "size":
            with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
                torch.cat([one, one[:, :, :2].contiguous(memory_format=INNERMOST)], 1)
            found = torch.cat((one, one), dim=1)
            assert counted.dims.pop() == 2
        elif other == "out":
            found = torch.cat([one, one], 1, out=out)
        elif other == "no list":
            found = torch.cat(tensors=[nn.Parameter(one), nn.Parameter(one)], dim=1)
        else:
            found = torch.cat([one.as_subclass(_Own), one.as_subclass(_Own)], 1)
    assert set(counted.dims) <= {4} and torch.equal(found.double(), torch.cat([one, one], 1).double())


class _Own(torch.Tensor):
    pass
