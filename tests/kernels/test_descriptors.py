# SPDX-License-Identifier: Apache-2.0
"""Kernels for which the card copies by descriptors: where they are called, and by whom they are launched."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import gpu_blocks
import pytest
import torch

import nexfort_engine
from nexfort_engine.compilation import lookup
from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.config.option_catalogue import OPTION_ROWS
from nexfort_engine.config.pass_catalogue import NEEDS, PASSES, Need
from nexfort_engine.kernels import gluon_support

pytest.importorskip("triton", reason="the kernels are Triton's")
SWITCHES = ("convolution", "gated_linear", "unpadded_attention", "upsampled_convolution")


LAUNCHER = ("torch", "_inductor/runtime/static_triton_launcher.py")
WRITER = ("torch", "_inductor/codegen/wrapper.py")
TILES = ("triton", "experimental/gluon/language/nvidia/hopper/tma.py")


def lacking(monkeypatch: pytest.MonkeyPatch, missing: tuple[str, str] | None, text: str | None = "") -> None:
    """Have one file of torch or Triton hold another text; None: it is not there."""
    there = gluon_support._text
    monkeypatch.setattr(gluon_support, "_text", lambda *file: text if file == missing else there(*file))


@pytest.mark.parametrize(
    ("card", "missing", "hip", "asked", "reason"),
    [
        ((9, 0), None, None, None, None),
        ((9, 0), LAUNCHER, None, None, "static_triton_launcher.py has no class StaticallyLaunchedCudaKernel"),
        ((9, 0), WRITER, None, None, "wrapper.py has no async_compile.triton"),
        ((9, 0), TILES, None, None, "tma.py has no async_load and no async_copy_global_to_shared"),
        ((9, 0), None, "6.4", None, "for NVIDIA's cards"),
        ((8, 9), None, None, None, ""),
        ((8, 9), None, None, True, "this card has 8.9"),
    ],
)
def test_they_are_chosen_where_they_can_be_called_and_the_report_says_where_they_are_missed(
    card: tuple[int, int],
    missing: tuple[str, str] | None,
    hip: str | None,
    asked: bool | None,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None: they are chosen. An empty text: they are not, and nobody expects it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: card)
    lacking(monkeypatch, missing)
    monkeypatch.setattr(torch.version, "hip", hip)
    options = {} if asked is None else {"options": {f"fuse.{name}": asked for name in SWITCHES}}
    compiled = nexfort_engine.compile(torch.nn.Linear(2, 2), options=options)
    found = compiled._nexfort_engine.builder.finder.options("cuda")
    assert [found[f"nexfort.{name}"] for name in SWITCHES] == [reason is None] * len(SWITCHES)
    assert found["nexfort.few_keys_attention"] is (card == (9, 0) and hip is None)
    notes = [note for note in compiled.report.as_dict()["notes"] if "fuse." in note]
    if reason:
        (note,) = notes
        assert reason in note and all(f"fuse.{name}" in note for name in SWITCHES)
        assert all(OPTION_ROWS[f"fuse.{name}"].gain in note for name in SWITCHES), "what it costs"
    else:
        assert not notes
    on_a_cpu = CompileConfig.parse("O2").lowering_options("cpu")
    assert not any(on_a_cpu[f"nexfort.{name}"] for name in SWITCHES)


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        (11080, "need a driver for CUDA 12.0 or newer, found one for CUDA 11.8"),
        (12000, None),
        (13010, None),
        (None, None),
    ],
)
def test_a_driver_that_is_too_old_is_a_reason(
    driver: int | None, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose version cannot be read is none."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(gluon_support, "driver_version", lambda: driver)
    compiled = nexfort_engine.compile(torch.nn.Linear(2, 2))
    found = compiled._nexfort_engine.builder.finder.options("cuda")
    assert [found[f"nexfort.{name}"] for name in SWITCHES] == [reason is None] * len(SWITCHES)
    assert found["nexfort.few_keys_attention"], "it writes none"
    notes = [note for note in compiled.report.as_dict()["notes"] if "fuse." in note]
    assert len(notes) == (reason is not None) and all(str(reason) in note for note in notes)


@pytest.mark.parametrize(("card", "asked"), [((9, 0), None), ((12, 0), None), ((12, 0), True), ((8, 9), True)])
def test_a_kernel_for_another_card_needs_a_row_and_nothing_else(
    card: tuple[int, int], asked: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pass is on where its card is, and that of the same option for the first card is not missed there."""
    (first,) = (one for one in PASSES if one.name == "gated_linear")
    other = dataclasses.replace(first, name="gated_linear_other", needs="other")
    monkeypatch.setitem(NEEDS, "other", Need("cards of 12.0", cards=((12, 0),)))  # type: ignore[misc]
    monkeypatch.setattr(lookup, "PASSES", (*PASSES, other))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: card)
    compiled = nexfort_engine.compile(
        torch.nn.Linear(2, 2), options={"options": {first.option: asked}} if asked else {}
    )
    given = CompileConfig.lowering_options
    monkeypatch.setattr(CompileConfig, "lowering_options", lambda *_: {**given(*_), other.switch: True})
    found = compiled._nexfort_engine.builder.finder.options("cuda")
    assert (found[first.switch], found[other.switch]) == (card == (9, 0), card == (12, 0))
    notes = [note for note in compiled.report.as_dict()["notes"] if first.option in note]
    assert len(notes) == (card == (8, 9)), "where neither is"


