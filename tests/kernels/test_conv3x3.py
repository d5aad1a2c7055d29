# SPDX-License-Identifier: Apache-2.0
"""Convolutions by the engine's kernel, also of upsampled images: what it computes, and where it is taken.

What runs the kernel here is Triton's interpreter, in a process of its own.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import gpu_blocks
import pytest
import torch
from kernel_scripts import run
from torch.nn.functional import conv2d, interpolate

from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.kernels.conv3x3 import upsample_op
from nexfort_engine.kernels.conv3x3.op import WIDTHS, part_of, widths
from nexfort_engine.kernels.gluon_support import DESCRIPTORS
from nexfort_engine.lowering import inductor

pytest.importorskip("triton", reason="the kernels are Triton's")
PROGRAMS = 132  # of an H200


@pytest.mark.parametrize("cases", ["some", pytest.param("all", marks=pytest.mark.large)])
def test_the_kernels_give_what_plain_torch_gives(cases: str) -> None:
    run("interpreted_convolution.py", cases, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.parametrize("cards", ["few", pytest.param("all", marks=pytest.mark.large)])
def test_the_kernels_are_compiled_for_their_cards(cards: str, tmp_path: Path) -> None:
    run("compiled_convolution.py", cards, CUDA_VISIBLE_DEVICES="", TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.parametrize(
    ("sizes", "columns", "phases", "fastest"),
    [
        ((2, 128, 128), 320, 1, 320),
        ((2, 64, 64), 640, 1, 320),
        ((2, 32, 32), 1280, 1, 160),
        ((2, 96, 96), 320, 1, 160),
        ((2, 48, 48), 640, 1, 128),
        ((2, 24, 24), 1280, 1, 128),
        ((2, 64, 64), 320, 1, 160),
        ((1, 64, 64), 640, 1, 0),
        ((2, 20, 20), 1280, 1, 0),
        ((2, 16, 16), 1280, 1, 0),
        ((2, 12, 12), 1280, 1, 0),
        ((2, 32, 32), 640, 1, 0),
        ((2, 24, 24), 640, 1, 0),
        ((2, 48, 48), 320, 1, 0),
        ((1, 32, 32), 1280, 1, 0),
        ((1, 64, 64), 320, 1, 0),
        ((2, 12, 12), 1280, 4, 160),
        ((2, 24, 24), 1280, 4, 160),
        ((2, 48, 48), 640, 4, 128),
        ((2, 64, 64), 640, 4, 320),
        ((1, 256, 256), 512, 4, 256),
        ((1, 8, 8), 1280, 4, 0),
    ],
)
def test_parts_are_as_wide_as_was_measured_to_be_fastest(
    sizes: tuple[int, int, int], columns: int, phases: int, fastest: int
) -> None:
    assert part_of(*sizes, columns, phases, PROGRAMS, widths(columns)) == fastest


def test_the_rule_uses_nothing_from_outside() -> None:
    """Its text stands in an artefact by itself."""
    names: dict[str, Any] = {}
    exec(inspect.getsource(part_of), names)  # noqa: S102
    assert names["part_of"](2, 64, 64, 640, 1, PROGRAMS, (320, 128)) == 320


@pytest.mark.parametrize("columns", [4, 64, 96, 100])
def test_few_or_odd_channels_are_left(columns: int) -> None:
    assert widths(columns) == ()


@pytest.mark.parametrize(("height", "width"), [(10, 14), (9, 13), (5, 7), (23, 1)])
@pytest.mark.parametrize("biased", [False, True])
def test_the_operator_is_both_of_torchs_at_any_size(height: int, width: int, biased: bool) -> None:
    x, weight = torch.randn(2, 3, 5, 7), torch.randn(8, 3, 3, 3)
    bias = torch.randn(8) if biased else None
    found = upsample_op.operator()(x, weight, bias, height, width)
    assert torch.equal(found, conv2d(interpolate(x, size=(height, width), mode="nearest"), weight, bias, padding=1))
    with torch._subclasses.FakeTensorMode() as mode:
        given = [None if one is None else mode.from_tensor(one) for one in (x, weight, bias)]
        fake = upsample_op.operator()(*given, height, width)
    assert fake.shape == found.shape and fake.stride() == found.stride() and fake.dtype == found.dtype


def _on_the_card(kind: str, folder: Path) -> tuple[Any, list[torch.Tensor], torch.dtype]:
    """A block's function, its weights on the card and their dtype; lowered to `payload` in a folder."""
    if torch.cuda.get_device_capability() not in DESCRIPTORS:
        pytest.skip("the kernel is for cards of compute capability 9.0")
    inductor.lower(gpu_blocks.captured(kind), folder / "payload", CompileConfig.parse("O2").lowering_options("cuda"))
    function, dtype, shapes, _ = {**gpu_blocks.FROZEN, **gpu_blocks.UPSAMPLED}[kind]
    weights = [torch.randn(s, device="cuda").mul(max(torch.Size(s[1:]).numel(), 1) ** -0.5).to(dtype) for s in shapes]
    return function, weights, dtype


