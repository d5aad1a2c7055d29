# SPDX-License-Identifier: Apache-2.0
"""Small weights under dynamic VRAM stay where they are, and nothing that belongs to others is written to."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dynamic_vram import dynamic_vram
from loader_families import CONFIG, FAMILIES, file_of, loaded, lora_file, picture, with_lora
from subjects import graphs_as_they_are
from torch import nn

from nexfort_engine.hosts.comfy import model as host
from nexfort_engine.hosts.comfy.small_weights import _MOST, SmallWeights

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("comfyui")]
NAME = "diffusion_model.norm.weight"


class Model:
    """A patcher of a network with one norm, whose weight and buffer ComfyUI copies to the device at each load."""

    def __init__(self, *, dynamic: bool = True, numbers: int = 4) -> None:
        self.original = torch.ones(numbers)
        self.model = nn.Module()
        self.model.diffusion_model = nn.Module()
        self.model.diffusion_model.norm = nn.Module()
        self.norm.register_buffer("table", None)
        self.norm.register_parameter("weight", None)
        self.backup = {NAME: types.SimpleNamespace(weight=self.original)}
        self.backup_buffers = {"diffusion_model.norm.table": torch.zeros(2)}
        self.is_dynamic = lambda: dynamic
        self.small = SmallWeights()

    @property
    def norm(self) -> Any:
        return self.model.diffusion_model.norm

    def load(self, weight: torch.Tensor, table: torch.Tensor | None = None) -> tuple[Any, Any]:
        """Where both lie after a load that put these there."""
        self.norm.weight = nn.Parameter(weight, requires_grad=False)
        self.norm.table = torch.zeros(2) if table is None else table
        self.small.loaded(self)
        return self.norm.weight.data_ptr(), self.norm.table.data_ptr()


def test_the_numbers_of_a_load_go_where_those_of_the_first_lay() -> None:
    model = Model()
    first, weight = model.load(torch.full((4,), 2.0)), model.norm.weight
    assert model.load(torch.full((4,), 3.0), torch.ones(2)) == first and model.norm.weight is weight
    assert model.norm.weight.tolist() == [3.0] * 4 and model.norm.table.tolist() == [1.0] * 2
    assert model.original.tolist() == [1.0] * 4


def test_made_in_inference_mode_it_is_written_to_outside_of_it() -> None:
    model = Model()
    with torch.inference_mode():
        first = model.load(torch.full((4,), 2.0))
    assert model.load(torch.full((4,), 3.0)) == first and model.norm.weight.tolist() == [3.0] * 4


def _other_size(model: Model) -> torch.Tensor:
    return torch.ones(5)


def _other_dtype(model: Model) -> torch.Tensor:
    return torch.ones(4, dtype=torch.float64)


def _other_module(model: Model) -> torch.Tensor:
    """As a patch puts one in its place; the one that left keeps its weight."""
    model.model.diffusion_model.norm = copy.copy(model.norm)
    model.norm._parameters = dict(model.norm._parameters)
    return torch.ones(4)


@pytest.mark.parametrize("change", [_other_size, _other_dtype, _other_module])
def test_where_it_is_another_weight_the_new_one_stays(change: Callable[[Model], torch.Tensor]) -> None:
    model = Model()
    model.load(torch.full((4,), 2.0))
    before = model.norm.weight
    at, _ = model.load(now := change(model))
    assert at == now.data_ptr() and before.tolist() == [2.0] * 4
    again, _ = model.load(torch.full_like(now, 7.0))
    assert again == at and model.norm.weight.tolist() == [7.0] * len(now)


def test_the_file_s_own_memory_is_never_written_to() -> None:
    model = Model()
    model.load(model.original)
    model.load(torch.full((4,), 3.0))
    assert model.original.tolist() == [1.0] * 4 and model.norm.weight.tolist() == [3.0] * 4
    model.load(model.original)
    assert model.original.tolist() == [1.0] * 4 and model.norm.weight.tolist() == [1.0] * 4


@pytest.mark.parametrize("model", [Model(dynamic=False), Model(numbers=_MOST // 4 + 1)], ids=["all loaded", "large"])
def test_nothing_is_held_of_other_models(model: Model) -> None:
    size = model.original.shape
    model.load(torch.ones(size))
    before = model.norm.weight
    at, _ = model.load(now := torch.zeros(size))
    assert at == now.data_ptr() and before.eq(1).all() and NAME not in model.small._kept


def test_what_is_held_goes_with_the_model() -> None:
    model = Model()
    model.load(torch.ones(4))
    model.small.clear()
    at, _ = model.load(now := torch.zeros(4))
    assert at == now.data_ptr()


@pytest.mark.usefixtures("artefact_cache")
def test_comfyui_s_own_loads_leave_each_weight_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A LoRA that changes small weights too is felt, and the plain model shows nothing of it afterwards."""
    family = FAMILIES["z_image"]
    weights = {key: weight.clone() for key, weight in file_of(family, None).items()}
    with dynamic_vram() as card, graphs_as_they_are(), torch.inference_mode():
        patcher = loaded(family)
        plain, clone = picture(family, patcher), host.attach(patcher, CONFIG)
        assert torch.equal(picture(family, clone), plain)
        network = patcher.model.diffusion_model
        places = {name: weight.data_ptr() for name, weight in network.named_parameters() if weight.numel() < 4096}
        assert len(places) > 20 and not card.pinned()
        file = lora_file(family) | {"diffusion_model.layers.0.attention_norm1.diff": torch.ones(256)}
        changed = picture(family, with_lora(clone, file))
        assert torch.equal(changed, picture(family, with_lora(patcher, file))) and not torch.equal(changed, plain)
        assert torch.equal(picture(family, clone), plain) and torch.equal(picture(family, patcher), plain)
        picture(family, clone)
        assert places == {name: network.get_parameter(name).data_ptr() for name in places}
        for key, saved in patcher.backup.items():
            assert torch.equal(saved.weight, weights[key.removeprefix("diffusion_model.")]), key
        host._release(clone, True)
        assert not network.__dict__[host._ENGINES].small._kept
