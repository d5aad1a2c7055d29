# SPDX-License-Identifier: Apache-2.0
"""Commands that cannot be run: exit code 2 and one sentence, before a pipeline is made or while nothing has run yet."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import pipelines, random_pipelines, text_to_image, text_to_video_latte
from benchmarks.unusable import Unusable

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
TINY = ("--model", "tiny:sd21", "--scheduler", "none")

BEFORE = {
    "no such folder": (("--model", "/not/there/PixArt/"), r"--model is '/not/there/PixArt/', and there is no such"),
    "a bare word": (
        ("--model", "sdxl"),
        r"--model is 'sdxl', and there is no such folder; expected one, or a hub name",
    ),
    "no such family": (("--model", "random:sdxxl"), r"did you mean random:sdxl\?"),
    "a model of videos": (("--model", "tiny:latte"), r"text_to_video_latte\.py"),
    "scheduler": ((*TINY[:2], "--scheduler", "EulerDiscreteSchedular"), r"did you mean 'EulerDiscreteScheduler'"),
    "config": ((*TINY, "--compiler-config", '{"mode": "max-autotun"}'), r"did you mean 'max-autotune'"),
    "config of another": ((*TINY, "--compiler", "none", "--compiler-config", "O2"), r"given with --compiler none"),
    "quantised eager": ((*TINY, "--compiler", "compile", "--quantize"), r"--quantize is given with --compiler compile"),
    "what quantisation": ((*TINY, "--quantize-config", "{}"), r"without --quantize; expected --quantize too"),
    "cached nothing": ((*TINY, "--compiler", "none", "--cached-warmup"), r"caches nothing"),
    "control picture": ((*TINY, "--control-image", "x.png"), r"--control-image is given without --controlnet"),
    "variant": ((*TINY, "--variant", "fp16"), r"are for stored pipelines, and --model is tiny:sd21"),
    "no input picture": (
        (*TINY, "--input-image", "not-there.png"),
        r"--input-image is not-there\.png, and there is no",
    ),
    "no ControlNet": ((*TINY, "--controlnet", "./not-there"), r"--controlnet is '\./not-there', and there is no such"),
    "nowhere to write": ((*TINY, "--output-image", "/not/there/o.png"), r"its folder does not exist"),
    "keywords": ((*TINY, "--extra-call-kwargs", "{'a': 1}"), r"--extra-call-kwargs is not JSON"),
    "keywords too": ((*TINY, "--extra-call-kwargs", "[1]"), r"expected an object such as"),
    "no reference": ((*TINY, "--reference", "not-there.pt"), r"make it with --save-result"),
    "device": ((*TINY, "--device", "gpu"), r"--device is 'gpu'; expected cuda, cuda:1 or cpu"),
    "quant_type": (
        (*TINY, "--quantize", "--quantize-config", '{"quant_type": "fp8_e4m3_dynamic"}'),
        r"'fp8_e4m3_dynamic'; did you mean 'fp8_e\dm\d_e\dm\d_dynamic'\?",
    ),
    "top_percentage": (
        (*TINY, "--quantize", "--quantize-config", '{"quant_type": "int8_dynamic", "top_percentage": 101}'),
        r"top_percentage 101; expected a number from 0 to 100",
    ),
    "everything": (
        (*TINY, "--quantize", "--quantize-config", '{"quant_type": "int8_dynamic", "everything": "yes"}'),
        r"everything: 'yes'; expected true or false",
    ),
}
ONCE_LOADED = {
    "size": ((*TINY, "--height", "100"), r"takes multiples of 8; expected for example --height 96 --width 96"),
    "size of patches": (("--model", "tiny:sd3", "--width", "72", "--scheduler", "none"), r"takes multiples of 16"),
    "keyword": ((*TINY, "--extra-call-kwargs", '{"guidance": 2}'), r"did you mean 'guidance_\w+'\?"),
    "no variant of it": (("--model", "tiny:pixart", "--controlnet", "random"), r"made from a unet, and a PixArt"),
    "another kind of scheduler": (
        ("--model", "tiny:flux", "--scheduler", "DDIMScheduler"),
        r"which a FlowMatchEulerDiscreteScheduler cannot be exchanged for",
    ),
}


def refusal(script: Any, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """The one sentence that a command ends with."""
    assert script.main(list(flags)) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and err.startswith(script.__name__.split(".")[-1])
    return err


@pytest.mark.parametrize("case", BEFORE)
def test_what_the_command_line_shows_is_said_before_anything_is_made(
    case: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("a pipeline was made")

    monkeypatch.setattr(random_pipelines, "build", never)
    flags, sentence = BEFORE[case]
    assert re.search(sentence, refusal(text_to_image, capsys, *flags))


@pytest.mark.parametrize("case", ONCE_LOADED)
def test_what_the_pipeline_shows_is_said_before_it_runs(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags, sentence = ONCE_LOADED[case]
    assert re.search(sentence, refusal(text_to_image, capsys, *flags))


def test_a_folder_that_is_no_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "has no model_index.json" in refusal(text_to_image, capsys, "--model", str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    said = refusal(text_to_image, capsys, "--model", str(tmp_path / "model.safetensors"))
    assert "expected a folder or a name on the hub" in said


def test_a_folder_whose_parts_are_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = {"_class_name": "StableDiffusionPipeline", "unet": ["diffusers", "UNet2DConditionModel"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    assert "does not load: " in refusal(text_to_image, capsys, "--model", str(tmp_path), "--scheduler", "none")


def test_a_description_of_layers_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "layers.json").write_text('{"blocks.0": 0.9}')
    flags = (*TINY, "--quantize", "--quant-submodules-config-path", str(tmp_path / "layers.json"))
    assert '{"a.layer": {"ssim": 0.99}, ...}' in refusal(text_to_image, capsys, *flags)


def test_a_lora_without_peft(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "peft" else found(name, *a))
    assert "peft is not installed" in refusal(text_to_image, capsys, *TINY, "--lora", "a/lora")


def test_a_gpu_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (24 << 30, 24 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A card")
    cuda = torch.device("cuda:0")
    with pytest.raises(Unusable, match=r"A card has 24\.0 GiB free and random:flux needs about 36\.\d GiB"):
        pipelines.check_room("random:flux", torch.bfloat16, cuda)
    pipelines.check_room("random:sdxl", torch.float16, cuda)


def test_a_folder_s_weights_are_counted_once(tmp_path: Path) -> None:
    for name, size in (("a.safetensors", 3), ("a.fp16.safetensors", 2), ("a.bin", 1)):
        (tmp_path / "unet").mkdir(exist_ok=True)
        with (tmp_path / "unet" / name).open("wb") as file:
            file.truncate(size << 20)
    (tmp_path / "vae").mkdir()
    with (tmp_path / "vae" / "b.safetensors").open("wb") as file:
        file.truncate(4 << 20)
    assert pipelines.folder_gib(str(tmp_path), "fp16") * 1024 == pytest.approx(2 + 4)
    assert pipelines.folder_gib(str(tmp_path), None) * 1024 == pytest.approx(3 + 4)
    assert pipelines.folder_gib("org/name", None) == 0


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--model", "tiny:sdxl"), "expected benchmarks/text_to_image.py for it"),
        (("--model", "tiny:latte", "--output-video", "o.avi"), "expected it to end in one of .mp4"),
        (("--model", "tiny:latte", "--height", "60"), "takes multiples of 16"),
        (("--model", "tiny:latte", "--video-length", "6"), "6: this Latte was made for videos of 4 frames"),
        (("--model", "tiny:latte", "--beta-schedule", "straight"), "takes no {'beta_schedule': 'straight'}"),
        (("--model", "./nowhere"), "there is no such folder"),
    ],
)
def test_videos_too(flags: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sentence in refusal(text_to_video_latte, capsys, *flags)


def test_a_flag_of_yes_or_no_takes_both() -> None:
    from benchmarks.measured import yes_or_no

    assert [yes_or_no(word) for word in ("1", "true", "YES", "0", "False", "no")] == [True] * 3 + [False] * 3
    args = text_to_image.parse(["--run_multiple_resolutions", "--run_rare_resolutions", "no"])
    assert (args.run_multiple_resolutions, args.run_rare_resolutions) == (True, False)
    with pytest.raises(SystemExit) as ended:
        text_to_image.parse(["--run_rare_resolutions", "maybe"])
    assert ended.value.code == 2


def test_sizes_that_a_pipeline_bins_by_itself_are_its_own() -> None:
    class Bins:
        vae_scale_factor = 8
        transformer = SimpleNamespace(config=SimpleNamespace(patch_size=2))

        def __call__(self, use_resolution_binning: bool = True) -> None: ...

    assert pipelines.multiple_of(Bins(), {}) == 8
    assert pipelines.multiple_of(Bins(), {"use_resolution_binning": False}) == 16
