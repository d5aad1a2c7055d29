# SPDX-License-Identifier: Apache-2.0
"""The kernel that lays out weights: every bit in its place, for weights of any size, and code for every card."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_scripts import run

from nexfort_engine.kernels.channels_last_weight import op as channels_last_weight

pytest.importorskip("triton", reason="the kernel is Triton's")


def test_the_kernel_gives_what_plain_torch_gives() -> None:
    run("interpreted_innermost_weight.py", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.parametrize("cards", ["few", pytest.param("all", marks=pytest.mark.large)])
def test_the_kernel_is_compiled_for_every_card(cards: str, tmp_path: Path) -> None:
    run("compiled_innermost_weight.py", cards, CUDA_VISIBLE_DEVICES="", TRITON_CACHE_DIR=str(tmp_path))


@settings(max_examples=30, deadline=None)
@given(sizes=st.tuples(*[st.integers(1, 6)] * 4), dtype=st.sampled_from(channels_last_weight.DTYPES))
def test_a_copy_has_the_weight_s_numbers_and_channels_innermost(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    weight = torch.randn(sizes).to(dtype)
    laid = channels_last_weight.operator()(weight)
    assert torch.equal(laid, weight) and laid.permute(0, 2, 3, 1).is_contiguous()
    assert laid.data_ptr() != weight.data_ptr()


def test_the_operator_knows_its_result_without_computing_it() -> None:
    torch.library.opcheck(channels_last_weight.operator(), (torch.randn(4, 6, 3, 3),), raise_exception=True)


@settings(max_examples=50, deadline=None)
@given(places=st.integers(1, 400))
def test_a_program_holds_all_places_of_some_channels(places: int) -> None:
    sizes = channels_last_weight.blocks(places)
    assert sizes["PLACES"] == places <= sizes["WIDE"] < 2 * places and sizes["WIDE"] & (sizes["WIDE"] - 1) == 0
    assert sizes["BLOCK"] >= 16 and sizes["BLOCK"] & (sizes["BLOCK"] - 1) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", channels_last_weight.DTYPES)
def test_on_a_card_every_bit_is_in_its_place(dtype: torch.dtype) -> None:
    from nexfort_engine.kernels.channels_last_weight import triton_kernel as kernels

    for shape in ((320, 320, 3, 3), (64, 1000, 3, 3), (5, 257, 1, 3), (16, 3, 7, 7)):
        weight = torch.randn(shape, device="cuda").to(dtype)
        sizes = channels_last_weight.blocks(shape[2] * shape[3])
        laid = torch.full((shape[0], *shape[2:], shape[1]), float("nan"), dtype=dtype, device="cuda")
        kernels.lay_innermost[(-(-shape[1] // sizes["BLOCK"]), shape[0])](weight, laid, shape[1], **sizes)
        assert torch.equal(laid.permute(0, 3, 1, 2), weight), (shape, dtype)
