# SPDX-License-Identifier: Apache-2.0
"""What is said of a kernel's arguments where Inductor would read it; the worker of tests does both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lowering_ahead import lowered_ahead
from pretended_gpu import READ

import nexfort_engine
from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.lowering import worker_pool

pytest.importorskip("triton", reason="the kernels are Triton's")
KINDS = {"O2": ["widened", "upsampled", "prompted", "gated"], "O3": ["computed_heads"]}
KERNELS = {
    "O2": {
        *("attend_few", "convolve", "factors_of_groups", "lay_innermost", "moments_of_chunks", "multiply_gated"),
        *("multiply_rows", "sum_places"),
    },
    "O3": {"attend", "narrow_keys_values"},
}


@pytest.mark.skipif(torch.version.cuda is None or torch.cuda.is_available(), reason="a torch for CUDA, without a GPU")
@pytest.mark.large  # the worker compares for every block that other tests lower; here is which kernels it came by
@pytest.mark.parametrize("mode", KINDS)
def test_a_kernel_writes_to_what_is_said_that_it_writes_to(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool._Forker, "_current", None)  # one that is there has another environment
    monkeypatch.setenv(READ, str(tmp_path / "read"))
    lowered_ahead(tmp_path, KINDS[mode], CompileConfig.parse(mode).lowering_options("cuda"))
    assert set((tmp_path / "read").read_text().split()) == KERNELS[mode]


def test_what_is_written_into_artefacts_has_no_backslash() -> None:
    """Inductor writes it between quotes, where Python warns of a backslash that begins no escape."""
    kernels = Path(nexfort_engine.__file__).parent / "kernels"
    files = [kernels / "gluon_autotuner.py", *kernels.glob("*/gluon_kernel.py"), *kernels.glob("*/triton_kernel.py")]
    assert len(files) > 8 and not [file for file in files if "\\" in file.read_text(encoding="utf-8")]
