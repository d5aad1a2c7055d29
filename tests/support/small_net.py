# SPDX-License-Identifier: Apache-2.0
"""A network that takes seconds to lower, a cache that holds its artefact, and judges. No test lives here."""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
from torch import nn

import nexfort_engine
from nexfort_engine.compilation import lookup, support

TOLERANCE = 1e-4
ROOT = Path(nexfort_engine.__file__).resolve().parent.parent


class Small(nn.Module):
    """A norm and a product: one region, a few seconds to lower."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.norm, self.up = nn.LayerNorm(16), nn.Linear(16, 24)
        with torch.no_grad():
            self.up.weight.copy_(torch.randn(24, 16, generator=generator))
            self.up.bias.copy_(torch.randn(24, generator=generator))
        self.eval().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.up(self.norm(x)))


def given() -> torch.Tensor:
    """What Small is called with."""
    return torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(4))


def run(module: Any) -> torch.Tensor:
    with torch.inference_mode():
        return module(given()).clone()


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def sentence(text: object, *words: str) -> None:
    """One line that a person can act on: all these words are in it."""
    line = str(text)
    assert "\n" not in line and len(line) < 600, line
    missing = [word for word in words if word not in line]
    assert not missing, f"{missing} not in: {line}"


def assert_runs_eager(compiled: Any, *words: str) -> None:
    """The result is eager's to the last bit, nothing was compiled, and the report gives one reason with these words."""
    assert torch.equal(run(compiled), run(compiled.uncompiled()))
    found = compiled.report.as_dict()
    assert found["artefacts_compiled"] == found["artefacts_loaded"] == 0
    (row,) = found["eager"]
    sentence(row["reason"], *words)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What Nexfort has said to the user so far, warnings and worse."""
    caplog.set_level(logging.WARNING)
    return lambda: [one.getMessage() for one in caplog.records if one.name.startswith("nexfort")]


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """No artefact is found in memory, as in a new process; those of other tests stay there for them."""
    monkeypatch.setattr(lookup, "_loaded", WeakValueDictionary())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgetful: None) -> Path:
    """A cache directory of the test's own, not made yet."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(folder))
    return folder


@pytest.fixture(scope="module")
def filled_once(threads: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds the artefact of Small. To be copied, not used."""
    folder = tmp_path_factory.mktemp("filled") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEXFORT_CACHE_DIR", str(folder))
        patch.setattr(lookup, "_loaded", WeakValueDictionary())
        compiled = nexfort_engine.compile(Small())
        assert distance(run(compiled), run(Small())) < TOLERANCE
        assert compiled.report.as_dict()["artefacts_compiled"] == 1
    return folder


@pytest.fixture
def filled(filled_once: Path, cache: Path) -> Path:
    """A cache of the test's own that holds the artefact of Small."""
    shutil.copytree(filled_once, cache)
    return cache


@pytest.fixture
def fresh_support() -> Iterator[None]:
    """What is known about this machine is found out anew, and forgotten again."""
    support.reason_for.cache_clear()
    yield
    support.reason_for.cache_clear()


def digest(tensor: torch.Tensor) -> str:
    """The exact bits of a result."""
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
