# SPDX-License-Identifier: Apache-2.0
"""Kernels for attention in 8 bits: as near to the truth as plain torch that rounds so, at any size, for every card."""

from __future__ import annotations

from pathlib import Path

import gpu_blocks
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_scripts import run
from torch.nn import functional

from nexfort_engine.kernels.low_precision_attention import op as low_precision_attention
from nexfort_engine.lowering import inductor

SIZES = st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 70), st.integers(1, 300))
PLAIN = (0, 1, 2, 3)


def apart(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth.double()).norm() / truth.double().norm())


def drawn(sizes: tuple[int, int, int, int], width: int, seed: int) -> list[torch.Tensor]:
    batch, heads, queries, keys = sizes
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, heads, length, width, generator=generator) for length in (queries, keys, keys)]


def test_kernels_give_what_plain_torch_gives() -> None:
    pytest.importorskip("triton", reason="the kernels are Triton's")
    run("interpreted_narrow_attention.py", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.parametrize("cards", ["few", pytest.param("all", marks=pytest.mark.large)])
def test_kernels_are_compiled_for_every_card(cards: str, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="the kernels are Triton's")
    run("compiled_narrow_attention.py", cards, CUDA_VISIBLE_DEVICES="", TRITON_CACHE_DIR=str(tmp_path))


@settings(max_examples=60, deadline=None)
@given(
    SIZES,
    st.sampled_from([40, 64, 72, 128]),
    st.sampled_from([torch.float16, torch.bfloat16]),
    st.sampled_from([0.05, 0.3]),
    st.floats(-4, 4),
    st.integers(0, 2**16),
)
def test_it_is_near_to_the_truth_whatever_the_values_are_scaled_by(
    sizes: tuple[int, int, int, int], width: int, dtype: torch.dtype, scale: float, power: float, seed: int
) -> None:
    q, k, v = (x.to(dtype) for x in drawn(sizes, width, seed))
    v = (v.float() * 10**power).to(dtype) if dtype == torch.bfloat16 else v
    truth = functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=scale)
    found = low_precision_attention.operator()(q, k, v, scale, PLAIN)
    assert found.dtype == dtype and found.shape == truth.shape
    assert apart(found, truth) < 0.07


@given(SIZES, st.integers(0, 2**16))
@settings(max_examples=20, deadline=None)
def test_what_all_keys_have_in_common_costs_no_precision(sizes: tuple[int, int, int, int], seed: int) -> None:
    q, k, v = drawn(sizes, 64, seed)
    without = low_precision_attention.operator()(q, k, v, 0.125, PLAIN)
    common = torch.randn(1, sizes[1], 1, 64, generator=torch.Generator().manual_seed(seed + 1)) * 20
    assert apart(low_precision_attention.operator()(q, k + common, v, 0.125, PLAIN), without) < 0.03


@pytest.mark.parametrize("order", [PLAIN, (0, 2, 1, 3), (2, 0, 1, 3)])
def test_the_operator_knows_its_result_and_how_it_lies(order: tuple[int, ...]) -> None:
    q, k, v = drawn((2, 3, 5, 7), 64, 0)
    found = low_precision_attention.operator()(q, k, v, 0.125, order)
    assert found.permute(*order).is_contiguous()
    torch.library.opcheck(low_precision_attention.operator(), (q, k, v, 0.125, order), raise_exception=True)


def test_heads_that_are_too_wide_are_told() -> None:
    assert [low_precision_attention.width(e) for e in (33, 64, 65, 72, 128)] == [64, 64, 128, 128, 128]
    with pytest.raises(ValueError, match="129 numbers; expected at most 128"):
        low_precision_attention.width(129)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [40, 64, 128])
@pytest.mark.parametrize("scale", [0.1, 0.5])  # of the larger a few keys have all weight
def test_the_kernel_of_one_card_is_nearly_as_near_as_the_others(width: int, scale: float) -> None:
    """Its exponentials have a straight line where the others' have a curve: at most a fifth more of an error."""
    pytest.importorskip("triton", reason="the kernels are Triton's")
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernel is for cards of compute capability 9.0")
    from on_gpu_narrow_attention import found

    for seed, sizes in enumerate(
        [(2, 3, 1000, 1300), (1, 2, 64, 128), (1, 1, 129, 129), (2, 2, 1, 1), (1, 4, 4608, 77)]
    ):
        q, k, v = (x.to("cuda", torch.bfloat16) for x in drawn(sizes, width, seed))
        k = k + 3 * k[:, :, :1]  # what all keys have in common
        v[:, 0] *= 1e-3
        truth = functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=scale)
        plain = low_precision_attention.reference(q, k, v, scale, PLAIN)
        ours = found(q, k, v, scale)
        assert bool(ours.isfinite().all())
        for head in range(sizes[1]):
            far, near = (apart(x[:, head], truth[:, head]) for x in (ours, plain))
            assert far <= 1.2 * near + 2e-3, (sizes, head)


@pytest.mark.gpu
def test_a_block_with_it_is_as_near_to_the_truth_as_plain_torch_that_rounds_so(tmp_path: Path) -> None:
    """At the sizes that it was lowered with and at others."""
    pytest.importorskip("triton", reason="the kernels are Triton's")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the card has no products in fp8")
    inductor.lower(gpu_blocks.captured("long"), tmp_path / "payload", gpu_blocks.OPTIONS)
    block = inductor.load(tmp_path / "payload", {}, [])
    _, dtype, shapes, ((given_shape, _),) = gpu_blocks.BLOCKS["long"]
    generator = torch.Generator("cuda").manual_seed(0)
    weights = [torch.randn(shape, device="cuda", generator=generator).to(dtype) * 0.06 for shape in shapes]
    for batch, tokens in (given_shape[:2], (1, 4096), (3, 1000), (2, 77), (1, 1)):
        x = torch.randn(batch, tokens, given_shape[2], device="cuda", generator=generator).to(dtype)
        ours = block([*weights, x])[0]
        parts = [(x @ w.T).view(batch, tokens, -1, 128).transpose(1, 2) for w in weights[:3]]
        expected = [p.float() for p in parts]
        truth = functional.scaled_dot_product_attention(*expected).transpose(1, 2).reshape(batch, tokens, -1)
        truth = x.float() + truth @ weights[3].float().T
        seen = low_precision_attention.reference(*parts, 128**-0.5, PLAIN).transpose(1, 2).reshape(batch, tokens, -1)
        plain = x + seen @ weights[3].T
        seen = functional.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(x.shape)
        eager = apart(x + seen @ weights[3].T, truth)
        assert bool(ours.isfinite().all())
        assert apart(ours, truth) <= 1.1 * apart(plain, truth) + eager, (batch, tokens)
