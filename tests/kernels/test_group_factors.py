# SPDX-License-Identifier: Apache-2.0
"""Kernels for a group norm's factors: the same numbers as plain torch's, on any image, and code for every card.

What runs them here is Triton's interpreter, in a process of its own: it has to be asked for before Triton is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nexfort_engine.kernels import group_factors

pytest.importorskip("triton", reason="the kernels are Triton's")
HERE = Path(__file__).resolve().parent


def test_kernels_give_what_plain_torch_gives() -> None:
    _run("interpreted_group_factors.py", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


def test_kernels_are_compiled_for_every_card(tmp_path: Path) -> None:
    _run("compiled_group_factors.py", CUDA_VISIBLE_DEVICES="", TRITON_CACHE_DIR=str(tmp_path))


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
    factors = group_factors.operator()(x, weight, bias, groups, 1e-3)
    scale, shift = (factors[:, at].reshape(batch, -1, *[1] * len(places)) for at in (0, 1))
    rows = x.double().reshape(batch, groups, -1)
    rows = (rows - rows.mean(-1, True)) / (rows.var(-1, correction=0, keepdim=True) + 1e-3).sqrt()
    expected = rows.reshape(x.shape)
    if weight is not None and bias is not None:
        expected = expected * weight.reshape(-1, *[1] * len(places)) + bias.reshape(-1, *[1] * len(places))
    assert torch.allclose((x * scale + shift).double(), expected, rtol=1e-4, atol=1e-4)


def test_the_operator_knows_its_result_without_computing_it() -> None:
    torch.library.opcheck(
        group_factors.operator(), (torch.randn(2, 4, 3, 3), torch.randn(4), None, 2, 1e-5), raise_exception=True
    )


def _run(script: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / script)],
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1]), **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