def test_one_that_is_switched_off_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    lacking(monkeypatch, LAUNCHER, None)
    compiled = nexfort_engine.compile(torch.nn.Linear(2, 2), options={"options": {"fuse.gated_linear": False}})
    compiled._nexfort_engine.builder.finder.options("cuda")
    (note,) = (note for note in compiled.report.as_dict()["notes"] if "fuse." in note)
    assert "fuse.unpadded_attention" in note and "fuse.gated_linear" not in note


_COMPILED = """
import importlib.util
import sys
import pytest
import torch
from pretended_gpu import pretend
from torch._inductor import config
from torch._inductor.runtime.static_triton_launcher import StaticallyLaunchedCudaKernel

pretend(pytest.MonkeyPatch())
config.use_static_cuda_launcher = config.static_launch_user_defined_triton_kernels = False
spec = importlib.util.spec_from_file_location("kernel", sys.argv[1])
spec.loader.exec_module(kernel := importlib.util.module_from_spec(spec))
(made,) = (value for value in vars(kernel).values() if hasattr(value, "compile_results"))
(result,) = made.compile_results
assert isinstance(result.kernel, StaticallyLaunchedCudaKernel), result
assert not config.use_static_cuda_launcher and not config.static_launch_user_defined_triton_kernels
"""


@pytest.mark.large  # a process of its own; other tests launch one in theirs
@pytest.mark.skipif(torch.version.cuda is None or torch.cuda.is_available(), reason="a torch for CUDA, without a GPU")
def test_one_is_launched_so_from_a_process_whose_inductor_began_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As processes are that Inductor began before a model was compiled here."""
    tests = str(Path(gpu_blocks.__file__).parent)
    monkeypatch.setenv("PYTHONPATH", tests)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    options = CompileConfig.parse("O2").lowering_options("cuda")
    payload = gpu_blocks.lowered(tmp_path, "pretended_worker", ["shifted"], options)["shifted"]
    made = {file: file.read_text() for file in payload.rglob("*.py")}
    (kernel,) = (file for file, text in made.items() if "gluon_autotune(" in text and "def call(" not in text)
    kernel.write_text(made[kernel].replace("triton_helpers.set_driver_to_gpu()", ""))
    monkeypatch.setenv("PYTHONPATH", f"{tests}:{Path(tests).parents[1]}")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    subprocess.run([sys.executable, "-c", _COMPILED, str(kernel)], check=True, timeout=300)
