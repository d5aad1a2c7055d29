# SPDX-License-Identifier: Apache-2.0
"""Weights that are stored in another type than a block computes in: what is cast is no tensor in memory to a kernel."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from gpu_blocks import BLOCKS, FROZEN, GATED, PROMPTED, UPSAMPLED, captured, cast
from large_rows import few
from lowering_ahead import code_of, lowered_ahead

from nexfort_engine.config.compile_config import CompileConfig

pytest.importorskip("triton", reason="kernels for a GPU are compiled with Triton")
if torch.version.cuda is None or torch.cuda.is_available():
    pytest.skip("needs a torch built for CUDA and no GPU: what touches one must fail", allow_module_level=True)

WITHOUT = {"transformer", "gelus", "long"}  # a kernel of the engine's
KINDS = [kind for kind in (*BLOCKS, *FROZEN, *UPSAMPLED, *PROMPTED, *GATED) if kind not in WITHOUT]


def _own_kernels(payload: Path) -> set[str]:
    """The names of the engine's kernels in a payload's code."""
    found = re.findall(r"async_compile\.triton\('(\w+)_\d+'", code_of(payload))
    return {name for name in found if not name.startswith("triton_")}


@pytest.mark.parametrize("kind", few(KINDS, ["looking"]))
def test_a_block_has_the_same_kernels_where_its_weights_are_cast(kind: str, tmp_path: Path) -> None:
    options = CompileConfig.parse("O2").lowering_options("cuda")
    found = []
    for capture in (cast, captured):
        folder = tmp_path / capture.__name__
        folder.mkdir()
        found.append(_own_kernels(lowered_ahead(folder, [kind], options, capture)[kind]))
    assert found[1] and found[0] == found[1] - {"multiply_rows"}, "which reads several weights as they lie in memory"
