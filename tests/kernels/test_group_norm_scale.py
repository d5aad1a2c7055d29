# SPDX-License-Identifier: Apache-2.0
"""Kernels for a group norm's factors: the same numbers as plain torch's, on any image, and code for every card.

What runs them here is Triton's interpreter, in a process of its own: it has to be asked for before Triton is imported.
"""

from __future__ import annotations

from pathlib import Path

import gpu_blocks
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_scripts import run

from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.kernels.group_norm_scale import op as group_norm_scale
from nexfort_engine.lowering import inductor

pytest.importorskip("triton", reason="the kernels are Triton's")


@pytest.mark.parametrize("cases", ["some", pytest.param("all", marks=pytest.mark.large)])
def test_kernels_give_what_plain_torch_gives(cases: str) -> None:
    run("interpreted_group_factors.py", cases, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.parametrize("cards", ["few", pytest.param("all", marks=pytest.mark.large)])
def test_kernels_are_compiled_for_every_card(cards: str, tmp_path: Path) -> None:
    run("compiled_group_factors.py", cards, CUDA_VISIBLE_DEVICES="", TRITON_CACHE_DIR=str(tmp_path))


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 3),
    groups=st.sampled_from([1, 2, 3]),
    each=st.integers(1, 4),
    places=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    affine=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_factors_are_those_of_a_group_norm(
    batch: int, groups: int, each: int, places: list[int], affine: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, groups * each, *places, generator=generator) * 3 + 1
    weight, bias = torch.randn(2, groups * each, generator=generator) if affine else (None, None)
    factors = group_norm_scale.operator()(x, weight, bias, groups, 1e-3)
    scale, shift = (factors[:, at].reshape(batch, -1, *[1] * len(places)) for at in (0, 1))
    rows = x.double().reshape(batch, groups, -1)
    rows = (rows - rows.mean(-1, True)) / (rows.var(-1, correction=0, keepdim=True) + 1e-3).sqrt()
    expected = rows.reshape(x.shape)
    if weight is not None and bias is not None:
        expected = expected * weight.reshape(-1, *[1] * len(places)) + bias.reshape(-1, *[1] * len(places))
    assert torch.allclose((x * scale + shift).double(), expected, rtol=1e-4, atol=1e-4)


def test_the_operator_knows_its_result_without_computing_it() -> None:
    torch.library.opcheck(
        group_norm_scale.operator(), (torch.randn(2, 4, 3, 3), torch.randn(4), None, 2, 1e-5), raise_exception=True
    )


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["residual", "innermost"])
def test_blocks_with_such_norms_are_no_further_from_the_truth_than_eager(kind: str, tmp_path: Path) -> None:
    """At the sizes that they were lowered with and at others, of which rows begin anywhere."""
    inductor.lower(gpu_blocks.captured(kind), tmp_path / "payload", CompileConfig.parse("O2").lowering_options("cuda"))
    block = inductor.load(tmp_path / "payload", {}, [])
    _, dtype, shapes, ((image, _), (embedding, _)) = {**gpu_blocks.BLOCKS, **gpu_blocks.INNERMOST}[kind]
    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(shape: tuple[int, ...], scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, device="cuda", generator=generator) * scale).to(dtype)

    weights = [drawn(shape, 0.05 if len(shape) > 1 else 1.0) for shape in shapes]
    for batch, height, width in ((image[0], *image[2:]), (1, 64, 64), (3, 37, 41), (2, 12, 20)):
        x, more = drawn((batch, image[1], height, width)) + 4, drawn((batch, *embedding[1:]))
        if kind == "innermost":
            x = x.to(memory_format=torch.channels_last)
        truth = gpu_blocks.residual([w.double() for w in weights], x.double(), more.double())
        eager = (gpu_blocks.residual(weights, x, more) - truth).norm()
        ours = (block([*weights, x, more])[0] - truth).norm()
        assert ours <= 1.1 * eager, (batch, height, width, float(ours / truth.norm()), float(eager / truth.norm()))
