# SPDX-License-Identifier: Apache-2.0
"""Networks of the hosts with images laid out: on any device here, as on a GPU. None of them looks at memory.

Captured graphs run as they are (subjects.py). Each network's result is eager's, nothing of it runs eager, and no other
size or batch makes a further artefact.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from patchers import CONFIG, TOLERANCE, distance
from subjects import graph_subject, graphs_as_they_are, names, new_since
from tiny_autoencoders import kl_vae, taesd, vae

from nexfort_engine.hosts.comfy import model as host
from nexfort_engine.modules import channels_last

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("comfyui", "artefact_cache")]
AS_IT_IS = "images lie between blocks as eager code leaves them"


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(channels_last, "MEASURED", ("cpu", "cuda"))
    monkeypatch.setattr(channels_last, "_LEAST", 1)
    with graphs_as_they_are():
        yield


@pytest.mark.parametrize("name", names(few=("torch_dit", "comfy_wan")))
def test_a_backbone_takes_images_that_lie_otherwise(name: str) -> None:
    tiny = graph_subject(name)
    mark = tiny.report.mark()
    for batch in (1, 2, 3):
        assert tiny.same(batch=batch) < TOLERANCE
    assert not new_since(tiny, mark)
    assert not any(AS_IT_IS in note for note in tiny.report.as_dict()["notes"])
    laid = any(region.of_images for region in tiny.engine.regions)
    assert not laid or any(b.artefact.images for region in tiny.engine.regions for b in region.bindings)


@torch.inference_mode()
@pytest.mark.parametrize(
    "build", [pytest.param(taesd(4), id="taesd"), pytest.param(kl_vae(4), id="kl", marks=pytest.mark.large)]
)
def test_an_autoencoder_takes_them(build: Any) -> None:
    made = vae(build)
    compiled = host.attach_vae(made, CONFIG)
    for height, width in ((8, 12), (6, 6)):
        latent = torch.randn(1, 4, height, width)
        picture = made.decode(latent)
        assert distance(compiled.decode(latent), picture) < TOLERANCE
        assert distance(compiled.encode(picture), made.encode(picture)) < TOLERANCE
    report = compiled.first_stage_model.report.as_dict()
    assert not report["eager"] and not report["variants"] and not any(AS_IT_IS in n for n in report["notes"])
