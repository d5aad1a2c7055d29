# SPDX-License-Identifier: Apache-2.0
"""What --compiler does to a pipeline, and that the pipeline comes back as it was for the eager picture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from large_rows import few
from subjects import graphs_as_they_are

import nexfort_engine
from benchmarks import compilers
from benchmarks.random_pipelines import build

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("threads", "artefact_cache")


@pytest.fixture(autouse=True)
def _graphs() -> Iterator[None]:
    with graphs_as_they_are():
        yield


def pipeline(name: str = "tiny:sd21") -> Any:
    pipe = build(name, torch.device("cpu"), torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def picture(pipe: Any) -> torch.Tensor:
    return pipe(
        "a cat",
        height=64,
        width=64,
        num_inference_steps=2,
        output_type="pt",
        generator=torch.Generator().manual_seed(3),
    ).images


@pytest.mark.parametrize(
    ("compiler", "mode"), [("compile", None), ("compile-max-autotune", "max-autotune-no-cudagraphs")]
)
def test_torch_compile_takes_the_network_of_each_step(
    compiler: str, mode: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def stand_in(module: Any, *, mode: Any) -> Any:
        asked.append((type(module).__name__, mode))
        return torch.nn.Sequential()

    monkeypatch.setattr(torch, "compile", stand_in)
    pipe = pipeline()
    unet, vae = pipe.unet, pipe.vae
    compiled = compilers.apply(pipe, compiler, None, True)
    assert asked == [("UNet2DConditionModel", mode)]
    assert compiled.pipe.unet is not unet and compiled.pipe.vae is vae
    assert compiled.back().unet is unet


def fused(pipe: Any) -> bool:
    """Whether a network's attention takes its projections as one."""
    kinds = [type(one).__name__ for net in (pipe.unet, pipe.vae) for one in net.attn_processors.values()]
    return any("Fused" in kind for kind in kinds)


@pytest.mark.parametrize("fuse", few([True, False], [False]))
def test_the_pipeline_comes_back_unfused(fuse: bool) -> None:
    pipe = pipeline()
    before = picture(pipe)
    compiled = compilers.apply(pipe, "nexfort", compilers.parse_config(None), fuse)
    assert fused(pipe) is fuse
    ours = picture(compiled.pipe)
    assert float((ours - before).norm() / before.norm()) < 1e-3
    assert compiled.made_since({part: report.mark() for part, report in compiled.reports.items()})["compiled"] == 0
    back = compiled.back()
    assert not fused(back)
    assert float((picture(back) - before).norm() / before.norm()) < 1e-4


def test_none_is_the_pipeline_itself() -> None:
    pipe = pipeline()
    compiled = compilers.apply(pipe, "none", None, True)
    assert compiled.pipe is pipe and compiled.back() is pipe and not compiled.reports
    assert compiled.made_since(compiled.mark())["compiled"] == 0


def test_quantize_pipe_is_called_as_the_old_engine_s(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(nexfort_engine, "quantize_pipe", lambda *a, **k: asked.append((a, k)) or "another")
    options = compilers.parse_quantize('{"quant_type": "int8_dynamic", "top_percentage": 75}', None)
    assert compilers.quantized("a pipe", options) == "another"
    assert asked == [(("a pipe",), {"quant_type": "int8_dynamic", "top_percentage": 75})]


def test_the_old_names_of_quantisation_are_known() -> None:
    for name in (
        *("int8_dynamic", "fp8_e4m3_e4m3_dynamic", "fp8_e4m3_e4m3_dynamic_per_tensor", "fp8_e4m3_e4m3_weightonly"),
        *("fp8_e4m3_e4m3_weightonly_per_tensor", "fp8_e4m3_e5m2_dynamic"),
    ):
        assert compilers.parse_quantize(f'{{"quant_type": "{name}"}}', None) == {"quant_type": name}
