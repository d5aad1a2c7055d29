# SPDX-License-Identifier: Apache-2.0
"""Nothing of the engine keeps alive what ComfyUI let go: models, control nets, what could not be captured."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import control_nets
import pytest
import torch
from backbones import make
from card_memory import unload
from control_nets import KINDS, model_for, picture
from large_rows import few
from patchers import CONFIG, patcher_around, sample

from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.hosts.comfy import controlnet
from nexfort_engine.hosts.comfy import model as host

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("comfyui", "artefact_cache")]


def let_go(kept: weakref.ref[Any]) -> bool:
    """Whether a thing is gone once ComfyUI has unloaded everything."""
    import comfy.model_management as management

    unload()
    management.cleanup_models()
    gc.collect()
    return kept() is None


def test_nothing_keeps_an_unloaded_model_alive() -> None:
    def used(compiled: bool) -> weakref.ref[Any]:
        patcher = patcher_around(make("torch_dit").module)
        if compiled:
            patcher = host.attach(patcher, CONFIG)
        sample(patcher)
        return weakref.ref(patcher.model.diffusion_model)

    assert let_go(used(False)), "ComfyUI keeps it itself"
    assert let_go(used(True))


def test_nothing_keeps_a_model_alive_whose_capture_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path))

    def used() -> weakref.ref[Any]:
        network = make("torch_dit").module
        network.blocks[0].gain = torch.tensor(1.0)  # no plain number: the first block cannot be captured as it was
        compiled = host.attach(patcher_around(network), CompileConfig.parse({"dynamic": False}))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.export, "export", _refuse)
            sample(compiled)
        assert host.report_of(compiled).as_dict()["eager"]  # type: ignore[union-attr]
        return weakref.ref(network)

    assert let_go(used())


def _refuse(*_: Any, **__: Any) -> Any:
    raise RuntimeError("it cannot be traced")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", few(list(KINDS), ["flux"]))  # below is the network of a control LoRA
def test_nothing_keeps_an_unloaded_control_net_alive(name: str) -> None:
    def used(compiled: bool) -> weakref.ref[Any]:
        plain, patcher = KINDS[name][0](), model_for(name)
        control = controlnet.attach_control(plain, CONFIG) if compiled else plain
        picture(patcher, control)
        kept = next(iter(controlnet.networks_of(plain).values()), control)
        return weakref.ref(kept)

    assert let_go(used(False)), "ComfyUI keeps it itself"
    assert let_go(used(True))


@pytest.mark.usefixtures("quick")
def test_a_control_lora_s_network_goes_with_its_run() -> None:
    made: list[weakref.ref[Any]] = []
    plain, patcher = control_nets.lora(), model_for("lora")
    compiled = controlnet.attach_control(plain, CONFIG)
    kind = type(plain)
    with pytest.MonkeyPatch.context() as patch:
        own = kind.pre_run

        def pre_run(self: Any, *args: Any) -> None:
            own(self, *args)
            made.append(weakref.ref(self.control_model))

        patch.setattr(kind, "pre_run", pre_run)
        picture(patcher, compiled)
    gc.collect()
    assert made and all(one() is None for one in made)
    assert copy.copy(compiled).control_weights is plain.control_weights
