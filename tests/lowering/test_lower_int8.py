# SPDX-License-Identifier: Apache-2.0
"""Blocks with layers in int8 lowered for a GPU that is not there: their kernels, and nothing of the host's package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="kernels for a GPU are compiled with Triton")
pytest.importorskip("comfy_kitchen", reason="the operators are of a package that ComfyUI requires")
if torch.version.cuda is None or torch.cuda.is_available():
    pytest.skip("needs a torch built for CUDA and no GPU: what touches one must fail", allow_module_level=True)
from int8_blocks import BLOCKS, captured, plain
from large_rows import few
from lowering_ahead import LoweredOnDemand, code_of, kernels_of, lowered_ahead

from nexfort_engine.config.compile_config import CompileConfig

ASKED = {"fuse.int8_linear": True, "fuse.fp8_input": True}
OPTIONS = CompileConfig.parse({"mode": "O2", "options": ASKED}).lowering_options("cuda")


@pytest.fixture(scope="module")
def payloads(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    return LoweredOnDemand(tmp_path_factory.mktemp("int8"), OPTIONS, plain)


@pytest.mark.parametrize("kind", few(BLOCKS.keys(), ("gated",)))
def test_layers_in_int8_are_kernels_of_the_artefact(kind: str, payloads: Mapping[str, Path]) -> None:
    """One configuration each, so nothing is timed; no operator of the package, so it need not be there."""
    code, kernels = code_of(payloads[kind]), [kernel["name"] for kernel in kernels_of(payloads[kind])]
    calls = [line for line in code.splitlines() if "torch.ops" in line and not line.lstrip().startswith("#")]
    assert not [line for line in calls if "comfy_kitchen" in line or "scaled_linear" in line or "quantize_rows" in line]
    assert sorted(kernels) == sorted(set(kernels))
    assert {"quantize", "multiply"} <= {name.rpartition("_")[0] for name in kernels}


def test_nothing_is_between_the_kernels_of_a_block_with_gates(payloads: Mapping[str, Path]) -> None:
    assert not [kernel["name"] for kernel in kernels_of(payloads["gated"]) if "triton" in kernel["name"]]


def test_the_input_of_layers_in_fp8_is_made_by_the_norm_before_them_once(payloads: Mapping[str, Path]) -> None:
    code = code_of(payloads["eighths"]).partition("def call(")[2]
    lines = [line for line in code.splitlines() if not line.lstrip().startswith("#")]
    assert not [line for line in lines if "comfy_kitchen" in line]
    products = [line for line in lines if "._scaled_mm(" in line]
    assert len(products) == 3 and len({line.partition("_scaled_mm(")[2].partition(",")[0] for line in products}) == 1
    launches = [line for line in lines if "triton_" in line and ".run(" in line]
    assert len([line for line in launches if "rms_norm" in line and "_to_copy" in line]) == 1 and len(launches) == 2


# the kernel is compiled in kernels/test_scaled_linear.py; others in Gluon are lowered in test_lower_convolutions.py
@pytest.mark.large
@pytest.mark.parametrize("kind", ["sandwich"])
def test_products_in_groups_of_warps_are_lowered_too(kind: str, tmp_path: Path) -> None:
    """As where they were measured to be the fastest: with descriptors, for which the launch has memory."""
    payload = lowered_ahead(tmp_path, [kind], OPTIONS, captured)[kind]
    names = [kernel["name"] for kernel in kernels_of(payload)]
    assert "multiply_in_groups" in names and not [name for name in names if name.rpartition("_")[0] == "multiply"]
    assert "warpgroup_mma(" in code_of(payload)
