# SPDX-License-Identifier: Apache-2.0
"""Where a network's weights are for a whole step, on ComfyUI's own layers and in pages that go away."""

from __future__ import annotations

import pytest
import torch
from backbones import make
from card_memory import PAGE, PagedMemory, page
from patchers import patcher_around
from torch import nn

from nexfort_engine.hosts.comfy.weights import ComfyWeights
from nexfort_engine.weights.residency import Residency

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("comfyui")]
CPU = torch.device("cpu")


class Paged:
    """A tiny Flux under dynamic VRAM: its network, the memory, the layers that lie there, where its weights are."""

    def __init__(self, patch: pytest.MonkeyPatch, **extra: nn.Module) -> None:
        patcher = patcher_around(make("comfy_flux").module, flux=True)
        self.model, self.network = patcher.model, patcher.model.diffusion_model
        for name, module in extra.items():
            self.network.add_module(name, module)
        self.memory = PagedMemory(1 << 20)
        self.layers = page(patcher, self.memory, patch)
        self.residency = Residency(self.network, ComfyWeights(self.model))

    def free(self) -> bool:
        """Whether everything that was taken out was given back."""
        return not +self.memory.pins and not any("_prefetch" in vars(layer) for layer in self.layers)

    def addresses(self) -> list[int] | None:
        """Of all weights as they are held; None where some would have to be fetched."""
        with self.residency.held(CPU) as weights:
            found = None if weights is None else [weight.data_ptr() for weight in weights]
            if not self.residency.sound():
                found = None
            assert found is None or +self.memory.pins, "nothing holds the pages"
        assert self.free()
        return found


@pytest.fixture
def paged(monkeypatch: pytest.MonkeyPatch) -> Paged:
    return Paged(monkeypatch)


def test_pages_that_stay_are_held_and_hold_the_weights(paged: Paged) -> None:
    assert paged.addresses() is None, "nothing was fetched yet"
    assert paged.residency.settle(CPU) and paged.free()
    first, end = paged.memory.bytes.data_ptr(), paged.memory.bytes.data_ptr() + paged.memory.bytes.numel()
    assert all(first <= at < end for at in paged.addresses() or [0]), "a weight that does not lie in the pages"
    wanted = [weight.clone() for weight in paged.network.parameters()]
    with paged.residency.held(CPU) as weights:
        assert weights is not None and sorted(w.double().sum().item() for w in weights) == pytest.approx(
            sorted(w.double().sum().item() for w in wanted)
        )


def test_what_went_away_and_was_fetched_again_lies_where_it_did(paged: Paged) -> None:
    assert paged.residency.settle(CPU)
    before = paged.addresses()
    paged.memory.take_away_page(0)
    assert paged.addresses() is None
    assert paged.residency.settle(CPU)
    assert paged.addresses() == before is not None


def test_a_weight_that_is_to_be_filled_anew_is_fetched_first(paged: Paged) -> None:
    """As a patcher leaves a layer whose LoRA changed."""
    assert paged.residency.settle(CPU)
    paged.layers[3]._v_signature = None
    assert paged.addresses() is None
    assert paged.residency.settle(CPU) and paged.addresses() is not None


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_network_of_which_a_part_fits_does_not_settle(paged: Paged, share: float) -> None:
    paged.memory.fits = int(share * PAGE * -(-sum(layer._v[2] for layer in paged.layers) // PAGE))
    for _ in range(2):
        assert not paged.residency.settle(CPU) and paged.free()
        assert paged.addresses() is None


def test_a_layer_that_cannot_be_lent_keeps_it_from_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    import comfy.ops

    embedding = comfy.ops.manual_cast.Embedding(4, 4, device="cpu", dtype=torch.float32)
    paged = Paged(monkeypatch, extra=embedding.requires_grad_(False))
    assert not paged.residency.settle(CPU)
    assert paged.addresses() is None and paged.free()


def test_weights_of_a_resident_network_are_its_own() -> None:
    patcher = patcher_around(make("comfy_flux").module, flux=True)
    network = patcher.model.diffusion_model
    residency = Residency(network, ComfyWeights(patcher.model))
    for _ in range(2):
        assert residency.settle(CPU)
        with residency.held(CPU) as weights:
            assert weights is not None and set(map(id, weights)) >= set(map(id, network.parameters()))
    layer = network.double_blocks[0].img_mlp[0]
    layer.weight = nn.Parameter(layer.weight * 2.0, requires_grad=False)
    with residency.held(CPU) as weights:
        assert weights is not None and any(weight is layer.weight for weight in weights)
    assert residency.sound()
    layer.weight_function = [lambda weight: weight * 3.0]
    with residency.held(CPU):
        assert not residency.sound(), "the function would not be asked"
    assert not residency.settle(CPU)


def test_a_network_that_the_host_took_back_is_noticed(paged: Paged) -> None:
    """Its pages may still hold what they held, but its layers no longer use them."""
    assert paged.residency.settle(CPU) and paged.addresses() is not None
    for layer in paged.layers:
        del layer._v
        layer.comfy_cast_weights = False
    with paged.residency.held(CPU) as weights:
        assert weights is not None and not paged.residency.sound()
    with paged.residency.held(CPU) as weights:
        own = [p.data_ptr() for p in paged.network.parameters()]
        assert weights is not None and {w.data_ptr() for w in weights} >= set(own) and paged.residency.sound()


def test_without_a_host_that_lends_nothing_is_asked() -> None:
    network = nn.Linear(3, 2)
    residency = Residency(network, None)
    assert residency.settle(CPU)
    with residency.held(CPU) as weights:
        assert weights is not None and weights[0] is network.weight
