# SPDX-License-Identifier: Apache-2.0
"""Convolutions by the engine's kernel: what it computes, and where it is taken.

What runs the kernel here is Triton's interpreter, in a process of its own.
"""

from __future__ import annotations

from pathlib import Path

import gpu_blocks
import pytest
import torch
from kernel_scripts import run

from nexfort_engine import lower
from nexfort_engine.config import CompileConfig
from nexfort_engine.kernels import convolution

pytest.importorskip("triton", reason="the kernels are Triton's")
PROGRAMS = 132  # of an H200


def test_the_kernel_gives_what_plain_torch_gives() -> None:
    run("interpreted_convolution.py", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


def test_the_kernel_is_compiled_for_its_card(tmp_path: Path) -> None:
    run("compiled_convolution.py", CUDA_VISIBLE_DEVICES="", TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.parametrize(
    ("sizes", "columns", "fastest"),
    [
        ((2, 128, 128), 320, 320),
        ((2, 64, 64), 640, 320),
        ((2, 32, 32), 1280, 160),
        ((2, 96, 96), 320, 160),
        ((2, 48, 48), 640, 128),
        ((2, 24, 24), 1280, 128),
        ((1, 128, 128), 512, 256),
        ((1, 1024, 1024), 128, 128),
        ((2, 12, 12), 1280, None),
        ((2, 128, 128), 4, None),
        ((1, 8, 8), 1280, None),
    ],
)
def test_parts_are_as_wide_as_was_measured_to_be_fastest(
    sizes: tuple[int, int, int], columns: int, fastest: int | None
) -> None:
    assert convolution.width(*sizes, columns, PROGRAMS) == fastest


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["shortened", "widened"])
def test_a_block_with_it_is_no_further_from_the_truth_than_eager(kind: str, tmp_path: Path) -> None:
    """At the sizes that it was lowered with and at others, which need not be whole parts; and from disk once more."""
    if torch.cuda.get_device_capability() not in convolution.MEASURED:
        pytest.skip("the kernel is for cards of compute capability 9.0")
    lower.lower(gpu_blocks.captured(kind), tmp_path / "payload", CompileConfig.parse("O2").lowering_options("cuda"))
    function, dtype, shapes, ((given, _), (embedding, _)) = gpu_blocks.FROZEN[kind]
    generator = torch.Generator("cuda").manual_seed(0)
    weights = [
        torch.randn(s, device="cuda", generator=generator).mul(max(torch.Size(s[1:]).numel(), 1) ** -0.5).to(dtype)
        for s in shapes
    ]
    for _ in range(2):
        block = lower.load(tmp_path / "payload", {}, [])
        for images, height, width in ((given[0], *given[2:]), (1, 17, 5), (3, 64, 40), (1, 1, 1), (2, 8, 129)):
            x = torch.randn(images, given[1], height, width, device="cuda", generator=generator).to(dtype)
            e = torch.randn(images, embedding[1], device="cuda", generator=generator).to(dtype)
            truth = function([w.double() for w in weights], x.double(), e.double())
            eager = (function(weights, x, e) - truth).norm()
            ours = (block([*weights, x, e])[0] - truth).norm()
            assert ours <= 1.1 * eager, (images, height, width, float(ours / eager))
