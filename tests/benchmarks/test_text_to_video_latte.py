# SPDX-License-Identifier: Apache-2.0
"""text_to_video_latte.py on a tiny Latte: a real video, eager's frames, an artefact for space and one for time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from subjects import graphs_as_they_are

import nexfort_engine
from benchmarks import text_to_video_latte
from benchmarks.random_pipelines import build

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("threads", "artefact_cache")
TOLERANCE = 1e-3


@pytest.fixture(autouse=True)
def _graphs() -> Iterator[None]:
    with graphs_as_they_are():
        yield


def run(tmp_path: Path, *flags: str, compiler: str = "nexfort") -> dict[str, Any]:
    """The figures of a command that ends well."""
    command = ["--model", "tiny:latte", "--steps", "2", "--compiler", compiler, "--device", "cpu"]
    assert text_to_video_latte.main([*command, "--json", str(tmp_path / "found.json"), *flags]) == 0
    return json.loads((tmp_path / "found.json").read_text())


@pytest.mark.large  # tests/benchmarks/test_text_to_image.py has the same for pictures
def test_the_video_has_the_frames_and_eager_s_picture(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    video = tmp_path / "latte.mp4"
    found = run(tmp_path, "--output-video", str(video), "--fps", "6")
    assert found["finite"] and not found["warmup_made"]["eager"]
    assert found["likeness_to_eager"]["latents"] < TOLERANCE and found["likeness_to_eager"]["ssim"] > 0.999
    with av.open(str(video)) as file:
        assert file.streams.video[0].average_rate == 6
        assert [frame.to_image().size for frame in file.decode(video=0)] == [(64, 64)] * 4


@pytest.mark.large  # of pictures it is in test_text_to_image.py
def test_a_quantised_run_says_its_plan_and_its_distance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--quantize", "--quantize-config", '{"quant_type": "int8_dynamic"}')
    found = run(tmp_path, *asked, "--output-video", str(tmp_path / "v.gif"))
    assert found["likeness_to_quantised_eager"]["latents"] < TOLERANCE < found["likeness_to_eager"]["latents"] < 0.3
    packed = [row["layer"] for row in found["quantisation"]["parts"]["transformer"] if row["type"]]
    assert {name.partition(".")[0] for name in packed} == {"transformer_blocks", "temporal_transformer_blocks"}
    assert "transformer: 32 of 38 linear layers as int8_dynamic" in capsys.readouterr().out


def test_size_seed_and_schedule_are_what_was_asked(tmp_path: Path) -> None:
    kept = str(tmp_path / "kept.pt")
    more = ("--output-video", str(tmp_path / "v.gif"), "--width", "32")
    found = run(tmp_path, *more, "--save-result", kept, compiler="none")
    assert found["size"] == [64, 32] and found["seed"] == 25
    result = torch.load(kept, weights_only=True)
    assert result["latents"].shape == (1, 4, 4, 8, 4) and result["pixels"].shape == (4, 3, 64, 32)
    other = run(tmp_path, *more, "--seed", "1", "--reference", kept, compiler="none")
    assert other["likeness_to_reference"]["latents"] > 0.1
    schedule = ("--beta-start", "0.01", "--beta-end", "0.2")
    bent = run(tmp_path, *more, *schedule, "--reference", kept, compiler="none")
    assert bent["likeness_to_reference"]["latents"] > 0.01
    still = run(tmp_path, *more, "--enable_temporal_attentions", "false", "--reference", kept, compiler="none")
    assert still["likeness_to_reference"]["latents"] > 0.01


def test_blocks_in_space_and_in_time_are_two_artefacts() -> None:
    pipe = build("tiny:latte", torch.device("cpu"), torch.float32)
    pipe.set_progress_bar_config(disable=True)
    compiled = nexfort_engine.compile_pipe(pipe, ignores=("vae",))
    call = {"num_inference_steps": 2, "output_type": "latent", "clean_caption": False, "video_length": 4}
    compiled("a cat", height=64, width=64, **call)
    found = compiled.reports["transformer"].as_dict()
    blocks = [row for row in found["artefacts"] if "transformer_blocks." in row["region"]]
    assert sorted(row["region"].split(".")[0] for row in blocks) == [
        "temporal_transformer_blocks",
        "transformer_blocks",
    ]
    assert len({row["key"] for row in blocks}) == 2
    mark = compiled.reports["transformer"].mark()
    compiled("a dog", height=96, width=64, num_images_per_prompt=2, **call)
    new = compiled.reports["transformer"].since(mark)
    assert not new["artefacts"], "another size and number are the same artefacts"
