# SPDX-License-Identifier: Apache-2.0
"""Nodes of CUDA graphs that fill memory, as kernels."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from nexfort_engine.cudagraphs import memset_nodes
from nexfort_engine.system.cuda_driver import library

BLACKWELL = 100  # from which on Triton's own assembler is another program


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_the_kernels_assemble_for_every_card(capability: int, tmp_path: Path) -> None:
    triton = pytest.importorskip("triton", reason="Triton missing")
    name = "ptxas-blackwell" if capability >= BLACKWELL else "ptxas"
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    (tmp_path / "fill.ptx").write_text(memset_nodes.PTX)
    given = [f"-arch=sm_{capability}", str(tmp_path / "fill.ptx"), "-o", str(tmp_path / "fill.cubin")]
    subprocess.run([str(assembler), *given], check=True, timeout=60)
    assert (tmp_path / "fill.cubin").stat().st_size > 0


@pytest.mark.gpu
def test_they_fill_what_the_nodes_did() -> None:
    """Values of one, two and four bytes, at odd places, a few and many."""
    rows = [(1, 0x7B, 4, 4), (1, 0xAB, 5, 1), (2, 0x1234, 7, 6), (4, 0xDEADBEEF, 100_001, 8), (1, 0, 4096, 16)]
    buffers = [torch.full((500_000,), 9, dtype=torch.uint8, device="cuda") for _ in rows]
    x = torch.ones(4, device="cuda")
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        y = x + 1
    raw = ctypes.c_void_p(graph.raw_cuda_graph())
    context = ctypes.c_void_p()
    assert library().cuCtxGetCurrent(ctypes.byref(context)) == 0
    for (size, value, count, at), buffer in zip(rows, buffers, strict=True):
        fill = memset_nodes._Fill(buffer.data_ptr() + at, 0, value, size, count, 1)
        made = ctypes.c_void_p()
        given = (ctypes.byref(made), raw, None, ctypes.c_size_t(0), ctypes.byref(fill), context)
        assert library().cuGraphAddMemsetNode(*given) == 0
    assert memset_nodes.editable() and memset_nodes.fills_as_kernels(raw.value or 0) == len(rows)
    assert memset_nodes.fills_as_kernels(raw.value or 0) == 0, "there is none left"
    graph.instantiate()
    graph.replay()
    torch.cuda.synchronize()
    assert y.tolist() == [2, 2, 2, 2]
    for (size, value, count, at), buffer in zip(rows, buffers, strict=True):
        wanted = torch.full((500_000,), 9, dtype=torch.uint8)
        one = (value & (256**size - 1)).to_bytes(size, "little")
        wanted[at : at + size * count] = torch.frombuffer(bytearray(one * count), dtype=torch.uint8)
        assert torch.equal(buffer.cpu(), wanted), (size, hex(value), count, at)


@pytest.mark.gpu
def test_what_comes_before_and_after_stays_in_order() -> None:
    """cuDNN's attention has a few bytes set to zero before each call."""
    graph, x = torch.cuda.CUDAGraph(keep_graph=True), torch.randn(2, 256, 4, 64, device="cuda", dtype=torch.float16)

    def run() -> torch.Tensor:
        y = x.transpose(1, 2)
        for _ in range(20):
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
                y = torch.nn.functional.scaled_dot_product_attention(y, y, y) + x.transpose(1, 2)
        return y

    with torch.inference_mode():
        run()
        with torch.cuda.graph(graph):
            found = run()
        assert memset_nodes.fills_as_kernels(graph.raw_cuda_graph()) == 20
        graph.instantiate()
        for number in range(3):
            x.add_(number)
            graph.replay()
            assert torch.equal(found, run())
