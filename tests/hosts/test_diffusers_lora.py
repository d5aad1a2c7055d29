# SPDX-License-Identifier: Apache-2.0
"""LoRAs and IP-Adapters of diffusers on a compiled pipeline: always the picture that eager gives, and what compiles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusers_networks import lora
from subjects import graphs_as_they_are

import nexfort_engine
from benchmarks.random_pipelines import build

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("threads", "artefact_cache")
TOLERANCE = 1e-3
MOVES = 100 * TOLERANCE


@pytest.fixture(autouse=True)
def _graphs() -> Iterator[None]:
    with graphs_as_they_are():
        yield


class Pair:
    """A pipeline and its compiled self, which share all weights. `last` is the last image, `first` the first."""

    def __init__(self, pipe: Any, **call: Any) -> None:
        self.pipe, self.call = pipe, call
        pipe.set_progress_bar_config(disable=True)
        self.compiled = nexfort_engine.compile_pipe(pipe, ignores=("vae",))
        self.report = self.compiled.reports["unet"]
        self.first = self.last = self._image(self.compiled)
        self._mark = self.report.mark()

    def _image(self, pipe: Any) -> torch.Tensor:
        return pipe(
            "a cat", height=64, width=64, num_inference_steps=2, output_type="pt",
            generator=torch.Generator().manual_seed(3), **self.call,
        ).images  # fmt: skip

    def look(self) -> dict[str, Any]:
        """Run once more: eager's image it must be. Returns what is new in the report."""
        self.last = self._image(self.compiled)
        wanted = self._image(self.pipe)
        assert distance(self.last, wanted) < TOLERANCE
        new = self.report.since(self._mark)
        self._mark = self.report.mark()
        return new

    @property
    def moved(self) -> float:
        """How far the last image is from the first."""
        return distance(self.last, self.first)


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def pipeline() -> Any:
    return build("tiny:sd21", torch.device("cpu"), torch.float32)


def test_loras_that_are_fused_into_the_weights_compile_nothing() -> None:
    pytest.importorskip("peft")
    pair = Pair(pipeline())
    files = [lora(pair.pipe.unet, seed) for seed in (1, 2)]
    seen = []
    for file in files:
        pair.compiled.load_lora_weights(dict(file), adapter_name="one")
        pair.compiled.fuse_lora()
        pair.compiled.unload_lora_weights()
        new = pair.look()
        assert not new["artefacts"] and not new["variants"] and not new["eager"]
        assert pair.moved > MOVES
        seen.append(pair.last)
    assert distance(seen[0], seen[1]) > MOVES


def test_loras_beside_the_weights_are_honoured() -> None:
    pytest.importorskip("peft")
    pair = Pair(pipeline())
    pair.compiled.load_lora_weights(lora(pair.pipe.unet, 1), adapter_name="one")
    assert not pair.look()["eager"] and pair.moved > MOVES
    for strength in (0.5, -0.7):
        pair.compiled.set_adapters(["one"], [strength])
        before = pair.last
        new = pair.look()
        assert not new["artefacts"] and not new["variants"] and not new["eager"]
        assert distance(pair.last, before) > MOVES
    pair.compiled.disable_lora()
    pair.look()
    assert pair.moved < TOLERANCE
    pair.compiled.unload_lora_weights()
    assert not pair.look()["artefacts"] and pair.moved < TOLERANCE


def adapter(pipe: Any) -> dict[str, Any]:
    """An IP-Adapter in its file's layout, for embeddings of eight numbers."""
    draw = torch.Generator().manual_seed(1)
    projection = {"proj.weight": torch.randn(64, 8, generator=draw), "proj.bias": torch.zeros(64)}
    norm = {"norm.weight": torch.ones(16), "norm.bias": torch.zeros(16)}
    found: dict[str, Any] = {"image_proj": {**projection, **norm}, "ip_adapter": {}}
    crosses = [name.removesuffix(".processor") for name in pipe.unet.attn_processors if "attn2" in name]
    for number, name in enumerate(crosses):
        width = pipe.unet.get_submodule(name).to_k.out_features
        for kind in "kv":
            weight = torch.randn(width, 16, generator=draw) * 0.3
            found["ip_adapter"][f"{2 * number + 1}.to_{kind}_ip.weight"] = weight
    return found


def test_an_ip_adapter_s_scale_is_honoured_and_compiles_nothing() -> None:
    pipe = pipeline()
    pipe.unet._load_ip_adapter_weights([adapter(pipe)])
    embeds = [torch.randn(2, 1, 1, 8, generator=torch.Generator().manual_seed(4))]
    pair = Pair(pipe, ip_adapter_image_embeds=embeds)
    for scale in (0.3, 1.7):
        pair.compiled.set_ip_adapter_scale(scale)
        before = pair.last
        new = pair.look()
        assert not new["artefacts"] and not new["variants"] and not new["eager"]
        assert distance(pair.last, before) > MOVES
    pair.compiled.set_ip_adapter_scale(0.0)  # its code then leaves the adapter out
    assert pair.look()["variants"] and pair.moved > MOVES
    pair.compiled.set_ip_adapter_scale(1.0)
    assert not pair.look()["artefacts"] and pair.moved == 0
