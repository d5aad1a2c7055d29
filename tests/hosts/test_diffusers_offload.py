# SPDX-License-Identifier: Apache-2.0
"""Ways of keeping weights elsewhere around a compiled pipeline, diffusers' and accelerate's: the same image.

What takes weights back by hooks is called as it is, and blocks are compiled around it; nothing is silently eager.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from subjects import graphs_as_they_are

import nexfort_engine
from benchmarks.random_pipelines import build

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("threads", "artefact_cache")
CPU = torch.device("cpu")
TOLERANCE = 1e-3


@pytest.fixture(autouse=True)
def _graphs() -> Iterator[None]:
    with graphs_as_they_are():
        yield


def pipeline() -> Any:
    pipe = build("tiny:sd21", CPU, torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def image(pipe: Any, prompt: str = "a cat") -> torch.Tensor:
    return pipe(
        prompt, height=64, width=64, num_inference_steps=2, output_type="pt", generator=torch.Generator().manual_seed(3)
    ).images


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def test_a_model_that_is_offloaded_after_it_was_compiled_runs_compiled() -> None:
    accelerate = pytest.importorskip("accelerate")
    wanted, other = image(pipeline()), image(pipeline(), "a dog")
    assert distance(other, wanted) > TOLERANCE
    compiled = nexfort_engine.compile_pipe(pipeline(), ignores=("vae",))
    _, hook = accelerate.cpu_offload_with_hook(compiled.unet, CPU)
    assert distance(image(compiled), wanted) < TOLERANCE
    report = compiled.reports["unet"].as_dict()
    assert report["calls"] == 2 and report["artefacts"] and not report["eager"]
    mark = compiled.reports["unet"].mark()
    hook.offload()
    assert distance(image(compiled, "a dog"), other) < TOLERANCE
    assert not compiled.reports["unet"].since(mark)["artefacts"]


def test_a_model_that_is_offloaded_before_it_was_compiled_runs_compiled() -> None:
    accelerate = pytest.importorskip("accelerate")
    pipe, wanted = pipeline(), image(pipeline())
    _, hook = accelerate.cpu_offload_with_hook(pipe.unet, CPU)
    compiled = nexfort_engine.compile_pipe(pipe, ignores=("vae",))
    assert distance(image(compiled), wanted) < TOLERANCE
    report = compiled.reports["unet"].as_dict()
    assert report["calls"] == 2 and report["artefacts"] and not report["eager"], report["eager"]
    hook.offload()
    assert distance(image(compiled), wanted) < TOLERANCE


def test_a_model_whose_forward_never_calls_its_own_says_that_it_runs_eager() -> None:
    pipe = pipeline()
    own = type(pipe.unet).forward
    pipe.unet.forward = functools.partial(own, pipe.unet)  # which holds no place for another
    compiled = nexfort_engine.compile_pipe(pipe, ignores=("vae",))
    assert distance(image(compiled), image(pipeline())) < TOLERANCE
    (row,) = compiled.reports["unet"].as_dict()["eager"]
    assert row["region"] == "(whole module)" and "its forward was replaced" in row["reason"]


# accelerate's hooks, below, are on each layer too
@pytest.mark.parametrize("kind", [pytest.param("leaf_level", marks=pytest.mark.large), "block_level"])
def test_groups_that_are_offloaded_run_compiled_around_their_hooks(kind: str) -> None:
    wanted, other = image(pipeline()), image(pipeline(), "a dog")
    compiled = nexfort_engine.compile_pipe(pipeline(), ignores=("vae",))
    blocks = {"num_blocks_per_group": 1} if kind == "block_level" else {}
    compiled.unet.enable_group_offload(onload_device=CPU, offload_device=CPU, offload_type=kind, **blocks)
    assert distance(image(compiled), wanted) < TOLERANCE
    report = compiled.reports["unet"].as_dict()
    assert report["artefacts"] and not report["eager"], report["eager"]
    assert distance(image(compiled, "a dog"), other) < TOLERANCE
    assert compiled.reports["unet"].as_dict()["artefacts"] == report["artefacts"]


@pytest.mark.large  # tests/dispatch/test_boundaries.py has hooks of every kind
def test_layers_whose_weights_are_cast_for_each_call_are_called_as_they_are() -> None:
    plain, compiled = pipeline(), nexfort_engine.compile_pipe(pipeline(), ignores=("vae",))
    before = image(plain)
    for pipe in (plain, compiled):
        pipe.unet.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    wanted, other = image(plain), image(plain, "a dog")
    assert distance(wanted, before) > 10 * TOLERANCE
    assert distance(image(compiled), wanted) < TOLERANCE
    report = compiled.reports["unet"].as_dict()
    assert report["artefacts"] and not report["eager"], report["eager"]
    assert distance(image(compiled, "a dog"), other) < TOLERANCE
    assert compiled.reports["unet"].as_dict()["artefacts"] == report["artefacts"]


def test_layers_that_accelerate_offloads_one_by_one_are_called_as_they_are() -> None:
    accelerate = pytest.importorskip("accelerate")
    wanted, other = image(pipeline()), image(pipeline(), "a dog")
    compiled = nexfort_engine.compile_pipe(pipeline(), ignores=("vae",))
    accelerate.cpu_offload(compiled.unet, CPU)
    assert all(weight.device.type == "meta" for weight in compiled.unet.parameters())
    assert distance(image(compiled), wanted) < TOLERANCE
    report = compiled.reports["unet"].as_dict()
    assert report["artefacts"] and not report["eager"], report["eager"]
    assert distance(image(compiled, "a dog"), other) < TOLERANCE
    assert compiled.reports["unet"].as_dict()["artefacts"] == report["artefacts"]
