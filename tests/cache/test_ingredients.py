# SPDX-License-Identifier: Apache-2.0
"""What an artefact's key and manifest are made of, seen from a real engine: each ingredient alone, and what is none.

The pure functions are tested in test_key.py, the checks of the store in the store's own tests.
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from large_rows import few
from subjects import graphs_as_they_are
from torch import nn

import nexfort_engine
from nexfort_engine import engine
from nexfort_engine.api import wrap_methods
from nexfort_engine.cache import key
from nexfort_engine.cache.store import Store
from nexfort_engine.compilation import lookup, model_keys
from nexfort_engine.config.compile_config import CompileConfig


class Block(nn.Module):
    """One of several alike; `scale` is a scalar that its code reads."""

    def __init__(self, width: int = 8, scale: float = 2.0) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(width, width), scale

    def forward(self, x: torch.Tensor, gain: float = 1.0) -> torch.Tensor:
        return torch.relu(self.linear(x)) * self.scale * gain


class OtherBlock(Block):
    """The same code under another name."""


class Net(nn.Module):
    """A backbone of two blocks."""

    def __init__(self, kind: type[Block] = Block, width: int = 8, scale: float = 2.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind(width, scale) for _ in range(2))
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor, gain: float = 1.0) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, gain)
        return x


def report_after(
    root: Path, net: nn.Module, *args: Any, options: dict[str, Any] | None = None, name: str = "", **kwargs: Any
) -> dict[str, Any]:
    """The report of a fresh engine on the store at `root` after one call."""
    made = engine.Engine(net, CompileConfig.parse(options), Store(root), name=name)
    with torch.inference_mode():
        wrap_methods(net, made, ("forward",))(*args, **kwargs)
    return made.report.as_dict()


def primary_of(report: dict[str, Any]) -> str:
    keys = {row["key"] for row in report["regions"]}
    assert len(keys) == 1, "two blocks of one structure share a key"
    return keys.pop()


@pytest.fixture(autouse=True)
def forgetful() -> Any:
    """Facts about the machine are collected once a process; here they change."""
    caches = (key._environment_parts, key.engine_source_hash, key.cpu_facts)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


X = torch.linspace(-1, 1, 48).view(2, 3, 8)
Change = Callable[[pytest.MonkeyPatch, Path], dict[str, Any]]


def _patched(where: Any, name: str, value: Any) -> Change:
    def change(patch: pytest.MonkeyPatch, _folder: Path) -> dict[str, Any]:
        patch.setattr(where, name, value)
        return {}

    return change


def _edited_engine(patch: pytest.MonkeyPatch, folder: Path) -> dict[str, Any]:
    package = Path(key.__file__).parent.parent
    shutil.copytree(package, folder / "engine", ignore=shutil.ignore_patterns("__pycache__"))
    with open(folder / "engine" / "lowering" / "inductor.py", "a", encoding="utf-8") as file:
        file.write("# another pass\n")
    patch.setattr(key, "engine_source_hash", functools.partial(key.engine_source_hash, folder / "engine"))
    return {}


def _facts(kind: str, capability: list[int]) -> Callable[[str], list[object]]:
    return lambda _device: ["cuda", kind, capability, None]


CHANGES: dict[str, Change] = {
    "engine source": _edited_engine,
    "torch": _patched(torch, "__version__", "2.99.0"),
    "torch build": _patched(torch.version, "git_version", "0" * 40),
    "torch CUDA": _patched(torch.version, "cuda", "99.1"),
    "triton": _patched(key, "triton_versions", lambda: {"triton": "99.0"}),
    "python": _patched(key.sys, "version_info", (3, 99, 0)),
    "platform": _patched(platform, "machine", lambda: "riscv64"),
    "CPU model": _patched(key, "cpu_facts", lambda: ("Another CPU", "0" * 16)),
    "limit to instructions": _patched(key.os, "environ", {**os.environ, "ATEN_CPU_CAPABILITY": "avx2"}),
    "GPU name": _patched(key, "device_facts", _facts("A card", [9, 0])),
    "GPU capability": _patched(key, "device_facts", _facts("A card", [10, 0])),
    "config": lambda *_: {"options": {"mode": "max-autotune"}},
    "dynamic": lambda *_: {"options": {"dynamic": False}},
    "class": lambda *_: {"net": Net(OtherBlock)},
    "width": lambda *_: {"net": Net(width=16), "x": torch.cat([X, X], -1)},
    "dtype": lambda *_: {"net": Net().double(), "x": X.double()},
    "rank": lambda *_: {"x": X[0]},
    "argument": lambda *_: {"gain": 3.0},
}


@pytest.mark.parametrize("name", few(list(CHANGES), 9))
def test_each_ingredient_alone_changes_the_key(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with graphs_as_they_are():
        before = primary_of(report_after(tmp_path / "a", Net(), X))
        key._environment_parts.cache_clear()
        call = CHANGES[name](monkeypatch, tmp_path)
        key.environment_parts("cpu")  # is kept; nothing else is to see the change
        monkeypatch.undo()
        net, x = call.pop("net", None) or Net(), call.pop("x", X)
        assert primary_of(report_after(tmp_path / "b", net, x, **call)) != before


def test_the_two_gpu_facts_count_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    with graphs_as_they_are():
        for facts in (("A card", [9, 0]), ("Another card", [9, 0]), ("A card", [10, 0])):
            monkeypatch.setattr(key, "device_facts", _facts(*facts))
            key._environment_parts.cache_clear()
            key.environment_parts("cpu")
            monkeypatch.undo()
            found.add(primary_of(report_after(tmp_path, Net(), X)))
    assert len(found) == 3


def _moved_engine(patch: pytest.MonkeyPatch, folder: Path) -> dict[str, Any]:
    package = Path(key.__file__).parent.parent
    shutil.copytree(package, folder / "elsewhere", ignore=shutil.ignore_patterns("__pycache__"))
    for file in (folder / "elsewhere").rglob("*.py"):
        os.utime(file, (1, 1))
    patch.setattr(key, "engine_source_hash", functools.partial(key.engine_source_hash, folder / "elsewhere"))
    return {}


def _years_later(patch: pytest.MonkeyPatch, _folder: Path) -> dict[str, Any]:
    import time

    now = time.time()
    patch.setattr(time, "time", lambda: now + 1e8)
    return {}


SAME: dict[str, Change] = {
    "where the engine lies": _moved_engine,
    "time": _years_later,
    "order of options": lambda *_: {"options": {"dynamic": True, "mode": "O2"}},
    "order of mode tokens": lambda *_: {"options": {"mode": "O2:O2"}},
    "the model's name": lambda *_: {"name": "another-file.safetensors"},
    "weights": lambda *_: {"net": Net()},
    "sizes": lambda *_: {"x": torch.cat([X, X], 1)},
}


@pytest.mark.parametrize("name", few(list(SAME), 4))
def test_what_must_not_matter_leaves_the_key(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with graphs_as_they_are():
        before = report_after(tmp_path / "store", Net(), X, options={"mode": "O2", "dynamic": True})
        key._environment_parts.cache_clear()
        call: dict[str, Any] = {"options": {"mode": "O2", "dynamic": True}, **SAME[name](monkeypatch, tmp_path)}
        key.environment_parts("cpu")
        monkeypatch.undo()
        after = report_after(tmp_path / "store", call.pop("net", None) or Net(), call.pop("x", X), **call)
    assert primary_of(after) == primary_of(before)
    assert before["artefacts_compiled"] == 1 and after["artefacts_compiled"] == 0 and not after["eager"]


# ---- the second stage: the manifest ------------------------------------------------------------------------------


def test_an_artefact_says_for_whom_it_was_made(tmp_path: Path) -> None:
    with graphs_as_they_are():
        report_after(tmp_path, Net(), X, name="Family")
    (entry,) = Store(tmp_path).entries()
    info = entry.manifest["info"]
    assert (info["region"], info["kind"], info["family"]) == ("blocks.0", "Block", "Family")
    assert info["machine"] == key.machine("cpu") and info["fingerprint"] in key.fingerprints()
    assert entry.manifest["driver"] is None and key.driver_problem(None) is None


def test_an_artefact_for_a_newer_driver_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_keys, "driver_needed", lambda _device: 99000)
    monkeypatch.setattr(key, "driver_version", lambda: 13010)
    with graphs_as_they_are():
        report_after(tmp_path, Net(), X)
        lookup._loaded.clear()
        after = report_after(tmp_path, Net(), X)
    assert any("needs a driver for CUDA 99.0, found one for CUDA 13.1" in note for note in after["notes"])
    assert after["artefacts_loaded"] == 0


@pytest.mark.gpu
def test_the_driver_of_a_card_that_torch_can_use_is_new_enough() -> None:
    found, needed = key.driver_version(), key.driver_needed("cuda")
    assert found is not None and needed is not None and found >= needed and key.driver_problem(needed) is None


def test_an_artefact_whose_scalars_differ_is_not_used(tmp_path: Path) -> None:
    x = X[:, :, :8]
    with graphs_as_they_are():
        assert report_after(tmp_path, Net(scale=2.0), x)["artefacts_compiled"] == 1
        assert report_after(tmp_path, Net(scale=3.0), x)["artefacts_compiled"] == 1
        again = report_after(tmp_path, Net(scale=2.0), x)
    assert again["artefacts_compiled"] == 0 and nexfort_engine.__version__
