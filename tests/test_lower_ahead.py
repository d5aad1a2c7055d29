# SPDX-License-Identifier: Apache-2.0
"""Lowering for a GPU takes no GPU: real graphs for a device that is not there, in a worker that the pool forks."""

from __future__ import annotations

import json
import os
import pickle
import queue
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from nexfort_engine import flags, pool
from nexfort_engine.capture import Captured
from nexfort_engine.conditions import Conditions
from nexfort_engine.config import CompileConfig

pytest.importorskip("triton", reason="kernels for a GPU are compiled with Triton")
if torch.version.cuda is None or torch.cuda.is_available():
    pytest.skip("needs a torch built for CUDA and no GPU: what touches one must fail", allow_module_level=True)

TESTS = Path(__file__).resolve().parent
OPTIONS = CompileConfig.parse(None).inductor_options("cuda")
CHANNELS, WIDTH, EMBEDDING = 64, 128, 256
Tensors = list[torch.Tensor]


def residual(w: Tensors, x: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
    h = functional.conv2d(functional.silu(functional.group_norm(x, 32, w[0], w[1])), w[2], w[3], padding=1)
    h = h + functional.linear(functional.silu(embedding), w[4], w[5])[:, :, None, None]
    return x + functional.conv2d(functional.silu(functional.group_norm(h, 32, w[6], w[7])), w[8], w[9], padding=1)


def transformer(w: Tensors, x: torch.Tensor) -> torch.Tensor:
    batch, tokens, width = x.shape
    parts = functional.linear(functional.layer_norm(x, [width], w[0], w[1]), w[2]).chunk(3, -1)
    q, k, v = (part.view(batch, tokens, width // 64, 64).transpose(1, 2) for part in parts)
    seen = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)
    x = x + functional.linear(seen, w[3], w[4])
    return x + functional.linear(
        functional.gelu(functional.linear(functional.layer_norm(x, [width], w[5], w[6]), w[7], w[8])), w[9], w[10]
    )


C, D, E = CHANNELS, WIDTH, EMBEDDING
# function, type, shapes of the weights, shapes of the inputs with the dimensions that are symbols
BLOCKS: dict[str, tuple[Callable[..., torch.Tensor], torch.dtype, list[Any], list[Any]]] = {
    "residual": (
        residual,
        torch.half,
        [(C,), (C,), (C, C, 3, 3), (C,), (C, E), (C,), (C,), (C,), (C, C, 3, 3), (C,)],
        [((2, C, 64, 64), (0, 2, 3)), ((2, E), (0,))],
    ),
    "transformer": (
        transformer,
        torch.bfloat16,
        [(D,), (D,), (3 * D, D), (D, D), (D,), (D,), (D,), (4 * D, D), (4 * D,), (D, 4 * D), (D,)],
        [((2, 4096, D), (0, 1))],
    ),
}


class _Lifted(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, weights: Tensors, inputs: Tensors) -> Tensors:
        return [self.function(weights, *inputs)]


def _never() -> str:
    raise AssertionError("the worker did not do it")


def captured(kind: str) -> Captured:
    """A block's graph as a process with a GPU captures it."""
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    function, dtype, weights, inputs = BLOCKS[kind]
    with FakeTensorMode(shape_env=ShapeEnv()):
        args = tuple(
            [torch.empty(shape, dtype=dtype, device="cuda:0") for shape in shapes]
            for shapes in (weights, [shape for shape, _ in inputs])
        )
    free = [dict.fromkeys(symbols, torch.export.Dim.AUTO) for _, symbols in inputs]
    dims = ([{} for _ in weights], free)
    with torch.no_grad():
        graph = torch.export.export(_Lifted(function), args, dynamic_shapes=dims, strict=False).graph_module
    return Captured(graph, [], [], [], [], [], Conditions([], []), [], [], None, [], [], {})


@pytest.fixture(scope="module")
def payloads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each block lowered by one forked worker, which has never seen a device."""
    folder = tmp_path_factory.mktemp("lowered")
    answers: queue.Queue[str | None] = queue.Queue()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TESTS))
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # or CUDA's runtime would be asked for devices, and no worker forked
        with pool.Pool(1, "cuda", None) as helpers:
            for kind in BLOCKS:
                (folder / kind).mkdir()
                helpers.submit(
                    captured(kind), folder / kind, ["pretended_worker"], OPTIONS, "cuda:0", answers.put, _never
                )
            assert [answers.get(timeout=300) for _ in BLOCKS] == [None] * len(BLOCKS)
    return {kind: folder / kind / "payload" for kind in BLOCKS}


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_worker_without_a_device_makes_the_whole_artefact(kind: str, payloads: dict[str, Path]) -> None:
    assert len(list((payloads[kind] / "aotautograd").iterdir())) == 1
    kernels = _kernels(payloads[kind])
    assert len(kernels) >= 4
    assert {kernel["target"]["arch"] for kernel in kernels} == {90}


@pytest.mark.parametrize("kind", BLOCKS)
def test_every_kernel_has_one_configuration_so_nothing_is_ever_timed(kind: str, payloads: dict[str, Path]) -> None:
    names = [kernel["name"] for kernel in _kernels(payloads[kind])]
    assert sorted(names) == sorted(set(names))


def test_symbols_stay_symbols(payloads: dict[str, Path]) -> None:
    (code,) = (text for file in payloads["transformer"].rglob("*.py") if "def call(" in (text := file.read_text()))
    call = code.partition("def call(")[2].partition("runner = ")[0]
    assert "_scaled_dot_product_flash_attention" in call
    assert "4096" not in call


def test_what_is_done_before_a_fork_asks_no_device() -> None:
    """Without a GPU every question to CUDA's runtime raises; with one it would keep the forked workers from it."""
    code = (
        "import os, torch; from nexfort_engine import worker; worker._warm_up('cuda'); "
        "pid = os.fork(); pid or os._exit(torch.cuda._is_in_bad_fork() or torch.cuda.is_initialized()); "
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=TESTS.parent, env=variables)


def _kernels(payload: Path) -> list[dict[str, Any]]:
    """What Triton says of the kernels that are inside the stored graph."""
    found = []
    (folder,) = (payload / "fxgraph").glob("*/*")
    for file in folder.iterdir():
        with flags.inductor_scope(payload, OPTIONS):
            graph = pickle.loads(file.read_bytes())
        for bundled in graph._triton_bundle.kernel_artifacts:
            names = [artifact.filename for artifact in bundled.artifacts]
            assert sum(name.endswith(".cubin") for name in names) == 1, names
            found += [
                json.loads(artifact.payload)
                for artifact in bundled.artifacts
                if artifact.filename.endswith(".json") and not artifact.filename.startswith("__grp__")
            ]
    return found
