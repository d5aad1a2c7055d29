# SPDX-License-Identifier: Apache-2.0
"""text_to_image.py --parallel: one picture by several processes, and what cannot be split is refused in a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import parallel_ranks
import pytest
import torch

from benchmarks import processes, text_to_image
from benchmarks.unusable import Unusable

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
TOLERANCE = 1e-4  # in float32
TINY = ("--model", "tiny:flux", "--scheduler", "none", "--steps", "2", "--device", "cpu")


@pytest.mark.large
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch without gloo")
def test_two_processes_make_a_picture_and_the_first_one_tells(tmp_path: Path) -> None:
    flags = [*TINY, "--parallel", "ulysses:2", "--json", "found.json", "--output-image", "o.png"]
    for name in ("found.json", "o.png"):
        flags[flags.index(name)] = str(tmp_path / name)
    first, second = parallel_ranks.run(2, "benchmark", tmp_path, flags=flags)
    assert first.told == second.told == {"code": 0}
    assert "Inference time" in first.text and "Inference time" not in second.text
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["parallel"] == {"ulysses": 2} and found["finite"] and (tmp_path / "o.png").stat().st_size
    assert found["warmup_made"]["compiled"] and not found["warmup_made"]["eager"]
    assert found["likeness_to_eager"]["latents"] < TOLERANCE


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--parallel", "ulises:2"), "expected ulysses:N or ring:N, or both"),
        (("--parallel", "ulysses:0"), "expected ulysses:N"),
        (("--parallel", "ulysses:2,ulysses:2"), "expected ulysses:N"),
        (("--parallel", "ulysses:2,ring:2"), "expected torchrun --nproc-per-node 4 benchmarks/text_to_image.py"),
        (("--parallel", "ulysses:2", "--cached-warmup"), "--parallel is given with --cached-warmup"),
        (("--parallel", "ulysses:2", "--quantize"), "--parallel is given with --quantize"),
    ],
)
def test_what_cannot_run_is_refused(flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert text_to_image.main([*TINY, *flags]) == 2
    assert said in capsys.readouterr().err


def test_a_pipeline_that_diffusers_cannot_split_is_refused() -> None:
    class OtherPipeline:
        unet = torch.nn.Identity()

    with pytest.raises(Unusable, match="diffusers splits no denoiser of a OtherPipeline"):
        processes.split(OtherPipeline(), {"ulysses": 2})
