# SPDX-License-Identifier: Apache-2.0
"""What kernels are launched with while a graph is captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nexfort_engine.system.kernel_launches import SCRATCH, launched_by_address

heuristics = pytest.importorskip("torch._inductor.runtime.triton_heuristics", reason="the kernels are Triton's")
KINDS = {"x": "*fp16", "rows": "i32", SCRATCH: "*u8", "STAGES": "constexpr"}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of launches; nothing runs."""
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(heuristics.CachingAutotuner, "run", lambda self, *args, **_: found.append(args))
    return found


def kernel_of(kinds: dict[str, str]) -> Any:
    made = object.__new__(heuristics.CachingAutotuner)
    made.triton_meta = {"signature": kinds}
    return made


def test_tensors_are_given_as_addresses_and_descriptors_lie_outside_of_the_graph(launched: list[Any]) -> None:
    x, own, outside = torch.empty(4), torch.empty(256, dtype=torch.uint8), torch.empty(512, dtype=torch.uint8)
    with launched_by_address(outside):
        kernel_of(KINDS).run(x, 4, own, 132, 1, 1)
        kernel_of({**KINDS, "rows": "constexpr"}).run(x, 1, own, 132, 1, 1)  # a number that is 1 is given all the same
        kernel_of({"x": "*fp16", "rows": "i32"}).run(x, 4, 132, 1, 1)
    kernel_of(KINDS).run(x, 4, own, 132, 1, 1)
    there, rest = x.data_ptr(), (outside.data_ptr(), 132, 1, 1)
    assert launched[:3] == [(there, 4, *rest), (there, 1, *rest), (there, 4, 132, 1, 1)]
    assert launched[3][2] is own, "without a capture each launch has its own"


def test_a_kernel_that_is_given_a_weight_there_keeps_it(launched: list[Any]) -> None:
    """The forms in Triton's language have the same arguments, and write no descriptors."""
    x, weight = torch.empty(4), torch.empty(4096, dtype=torch.int8)
    with launched_by_address(torch.empty(512, dtype=torch.uint8)):
        kernel_of({**KINDS, SCRATCH: "*i8"}).run(x, 4, weight, 132, 1, 1)
    assert launched == [(x.data_ptr(), 4, weight.data_ptr(), 132, 1, 1)]


def test_a_kernel_that_needs_more_is_not_launched(launched: list[Any]) -> None:
    with launched_by_address(torch.empty(128, dtype=torch.uint8)), pytest.raises(RuntimeError, match="256 bytes"):
        kernel_of(KINDS).run(torch.empty(4), 4, torch.empty(256, dtype=torch.uint8), 132, 1, 1)
    assert not launched


def test_every_kernel_that_writes_descriptors_fits_into_what_graphs_have() -> None:
    from nexfort_engine.kernels.conv3x3 import gluon_kernel as convolution
    from nexfort_engine.kernels.geglu_linear import gluon_kernel as gated
    from nexfort_engine.kernels.odd_head_dim_attention import gluon_kernel as attention
    from nexfort_engine.kernels.scaled_linear import gluon_kernel as scaled
    from nexfort_engine.system.cuda_graph_pool import _DESCRIPTORS

    for module in (convolution, gated, attention, scaled):
        names = [fn.arg_names for fn in vars(module).values() if hasattr(fn, "arg_names")]
        assert any(SCRATCH in each for each in names) and module.SCRATCH <= _DESCRIPTORS
