# SPDX-License-Identifier: Apache-2.0
"""`nexfort tune`: what it says, keeps and writes, on a pretended card."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nexfort_engine.cli import tune_command
from nexfort_engine.cli.main import main
from nexfort_engine.kernels.scaled_linear import choice
from nexfort_engine.quant import matmul, tune
from nexfort_engine.quant.card_figures import CardFigures, stored

NAME = "Card of a test"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache, and a card that is measured at once."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: NAME)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(matmul, "missing", lambda *_: None)
    monkeypatch.setattr(tune_command, "_host_missing", lambda: None)
    monkeypatch.setattr(tune, "rate", lambda name: 2e12)
    monkeypatch.setattr(tune, "measured", lambda layer: choice.Measured(choice.FORMS[0], 50.0, 100.0))
    monkeypatch.setattr(tune, "ahead", lambda layers, seconds: list(layers))
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    return folder


def test_figures_are_kept_shown_and_written(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "card.json"
    assert main(["tune", "--dir", str(cache), "--export", str(file)]) == 0
    said = capsys.readouterr().out
    kept = stored(cache, NAME)
    assert kept is not None and kept.int8_pays and CardFigures.from_dict(json.loads(file.read_text())) == kept
    assert NAME in said and "are faster than ComfyUI's and are used" in said and str(cache) in said
    assert "2000 GB/s" in said and "2 TFLOP/s" in said and "0.50" in said and "SwiGLU of 10240x3840" in said


def test_a_second_run_measures_what_is_left(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune, "ahead", lambda layers, seconds: list(layers)[:3])
    left = []
    for arguments in ((), (), ("--again",)):
        assert main(["tune", "--dir", str(cache), "--json", *arguments]) == 0
        told = json.loads(capsys.readouterr().out)
        left.append(told["left"])
        assert told["file"].startswith(str(cache)) and told["name"] == NAME
    assert left[0] == left[1] + 3 == left[2]


def test_what_is_not_measured_is_said(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune_command, "_host_missing", lambda: "comfy_kitchen is not installed here")
    assert main(["tune", "--dir", str(cache)]) == 0
    assert "Layers of int8 files were not measured: comfy_kitchen is not installed here." in capsys.readouterr().out
    monkeypatch.setattr(tune_command, "_host_missing", lambda: None)
    assert main(["tune", "--dir", str(cache), "--seconds", "0"]) == 0
    assert "measurements are left. Run the command again" in capsys.readouterr().out


def test_without_a_card_or_a_place_it_says_so(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (cache.parent / "file").write_text("")
    assert main(["tune", "--dir", str(cache.parent / "file" / "cache")]) != 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["tune", "--dir", str(cache)]) == 1
    assert "finds no NVIDIA GPU here" in capsys.readouterr().err
