# SPDX-License-Identifier: Apache-2.0
"""Small networks in ComfyUI of whose weights something is kept on a CPU, and where ComfyUI keeps the others meanwhile.

A Flux in low precision, with packed weights of products, and a UNet in full, with weights of convolutions laid out.

No test lives here. ComfyUI must have been imported (the fixture `comfyui` in conftest.py does it).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import comfy_networks
import pytest
import torch
from backbones import make, with_weights
from card_memory import PAGE, PagedMemory, page
from patchers import TOLERANCE, patcher_around, sample, with_lora

from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.graph import const_subgraph
from nexfort_engine.hosts.comfy import model as host
from nexfort_engine.hosts.comfy.weights import ComfyWeights
from nexfort_engine.modules import channels_last
from nexfort_engine.passes import low_precision
from nexfort_engine.quant import matmul
from nexfort_engine.weights import lease

aten = torch.ops.aten
FP8_ERROR = 0.2
O3 = CompileConfig.parse("O3")
PACKED = "double_blocks.0.img_mlp.0"


def _times_rows(x: Any, weight: Any, bias: Any, like: torch.Tensor) -> Any:
    """The product that only a card has, by its meaning."""
    a, b = (aten.mul.Tensor(aten.to.dtype(values, torch.float32), scale) for values, scale in (x, weight))
    result = aten.to.dtype(aten.mm.default(a, aten.t.default(b)), like.dtype)
    return result if bias is None else aten.add.Tensor(result, bias)


def packing_flux(patch: pytest.MonkeyPatch) -> Any:
    """A patcher of a Flux whose products are taken however small they are, and on the CPU."""
    own = CompileConfig.lowering_options

    def options(config: CompileConfig, device: str) -> dict[str, object]:
        found = own(config, device)
        return {**found, "nexfort.low_precision": found["nexfort.prepare"]}

    patch.setattr(CompileConfig, "lowering_options", options)
    _as_on_a_card(patch)
    patch.setattr(matmul, "missing", lambda *_: None)
    patch.setattr(low_precision, "gain", lambda *_: 1.0)
    patch.setattr(low_precision, "times_rows", _times_rows)
    network = make("comfy_flux").module.bfloat16()
    network.dtype = torch.bfloat16
    return patcher_around(network, flux=True)


def freezing_unet(patch: pytest.MonkeyPatch) -> Any:
    """A patcher of a UNet in float32, the weights of whose convolutions are laid out however small, and on the CPU."""
    patch.setattr(channels_last, "_LEAST", 1)
    patch.setattr(channels_last, "MEASURED", ("cpu", "cuda"))
    _as_on_a_card(patch)
    alone = {"num_res_blocks": [1], "channel_mult": [1], "transformer_depth": [0], "transformer_depth_output": [0, 0]}
    network = with_weights(comfy_networks.unet(1, **alone, transformer_depth_middle=-1), "comfy_unet")
    return patcher_around(network.eval().requires_grad_(False))


def _as_on_a_card(patch: pytest.MonkeyPatch) -> None:
    """Have weights prepared that are small too."""
    patch.setattr(const_subgraph, "LEAST", 1)
    patch.setattr(lease, "_SMALL", 256)  # biases, not the weights of products
    patch.setenv("NEXFORT_WORKERS", "0")


@dataclass(frozen=True)
class Kind:
    """What is kept. error: how far the picture may be from eager's. one: a layer that is not asked for again.

    dims: of the weights that are kept.
    """

    config: CompileConfig
    made: Callable[[pytest.MonkeyPatch], Any]
    error: float
    one: str
    dims: int

    def is_kept(self, name: str, layer: Any) -> bool:
        """Whether something is kept for a layer of this name in the network."""
        if self.dims == 4:  # the last one may be called by itself too, and is not given back
            return name != "out.2" and type(layer).__name__ == "Conv2d" and layer.weight.shape[-1] > 1
        return is_packed(name)

    def changed(self, patcher: Any, strength: float = 1.0) -> Any:
        """A clone with a LoRA on weights of which something is kept."""
        return with_lora(patcher, strength, size=0.2, dims=self.dims)


KINDS = {
    "packed in fp8": Kind(O3, packing_flux, FP8_ERROR, PACKED, 2),
    "laid out": Kind(CompileConfig.parse("freezing"), freezing_unet, TOLERANCE, "input_blocks.1.0.in_layers.2", 4),
}


def engine_of(patcher: Any) -> Any:
    (engine,) = patcher.model.diffusion_model.__dict__[host._ENGINES].values()
    return engine


def kept(patcher: Any) -> list[int]:
    """The serial numbers of what is kept, for every region that keeps something."""
    bindings = [binding for region in engine_of(patcher).regions for binding in region.bindings if binding.prepares]
    return [binding.kept.serial if binding.kept else 0 for binding in bindings]


def is_packed(name: str) -> bool:
    return name.endswith(("mlp.0", "mlp.2", "qkv", "proj", "linear1", "linear2"))


def pages_of(layers: list[Any]) -> set[int]:
    places = [layer._v for layer in layers]
    return {page for _, at, size in places for page in range(at // PAGE, (at + size - 1) // PAGE + 1)}


class Elsewhere:
    """A compiled clone whose weights ComfyUI keeps elsewhere. asked: the layers that it was asked for, in order.

    kept: the names of those of which something is kept.
    """

    def __init__(self, patcher: Any, patch: pytest.MonkeyPatch, kind: Kind = KINDS["packed in fp8"]) -> None:
        self.clone = host.attach(patcher, kind.config)
        self.kept = {n for n, sub in patcher.model.diffusion_model.named_modules() if kind.is_kept(n, sub)}
        self.asked: list[str] = []
        acquire = ComfyWeights.acquire
        names = {id(sub): name for name, sub in patcher.model.diffusion_model.named_modules()}

        def noted(provider: ComfyWeights, layers: list[Any], device: torch.device) -> Any:
            self.asked += [names[id(layer)] for layer in layers if id(layer) in names]
            return acquire(provider, layers, device)

        patch.setattr(ComfyWeights, "acquire", noted)

    def sampled(self, clone: Any = None, **how: Any) -> tuple[torch.Tensor, set[str]]:
        """The latent, and the layers that were asked for meanwhile."""
        self.asked.clear()
        return sample(clone or self.clone, **how), set(self.asked)


class Paged(Elsewhere):
    """Under dynamic VRAM, in pretended memory. layers: those that have a place there. others: the pages of those that
    are not kept."""

    def __init__(self, patcher: Any, patch: pytest.MonkeyPatch, kind: Kind = KINDS["packed in fp8"]) -> None:
        super().__init__(patcher, patch, kind)
        self.memory = PagedMemory(1 << 25)
        self.layers = page(patcher, self.memory, patch)
        kept = {f"diffusion_model.{name}" for name in self.kept}
        self.others = pages_of([layer for layer in self.layers if layer.seed_key not in kept])
        patch.setattr(ComfyWeights, "room", lambda *_: 1 << 40)  # pages that others may have
        self._stay(patch)

    def pages_of(self, names: set[str]) -> set[int]:
        """Of layers, by their names in the network."""
        return pages_of([layer for layer in self.layers if layer.seed_key.removeprefix("diffusion_model.") in names])

    def _stay(self, patch: pytest.MonkeyPatch) -> None:
        """A patcher that loads other patches leaves the layers under dynamic VRAM, to be fetched anew."""
        import comfy.model_patcher

        load = comfy.model_patcher.ModelPatcher.load

        def loaded(patcher: Any, *args: Any, **kwargs: Any) -> None:
            load(patcher, *args, **kwargs)
            for layer in self.layers if patcher.model is self.clone.model else ():
                layer.comfy_cast_weights, layer._v_signature = True, None

        patch.setattr(comfy.model_patcher.ModelPatcher, "load", loaded)