def _compared(folder: Path, function: Any, weights: list[torch.Tensor], *inputs: torch.Tensor) -> tuple[float, float]:
    """How far the artefact and eager are from the truth."""
    truth = function([w.double() for w in weights], *(x.double() for x in inputs))
    block = inductor.load(folder / "payload", {}, [], len(weights))
    ours, eager = block([*weights, *inputs])[0], function(weights, *inputs)
    return float((ours - truth).norm()), float((eager - truth).norm())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("side", [3, 2])
@pytest.mark.parametrize("width", [*WIDTHS])
def test_each_form_is_as_near_to_the_truth_as_torch(width: int, side: int, dtype: torch.dtype) -> None:
    """Parts that hang over the right and the lower edge, of images smaller than one, and more of them than programs."""
    if torch.cuda.get_device_capability() not in DESCRIPTORS:
        pytest.skip("the kernel is for cards of compute capability 9.0")
    from on_gpu_convolution import found

    torch.manual_seed(0)
    for images, channels, height, across in ((2, 64, 9, 17), (1, 192, 3, 2), (3, 128, 24, 20), (2, 320, 93, 101)):
        x = torch.randn(images, channels, height, across, device="cuda").to(dtype)
        weight = torch.randn(2 * width, channels, 3, 3, device="cuda").mul((9 * channels) ** -0.5).to(dtype)
        bias = torch.randn(2 * width, device="cuda").to(dtype) if channels == 192 else None
        seen = x if side == 3 else interpolate(x, scale_factor=2.0, mode="nearest")
        truth = conv2d(seen.double(), weight.double(), None if bias is None else bias.double(), padding=1)
        far = (found(x, weight, bias, side, width) - truth).norm()
        near = (conv2d(seen, weight, bias, padding=1) - truth).norm()
        assert far <= (1.05 if side == 3 else 1.5) * near, (images, channels, height, across, float(far / near))


@pytest.mark.gpu
def test_a_block_with_it_is_no_further_from_the_truth_than_eager(tmp_path: Path) -> None:
    """At the sizes that it was lowered with and at others, which need not be whole parts, and are cuDNN's if small."""
    assert [part_of(*sizes, 320, 1, PROGRAMS, widths(320)) for sizes in ((2, 125, 127), (2, 93, 95))] == [320, 160]
    torch.manual_seed(0)
    function, weights, dtype = _on_the_card("widened", tmp_path)
    for images, height, width in ((2, 96, 96), (2, 125, 127), (2, 93, 95), (1, 17, 5), (1, 1, 1), (2, 8, 129)):
        x = torch.randn(images, 320, height, width, device="cuda").to(dtype)
        ours, eager = _compared(tmp_path, function, weights, x, torch.randn(images, 256, device="cuda").to(dtype))
        assert ours <= 1.1 * eager, (images, height, width, ours / eager)


@pytest.mark.gpu
def test_upsampled_images_are_convolved_at_any_size(tmp_path: Path) -> None:
    """Two of two roundings each, beside two of one; where the second image is no double the second is cuDNN's."""
    torch.manual_seed(0)
    function, weights, dtype = _on_the_card("upsampled", tmp_path)
    for images, height, width, odd in ((2, 24, 16, 0), (1, 17, 5, 0), (2, 40, 64, 0), (2, 24, 24, 1), (3, 3, 2, 3)):
        x = torch.randn(images, 320, height, width, device="cuda").to(dtype, memory_format=torch.channels_last)
        skip = torch.randn(images, 320, 4 * height - odd, 4 * width, device="cuda").to(dtype)
        ours, eager = _compared(tmp_path, function, weights, x, skip)
        assert ours <= 1.5 * eager, (images, height, width, ours / eager)
