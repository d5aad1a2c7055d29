# SPDX-License-Identifier: Apache-2.0
"""Rows in int8 behind a norm or an activation: the kernel, and the reference beside comfy_kitchen's own code.

What runs the kernel here is Triton's interpreter, in a process of its own.
"""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from kernel_scripts import run

from nexfort_engine.kernels.quantize_rows import op

pytest.importorskip("triton", reason="the kernel is Triton's")
kitchen = pytest.importorskip("comfy_kitchen.backends.eager.quantization", reason="ComfyUI requires that package")
Tensor = torch.Tensor


@pytest.mark.parametrize("cases", ["some", pytest.param("all", marks=pytest.mark.large)])
def test_the_kernel_gives_what_plain_torch_gives(cases: str) -> None:
    run("interpreted_quantize_rows.py", cases, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.parametrize("cards", ["few", pytest.param("all", marks=pytest.mark.large)])
def test_the_kernel_is_compiled_for_every_card(cards: str, tmp_path: Path) -> None:
    run("compiled_quantize_rows.py", cards, CUDA_VISIBLE_DEVICES="", TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.parametrize(("kind", "group"), [("", 0), ("swiglu", 16), ("layer_norm", 64)])
def test_the_operator_knows_its_result_without_computing_it(kind: str, group: int) -> None:
    second = torch.randn(2, 3, 64) if kind == "swiglu" else None
    given = (torch.randn(2, 3, 64), second, torch.randn(64), None, torch.randn(2, 1, 64), None, kind, 1e-6, True, group)
    torch.library.opcheck(op.operator(), given, raise_exception=True)


@pytest.mark.parametrize("size", [16, 64, 256])
def test_the_matrix_is_comfy_kitchens(size: int) -> None:
    like = torch.empty(0, dtype=torch.double)
    theirs = kitchen._build_hadamard(size, dtype=torch.double)
    assert torch.equal(op.hadamard(size, like), theirs)
    assert torch.allclose(theirs @ theirs, torch.eye(size, dtype=torch.double))


def _turned(rows: Tensor, group: int) -> Tensor:
    return (rows.unflatten(-1, (-1, group)) @ op.hadamard(group, rows)).flatten(-2) if group else rows


@settings(max_examples=40)
@given(
    st.integers(1, 20_000),
    st.integers(1, 40),
    st.sampled_from(op.GROUPS),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    st.integers(0, 2**16),
    st.sampled_from([1e-3, 1.0, 50.0]),
)
def test_rows_are_as_near_to_the_truth_as_comfy_kitchens(
    rows: int, groups: int, group: int, dtype: torch.dtype, seed: int, size: float
) -> None:
    """Of any number of rows, some of them zeros; outliers among their numbers."""
    inner = (group or 7) * groups
    few, rows = min(rows, 32), max(32, -(-65_536 // inner), min(rows, 400_000 // inner))  # an average is of many
    x = torch.randn(rows, inner, generator=torch.Generator().manual_seed(seed)) * size
    x[:, seed % inner] *= 20
    x[seed % rows] = 0
    x = x.to(dtype)
    ours, scales = op.quantized(x, group)
    alone, sizes = op.quantized(x[:few], group)  # a CPU adds up one row in another order than many
    assert (alone.int() - ours[:few].int()).abs().max() <= 1, "a row is a row by itself"
    torch.testing.assert_close(sizes, scales[:few], rtol=2**-6, atol=0)
    if group:
        theirs, steps = kitchen.quantize_and_rotate_rowwise(x, kitchen._build_hadamard(group), group)
    else:
        theirs, steps = kitchen.quantize_int8_rowwise(x)
    truth = _turned(x.double(), group)
    far, near = ((q.double() * s.double().reshape(-1, 1) - truth).norm() for q, s in ((ours, scales), (theirs, steps)))
    assert ours.dtype == torch.int8 and scales.dtype == torch.float32 and scales.shape == (rows,)
    # ours divides by a scale rounded to the rows' dtype: 2.4 % on average for bfloat16 rows of 16 numbers
    assert far <= (1.03 + rows**-0.5) * near + 1e-9, (float(far), float(near))


@pytest.mark.parametrize("kind", op.KINDS)
def test_what_is_before_the_rotation_is_rounded_once(kind: str) -> None:
    """Beside eager code, which rounds at every step."""
    draw = torch.Generator().manual_seed(0)
    x, second = (torch.randn(2, 5, 192, generator=draw).half() for _ in range(2))
    weight, bias = torch.randn(2, 192, generator=draw).half().unbind()
    factor, shift = torch.randn(2, 2, 1, 192, generator=draw).half().unbind()

    def eager(dtype: torch.dtype) -> Tensor:
        given, other, w, b, by, more = (part.to(dtype) for part in (x, second, weight, bias, factor, shift))
        if kind in ("gelu", "gelu_tanh"):
            given = torch.nn.functional.gelu(given, approximate="tanh" if kind == "gelu_tanh" else "none")
        elif kind == "swiglu":
            given = torch.nn.functional.silu(given) * other
        elif kind == "rms_norm":
            given = torch.nn.functional.rms_norm(given, [192], w, 1e-6) + b
        elif kind == "layer_norm":
            given = torch.nn.functional.layer_norm(given, [192], w, b, 1e-6)
        return torch.addcmul(more, given, 1 + by)

    normed = kind.endswith("norm")
    norms = (weight, bias) if normed else (None, None)
    found = op.prepared(x, second, *norms, factor, shift, kind, 1e-6, True)
    truth = eager(torch.double)
    assert (found - truth).norm() <= 1.02 * (eager(torch.half) - truth).norm()


def test_rows_of_zeros_and_of_what_is_not_finite_do_not_touch_others() -> None:
    x = torch.randn(4, 256, dtype=torch.half, generator=torch.Generator().manual_seed(0))
    alone = op.quantized(x[3:], 256)
    x[0], x[1, 2], x[2, 5] = 0.0, float("nan"), float("inf")
    rows, scales = op.quantized(x, 256)
    assert torch.equal(rows[3:], alone[0]) and torch.equal(scales[3:], alone[1])
    assert scales.isfinite().all() and (rows[0] == 0).all() and float(scales[0]) <= 1.1e-30
