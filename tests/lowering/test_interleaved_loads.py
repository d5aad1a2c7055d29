# SPDX-License-Identifier: Apache-2.0
"""Kernels that turn numbers in pairs read each once, and give what the same code gives without that."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import sympy
import torch
from gpu_blocks import TURNED
from large_rows import few
from lowering_ahead import LoweredOnDemand

from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.lowering import interleaved_loads

pytest.importorskip("triton", reason="the kernels are Triton's")
if torch.version.cuda is None or torch.cuda.is_available():
    pytest.skip("needs a torch built for CUDA and no GPU: what touches one must fail", allow_module_level=True)

TESTS = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], str]:
    """Gives the one kernel of a block, in which pairs are read once or not."""
    payloads = {}
    for once in (True, False):
        options = CompileConfig.parse({"mode": "O2", "options": {"fuse.rotary": once}}).lowering_options("cuda")
        payloads[once] = LoweredOnDemand(tmp_path_factory.mktemp("pairs"), options)

    def kernel(kind: str, once: bool) -> str:
        files = payloads[once][kind].rglob("*.py")
        (code,) = (text for file in files if "def call(" in (text := file.read_text()))
        (found,) = re.findall(r"async_compile\.triton\('\w+', '''(.*?)''', device_str", code, re.DOTALL)
        return str(found)

    return kernel


KINDS = few(list(TURNED), ["turned_heads"])  # one with a norm has all that the others have


@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_reads_no_partner_and_a_pair_s_matrix_in_one_piece(
    kind: str, kernels: Callable[[str, bool], str]
) -> None:
    reads = {once: kernels(kind, once).count("tl.load(") for once in (True, False)}
    each = 1 if kind == "turned_alone" else 2  # numbers, and weights of a norm
    assert reads[False] == 2 * each + 2, "with the partners of each, and two numbers of the matrix"
    assert reads[True] == each + 1
    assert kernels(kind, True).count("tl.arange(0, 4)") == 1
    assert kind == "turned_alone" or "R0_BLOCK: tl.constexpr = " in kernels(kind, True), "a row in registers"


@pytest.mark.parametrize("kind", KINDS)
def test_its_numbers_are_those_of_a_kernel_that_reads_pairs_twice(
    kind: str, kernels: Callable[[str, bool], str], tmp_path: Path
) -> None:
    for once in (True, False):
        (tmp_path / f"kernel_{once}.py").write_text(_runnable(kernels(kind, once)))
    dtype = str(TURNED[kind][1]).removeprefix("torch.")
    variables = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(tmp_path)}
    script = [sys.executable, str(TESTS / "kernels" / "interpreted_pairs.py"), kind, dtype]
    done = subprocess.run(script, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _runnable(kernel: str) -> str:
    """A kernel's code for Triton's interpreter, which knows no functions of CUDA's library."""
    bare = re.sub(r"@triton_heuristics\.\w+\(.*?\n\)\n@triton\.jit", "@triton.jit", kernel, flags=re.DOTALL)
    bare = bare.replace("triton_helpers.set_driver_to_gpu()", "").replace("libdevice.rsqrt", "tl.rsqrt")
    return re.sub(r"def triton_\w+\(", "def kernel(", bare)


# ---- which places are pairs ------------------------------------------------------------------------------------------


def _seen(place: str, length: int = 64, *, by_entries: bool = False) -> interleaved_loads._Pairs | None:
    """What is seen in a place of a kernel over rows of x and numbers r of a row; h is which head of a row.

    by_entries: a number's half and parity are ranges of the kernel themselves.
    """
    from torch.utils._sympy.functions import FloorDiv, ModularIndexing

    x, r, h = (sympy.Symbol(name, integer=True, nonnegative=True) for name in ("x0", "r0_1", "r0_2"))
    root = SimpleNamespace(tensor_dim=1, numel=4 * length)
    entries = {
        r: SimpleNamespace(symbol=lambda: r, divisor=1, length=sympy.Integer(length), root=root),
        h: SimpleNamespace(symbol=lambda: h, divisor=length, length=sympy.Integer(4), root=root),
    }
    halves = {
        "half": (FloorDiv(r, 2), ModularIndexing(r, 1, 2)),
        "entries": tuple(sympy.Symbol(f"r0_{at}", integer=True, nonnegative=True) for at in (3, 4)),
    }["entries" if by_entries else "half"]
    if by_entries:
        half, odd = halves
        entries[half] = SimpleNamespace(symbol=lambda: half, divisor=2, length=sympy.Integer(length // 2), root=root)
        entries[odd] = SimpleNamespace(symbol=lambda: odd, divisor=1, length=sympy.Integer(2), root=root)
    kernel = SimpleNamespace(
        prepare_indexing=lambda index: index,
        range_tree_nodes=entries,
        active_range_trees=lambda: [SimpleNamespace(tensor_dim=0), root],
        triton_tensor_ndim=lambda: 2,
    )
    names = {"x": x, "r": r, "h": h, "half": halves[0], "odd": halves[1], "n": sympy.Symbol("s0")}
    return interleaved_loads._pairs(kernel, sympy.sympify(place, locals=names))


@pytest.mark.parametrize("by_entries", [False, True], ids=["expressions", "ranges"])
@pytest.mark.parametrize(
    ("place", "step", "even", "odd"),
    [
        ("1 - odd + 2*half + 256*x", 2, 1, 0),
        ("65 - odd + 2*half + 64*h + 256*x", 2, 1, 0),
        ("3*odd + 4*half + 256*x", 4, 0, 3),
        ("1 + odd + 4*half + 256*x*n", 4, 1, 2),
        ("257 + odd + 4*half", 4, 1, 2),
        ("3*odd + 4*half + 256*h", 4, 0, 3),
    ],
)
def test_partners_and_pieces_are_seen(place: str, step: int, even: int, odd: int, by_entries: bool) -> None:
    found = _seen(place, by_entries=by_entries)
    assert found is not None and (found.step, found.even, found.odd) == (step, even, odd)


@pytest.mark.parametrize("by_entries", [False, True], ids=["expressions", "ranges"])
@pytest.mark.parametrize(
    "place",
    [
        "r + 256*x",
        "4*half + 256*x",  # the same for both of a pair
        "3*odd + 4*half + 2*x",  # pieces that begin anywhere
        "3*odd + 4*half + n*x",
        "2 + 3*odd + 4*half",  # numbers of two pieces
        "odd + 3*half",
        "n*odd + 4*half",
        "1 - odd + 2*half + r",
    ],
)
def test_other_places_are_left_as_they_are(place: str, by_entries: bool) -> None:
    assert _seen(place, by_entries=by_entries) is None


def test_rows_of_an_odd_length_have_numbers_without_a_partner() -> None:
    assert _seen("1 - odd + 2*half + 256*x", 63) is None
