# SPDX-License-Identifier: Apache-2.0
"""Networks of ComfyUI whose own code copies constants to the GPU in each step have graphs, which are pretended here."""

from __future__ import annotations

import pytest
import torch
from backbones import BACKBONES, Tiny
from comfy_families import FAMILIES
from pretended_graph import Graph, pretend

import nexfort_engine
from nexfort_engine.cudagraphs import host_constants

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("comfyui", "artefact_cache")]


@pytest.mark.parametrize(
    "name", ["comfy_wan", *(pytest.param(name, marks=pytest.mark.large) for name in ("wan_i2v", "wan_vace"))]
)
def test_a_step_with_constants_is_a_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole numbers lie in main memory here and all others on the GPU: what Wan copies are whole numbers."""
    pretend(monkeypatch)
    monkeypatch.setattr(host_constants, "_is_here", lambda tensor: not tensor.dtype.is_floating_point)
    monkeypatch.setattr(host_constants, "_is_away", lambda device: device is not None)
    tiny = Tiny({**BACKBONES, **FAMILIES}[name], 2)
    compiled = nexfort_engine.compile(tiny.module)
    with torch.inference_mode():
        for step in range(5):
            args, kwargs = tiny.make_inputs(step=step)
            options = kwargs.pop("transformer_options", {})
            options.pop("sigmas", None), options.pop("sample_sigmas", None)
            wanted = tiny.module(*args, **kwargs, transformer_options=dict(options))
            found = compiled(*args, **kwargs, transformer_options=dict(options))
            assert float((found - wanted).norm() / wanted.norm()) < 1e-4
    steps = compiled._nexfort_engine.graphs._steps.values()
    assert [len(one.sent) for one in steps if one.graph is not None] == [1], compiled.report.as_dict()["notes"]
    assert len(Graph.made) == 1
