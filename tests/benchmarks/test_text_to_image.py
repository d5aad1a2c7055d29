# SPDX-License-Identifier: Apache-2.0
"""text_to_image.py on tiny pipelines: every metric, every size, the old pages' commands; a picture in a real file.

Graphs are captured for real and not lowered: how they are lowered is tested elsewhere. No time is judged.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from subjects import graphs_as_they_are

from benchmarks import text_to_image

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("threads", "artefact_cache")

# the --compiler-config of every command in the old engine's pages
at_length = functools.partial(pytest.param, marks=pytest.mark.large)  # what `make test-large` runs besides
OLD_CONFIGS = (
    '{"mode": "max-optimize:max-autotune:freezing:benchmark:cudagraphs", "memory_format": "channels_last", '
    '"dynamic": true}',
    '{"mode": "max-optimize:max-autotune:freezing:benchmark:cudagraphs", "memory_format": "channels_last"}',
    '{"mode": "max-autotune", "memory_format": "channels_last"}',
    '{"mode": "jit:disable-runtime-fusion", "memory_format": "channels_last"}',
    '{"mode": "max-optimize:max-autotune:low-precision", "memory_format": "channels_last", "dynamic": true}',
    '{"mode": "cudagraphs:benchmark:max-autotune:low-precision:cache-all", "memory_format": "channels_last", '
    '"options": {"triton.fuse_attention_allow_fp16_reduction": false, "inductor.optimize_linear_epilogue": false, '
    '"overrides.conv_benchmark": true, "overrides.matmul_allow_tf32": true}}',
    '{"mode": "cudagraphs:max-autotune:low-precision:cache-all", "memory_format": "channels_last", "options": '
    '{"inductor.optimize_linear_epilogue": false, "overrides.conv_benchmark": true, '
    '"overrides.matmul_allow_tf32": true}, "dynamic": true}',
    '{"mode": "max-optimize:max-autotune:freezing:benchmark:low-precision", "memory_format": "channels_last", '
    '"options": {"inductor.optimize_linear_epilogue": false, "triton.fuse_attention_allow_fp16_reduction": false}}',
    '{"mode": "max-autotune", "memory_format": "channels_last", "options": {"inductor.optimize_linear_epilogue": '
    'false, "triton.fuse_attention_allow_fp16_reduction": false}}',
)
# the error of ours to eager's picture in float32, after the steps and the VAE
TOLERANCE = 1e-3


@pytest.fixture(autouse=True)
def _graphs() -> Iterator[None]:
    with graphs_as_they_are():
        yield


def run(tmp_path: Path, *flags: str, model: str = "tiny:sd21", compiler: str = "nexfort") -> dict[str, Any]:
    """The figures that a command writes; it must end well."""
    file = tmp_path / "found.json"
    command = ["--model", model, "--scheduler", "none", "--steps", "3", "--compiler", compiler, "--json", str(file)]
    assert text_to_image.main([*command, "--device", "cpu", *flags]) == 0
    return json.loads(file.read_text())


# ---- what every command prints ------------------------------------------------------------------------------


def test_the_metrics_are_said_in_the_old_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(tmp_path, "--output-image", str(tmp_path / "o.png"), "--warmups", "2", compiler="none")
    said = capsys.readouterr().out.splitlines()
    patterns = (
        *("Begin warmup", "End warmup", r"Warmup time: \d+\.\d{3}s", r"Inference time: \d+\.\d{3}s"),
        r"Iterations per second: \d+\.\d{3}",
    )
    assert [bool(re.fullmatch(pattern, line)) for pattern, line in zip(patterns, said, strict=True)] == [True] * 5
    assert found["finite"] and found["compiler"] == "none" and found["scheduler"] == "DDIMScheduler"
    with Image.open(tmp_path / "o.png") as picture:
        assert picture.size == (96, 96) and len(picture.getcolors(96 * 96) or []) > 100


def test_size_seed_and_prompt_are_what_was_asked(tmp_path: Path) -> None:
    files = []
    for flags in (("--seed", "1"), ("--seed", "2"), ("--seed", "1", "--prompt", "a cat"), ("--seed", "1")):
        files.append(tmp_path / f"{len(files)}.png")
        more = ("--height", "64", "--width", "96", "--output-image", str(files[-1]))
        assert run(tmp_path, *more, *flags, compiler="none")["size"] == [64, 96]
    pictures = [file.read_bytes() for file in files]
    assert pictures[0] == pictures[3] and len(set(pictures)) == 3
    with Image.open(files[0]) as picture:
        assert picture.size == (96, 64)


def test_the_old_engine_s_scheduler_is_taken_where_it_fits(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    for model, name in (("sd21", "EulerAncestralDiscreteScheduler"), ("flux", "FlowMatchEulerDiscreteScheduler")):
        command = ["--model", f"tiny:{model}", "--steps", "1", "--compiler", "none", "--device", "cpu"]
        assert text_to_image.main([*command, "--json", str(file)]) == 0
        found = json.loads(file.read_text())
        assert found["scheduler"] == name and found["iterations_per_second"] is None


def test_a_throughput_run_fits_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(tmp_path, "--throughput", "--throughput-steps", "3", compiler="none")["throughput"]
    assert set(found) == {"average", "slope", "base", "without_base"}
    said = capsys.readouterr().out
    assert len(re.findall(r"^Steps: \d, Inference Time", said, re.M)) == 3
    assert re.search(r"^Model: Inference Time = -?[\d.]+ \* Steps \+ -?[\d.]+$", said, re.M)


# ---- compiled -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sd3", *map(at_length, ("sd21", "sdxl", "flux", "pixart"))])
def test_sixteen_sizes_compile_nothing_after_the_first(family: str, tmp_path: Path) -> None:
    found = run(tmp_path, "--run_multiple_resolutions", "1", model=f"tiny:{family}")
    assert found["warmup_made"]["compiled"] + found["warmup_made"]["loaded"] > 0 and not found["warmup_made"]["eager"]
    assert found["likeness_to_eager"]["latents"] < TOLERANCE and found["likeness_to_eager"]["ssim"] > 0.999
    assert len({tuple(one["size"]) for one in found["resolutions"]}) == 16
    for one in found["resolutions"]:
        assert (one["compiled"], one["loaded"], one["variants"]) == (0, 0, []), one
        # PixArt's table of positions is kept for its own size and worked out anew at others
        assert all(line.startswith("transformer: pos_embed: ") for line in one["eager"]), one


@pytest.mark.large  # sixteen sizes compile nothing either
@pytest.mark.slow
@pytest.mark.parametrize("family", ["sd21", *map(at_length, ("sdxl", "flux", "pixart", "sd3"))])
def test_a_rare_size_compiles_nothing(family: str, tmp_path: Path) -> None:
    found = run(tmp_path, "--run_rare_resolutions", "yes", model=f"tiny:{family}")
    (rare,) = found["resolutions"]
    # the nearest that the model takes: UNets then upsample to sizes that are no double
    assert rare["size"] == ([72, 56] if family in ("sd21", "sdxl") else [80, 64])
    assert (rare["compiled"], rare["variants"]) == (0, [])
    assert all(line.startswith("transformer: pos_embed: ") for line in rare["eager"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "family"), [(OLD_CONFIGS[0], "sd3"), *(at_length(config, "sd21") for config in OLD_CONFIGS)]
)
def test_the_old_configs_run_unchanged(
    config: str, family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(tmp_path, "--compiler-config", config, model=f"tiny:{family}")
    assert found["warmup_made"]["compiled"] + found["warmup_made"]["loaded"] > 0 and not found["warmup_made"]["eager"]
    assert found["likeness_to_eager"]["latents"] < TOLERANCE
    said = capsys.readouterr().out
    for row in found["inactive"]:
        assert f"not active: {row['token']}: {row['reason']}" in said


def quantised_run(tmp_path: Path, kind: str, *flags: str, model: str = "tiny:sd21") -> dict[str, Any]:
    """A quantised run, which must be near eager, and nearer to eager of the same packed weights."""
    asked = ("--quantize", "--quantize-config", json.dumps({"quant_type": kind}), "--compiler-config")
    found = run(tmp_path, *asked, '{"mode": "quant:max-optimize:low-precision"}', *flags, model=model)
    assert found["likeness_to_quantised_eager"]["latents"] < TOLERANCE < found["likeness_to_eager"]["latents"] < 0.3
    assert found["finite"] and not found["warmup_made"]["eager"]
    assert found["quantisation"]["type"] == kind and "quant" not in {row["token"] for row in found["inactive"]}
    return found


@pytest.mark.large  # tests/hosts/test_diffusers_quantize.py has the distances
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["int8_dynamic", *map(at_length, ("fp8_e4m3_e4m3_dynamic", "fp8_e4m3_e4m3_weightonly_per_tensor"))]
)
def test_a_quantised_run_says_its_plan_and_its_distance(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = quantised_run(tmp_path, kind, "--run_rare_resolutions", "yes")
    (rare,) = found["resolutions"]
    assert (rare["compiled"], rare["variants"], rare["eager"]) == (0, [], [])
    said = capsys.readouterr().out
    assert re.search(rf"^unet: \d+ of \d+ linear layers as {kind}, ", said, re.M)
    assert re.search(r"^  +\d+ x  time_embedding\.linear_1 .* as it is: it stands outside the blocks", said, re.M)
    assert re.search(r"^Iterations per second: \d", said, re.M)
    assert re.search(r"^To eager: PSNR .* latent distance", said, re.M) and "To quantised eager: " in said


def test_what_does_not_pay_at_the_size_that_is_asked_stays_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--quantize", "--quantize-config", '{"quant_type": "fp8_e4m3_e4m3_dynamic", "everything": false}')
    found = run(tmp_path, *asked, "--height", "64", "--batch", "2", "--warmup-steps", "1", "--no-likeness")
    rows = found["quantisation"]["parts"]["unet"]
    assert not any(row["type"] for row in rows) and not found["quantisation"]["notes"]
    assert {row["rows"] for row in rows if row["layer"].endswith("attn1.to_out.0")} == {2 * 2 * 4 * 6}
    said = capsys.readouterr().out
    assert "unet: 0 of 66 linear layers" in said and "96 rows times 256x32 would take as long or longer" in said


@pytest.mark.slow
@pytest.mark.large  # what is packed of a file is in hosts/test_diffusers_quantize.py
def test_a_quantised_run_takes_the_best_of_a_file(tmp_path: Path) -> None:
    names = [f"transformer_blocks.{i}.{name}" for i in range(2) for name in ("attn.to_q", "ff.net.2")]
    file = tmp_path / "layers.json"
    file.write_text(json.dumps({name: {"ssim": 0.9 + i / 100} for i, name in enumerate(names)}))
    found = quantised_run(
        tmp_path, "int8_dynamic", "--quant-submodules-config-path", str(file), "--fuse_qkv_projections", "no",
        model="tiny:sd3",
    )  # fmt: skip
    rows = found["quantisation"]["parts"]["transformer"]
    assert [row["layer"] for row in rows if row["type"]] == names[1:], "90 % of four"


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--input-image", "in.png", "--extra-call-kwargs", '{"strength": 1.0}'),
        at_length(("--controlnet", "random")),  # the next one has an image for it besides
        ("--controlnet", "random", "--control-image", "in.png"),
        at_length(("--batch", "2", "--negative-prompt", "blurry")),
    ],
    ids=["picture", "controlnet", "controlnet of a picture", "batch"],
)
def test_a_picture_a_controlnet_and_a_batch(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("RGB", (50, 40), (200, 30, 90)).save(tmp_path / "in.png")
    monkeypatch.chdir(tmp_path)
    found = run(tmp_path, *flags)
    assert found["likeness_to_eager"]["latents"] < TOLERANCE
    assert not found["warmup_made"]["eager"]


@pytest.mark.slow
def test_a_stored_pipeline_runs_from_its_folder(tmp_path: Path) -> None:
    import torch

    from benchmarks.random_pipelines import build

    build("tiny:pixart", torch.device("cpu"), torch.float32).save_pretrained(tmp_path / "pixart")
    more = ("--extra-call-kwargs", '{"use_resolution_binning": false, "clean_caption": false}')
    found = run(tmp_path, *more, model=f"{tmp_path}/pixart/")
    assert found["pipeline"] == "PixArtAlphaPipeline" and found["size"] == [128, 128]
    assert found["likeness_to_eager"]["latents"] < TOLERANCE and not found["warmup_made"]["eager"]


def test_results_of_two_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = str(tmp_path / "kept.pt")
    run(tmp_path, "--save-result", kept, compiler="none")
    same = run(tmp_path, "--reference", kept, compiler="none")["likeness_to_reference"]
    assert same == {"psnr": None, "ssim": pytest.approx(1.0), "latents": 0.0}
    other = run(tmp_path, "--reference", kept, "--seed", "4", compiler="none")["likeness_to_reference"]
    assert other["latents"] > 0.5 and other["ssim"] < 0.7
    run(tmp_path, "--reference", kept, "--width", "64", compiler="none")
    assert "Not compared to reference: pixels of (1, 3, 96, 64) and (1, 3, 96, 96)" in capsys.readouterr().out


def test_a_lora_is_fused(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    import torch
    from safetensors.torch import save_file

    from benchmarks.random_pipelines import build

    unet = build("tiny:sd21", torch.device("cpu"), torch.float32).unet
    draw, file = torch.Generator().manual_seed(1), {}
    for name, layer in unet.named_modules():
        if name.endswith("to_q"):
            file[f"unet.{name}.lora_A.weight"] = torch.randn(4, layer.in_features, generator=draw) / 4
            file[f"unet.{name}.lora_B.weight"] = torch.randn(layer.out_features, 4, generator=draw)
    save_file(file, tmp_path / "lora.safetensors")
    kept = str(tmp_path / "kept.pt")
    run(tmp_path, "--save-result", kept, compiler="none")
    found = run(tmp_path, "--lora", str(tmp_path / "lora.safetensors"), "--reference", kept)
    assert found["likeness_to_reference"]["latents"] > 0.05
    assert found["likeness_to_eager"]["latents"] < TOLERANCE and not found["warmup_made"]["eager"]


def test_the_cached_warm_up_is_a_second_process_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[str]] = []

    def stand_in(command: list[str], **_: Any) -> Any:
        asked.append(command)
        again = {"warmup_s": 1.25, "warmup_made": {"compiled": 0, "loaded": 21, "eager": []}}
        Path(command[command.index("--json", len(command) - 2) + 1]).write_text(json.dumps(again))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", stand_in)
    found = run(tmp_path, "--cached-warmup", "--run_rare_resolutions", "1", "--seed", "7")
    assert found["cached"]["warmup_s"] == 1.25
    assert "Warmup with Cache time: 1.250s\nArtefacts: 0 compiled, 21 loaded" in capsys.readouterr().out
    (command,) = asked
    assert Path(command[1]).name == "text_to_image.py" and "--cached-warmup" not in command
    again = text_to_image.parse(command[2:])
    assert again.only_main and again.seed == 7 and again.json != str(tmp_path / "found.json")
