# SPDX-License-Identifier: Apache-2.0
"""Products of factors in 8 bits with all that may be behind them: the kernel, and the reference beside comfy_kitchen's.

What runs the kernel here is Triton's interpreter, in a process of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from kernel_scripts import run

from nexfort_engine.kernels.quantize_rows import op as quantize_rows
from nexfort_engine.kernels.scaled_linear import choice, op

pytest.importorskip("triton", reason="the kernel is Triton's")
kitchen = pytest.importorskip("comfy_kitchen.backends.eager.quantization", reason="ComfyUI requires that package")
Tensor = torch.Tensor


@pytest.mark.parametrize("cases", ["some", pytest.param("all", marks=pytest.mark.large)])
def test_the_kernel_gives_what_plain_torch_gives(cases: str) -> None:
    run("interpreted_scaled_linear.py", cases, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.parametrize("cards", ["few", pytest.param("all", marks=pytest.mark.large)])
def test_the_kernel_is_compiled_for_every_card(cards: str, tmp_path: Path) -> None:
    run("compiled_scaled_linear.py", cards, CUDA_VISIBLE_DEVICES="", TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.parametrize("forms", ["few", pytest.param("all", marks=pytest.mark.large)])
def test_the_kernel_in_gluon_is_compiled_for_its_card(forms: str, tmp_path: Path) -> None:
    run("compiled_scaled_linear_groups.py", forms, CUDA_VISIBLE_DEVICES="", TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.parametrize("factor", op.FACTORS)
def test_the_operator_knows_its_result_without_computing_it(factor: torch.dtype) -> None:
    x, weight, up = (torch.randn(n, 16).to(factor) for n in (6, 5, 5))
    scales = torch.rand(6), torch.rand(5, 1)
    more = (torch.randn(2, 1, 5), torch.randn(2, 3, 5))
    given = (x, scales[0], weight, scales[1], torch.randn(5), up, scales[1], None, *more, "silu", [2, 3], torch.half)
    checks = "ALL" if factor == torch.int8 else "test_faketensor"  # the others compute with fp8, which torch does not
    torch.library.opcheck(op.operator(), given, raise_exception=True, test_utils=checks)


@settings(max_examples=40)
@given(
    st.integers(1, 20_000),
    st.integers(1, 20),
    st.integers(1, 70),
    st.sampled_from([16, 64, 256]),
    st.sampled_from([torch.float16, torch.bfloat16]),
    st.tuples(st.booleans(), st.booleans()),
    st.integers(0, 2**16),
)
def test_a_layer_is_as_near_to_the_truth_as_comfy_kitchens(
    rows: int, groups: int, columns: int, group: int, dtype: torch.dtype, flags: tuple[bool, bool], seed: int
) -> None:
    """Both of them, rows in int8 and their product, at any number of rows, with a scale for each column or for all."""
    per_column, biased = flags
    inner = group * groups
    rows = max(1, min(rows, 200_000 // (inner + columns)))
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inner, generator=draw).to(dtype)
    weight = torch.randint(-128, 128, (columns, inner), dtype=torch.int8, generator=draw)
    scale = torch.rand((columns, 1) if per_column else (), generator=draw) / 100
    bias = torch.randn(columns, generator=draw).to(dtype) if biased else None
    theirs = kitchen.int8_linear(x, weight, scale, bias, dtype, True, group)
    nothing: list[Any] = [None] * 5
    steps, sizes = quantize_rows.quantized(x, group)
    ours = op.reference(steps, sizes, weight, scale, bias, *nothing, "", [rows], dtype)
    full = (x.double().unflatten(-1, (-1, group)) @ quantize_rows.hadamard(group, x.double())).flatten(-2)
    truth = full @ (weight.double() * scale.double()).t() + (0 if bias is None else bias.double())
    assert ours.dtype == dtype and ours.shape == theirs.shape
    # what rounding of rows does to few numbers is chance: so much is to be expected
    chance = sizes.double().norm() / 12**0.5 * (weight.double() * scale.double()).norm()
    near = max((theirs - truth).norm(), chance * (1 + 3 / (rows * columns) ** 0.5))
    assert (ours - truth).norm() <= 1.15 * near + 1e-3 * truth.norm()


@pytest.mark.parametrize("scale", [0.0, float("inf"), float("nan")])
def test_odd_scales_reach_their_own_numbers_alone(scale: float) -> None:
    x, weight = torch.ones(3, 16, dtype=torch.int8), torch.ones(2, 16, dtype=torch.int8)
    steps = torch.tensor([1.0, scale, 1.0])
    nothing: list[Any] = [None] * 6
    found = op.reference(x, steps, weight, torch.ones(2), *nothing, "", [3], torch.float32)
    assert (found[[0, 2]] == 16).all()
    assert torch.equal(found[1].nan_to_num(7, 8), torch.full((2,), 16 * scale).nan_to_num(7, 8))


def test_a_layer_that_was_not_measured_gets_a_form_that_every_card_has(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = {(3840, 3840): choice.Measured(choice.FORMS[1], 1.0, 2.0), (64, 64): choice.Measured(choice.FORMS[2], 1, 2)}
    monkeypatch.setattr(choice, "MEASURED", {(9, 0): fast})
    for card in ((8, 0), (9, 0), (12, 0)):
        assert choice.form(card, 4096, 3840, few=False, up=False) == choice.FORMS[0]
        assert choice.form(card, 4096, 3840, few=False, up=True) == choice.WITH_UP[0]
        assert choice.form(card, 4096, 3840, few=True, up=False) == choice.FEW_ROWS
        assert not choice.loses(card, 4096, 3840)


def test_a_layer_that_was_not_measured_gets_the_form_of_all_that_were(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = ((3840, 3840), (10240, 3840))
    monkeypatch.setattr(choice, "MEASURED", {(9, 0): dict.fromkeys(layers, choice.Measured(choice.FORMS[1], 1.0, 2.0))})
    assert choice.form((9, 0), 4096, 3840, few=False, up=False) == choice.FORMS[1]
    assert choice.form((9, 0), 4096, 3840, few=False, up=True) == choice.WITH_UP[0]
    assert choice.form((8, 0), 4096, 3840, few=False, up=False) == choice.FORMS[0]


@pytest.mark.parametrize(("missing", "taken"), [(None, choice.GROUPED), ("torch is another", choice.FORMS[0])])
def test_the_kernel_in_gluon_is_taken_where_descriptors_can_be_written(
    missing: str | None, taken: choice.Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "MEASURED", {(9, 0): {(3840, 3840): choice.Measured(choice.GROUPED, 80.0, 100.0)}})
    monkeypatch.setattr(choice, "descriptors_missing", lambda _: missing)
    assert choice.form((9, 0), 3840, 3840, few=False, up=False) == taken


def test_what_was_measured_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow = choice.Measured(choice.FORMS[1], 90.0, 100.0), choice.Measured(choice.FORMS[2], 100.0, 100.0)
    table = {(9, 0): {(3840, 3840): fast, (-3840, 3840): slow}}
    monkeypatch.setattr(choice, "MEASURED", table)
    assert choice.form((9, 0), 3840, 3840, few=False, up=False) == choice.FORMS[1]
    assert choice.form((9, 0), 3840, 3840, few=False, up=True) == choice.FORMS[2]
    assert choice.form((8, 9), 3840, 3840, few=False, up=False) == choice.FORMS[0]
    assert not choice.loses((9, 0), 3840, 3840) and choice.loses((9, 0), 3840, 3840, up=True)
