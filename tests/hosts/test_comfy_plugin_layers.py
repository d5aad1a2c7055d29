# SPDX-License-Identifier: Apache-2.0
"""Layers of plugins that unpack their weights by code of their own, as GGUF's do."""

from __future__ import annotations

import functools
from typing import Any

import comfy_networks
import pytest
import torch
from backbones import make
from patchers import CONFIG, MOVES, TOLERANCE, distance, patcher_around, reported, sample
from subjects import graphs_as_they_are
from torch.nn import functional

from nexfort_engine.hosts.comfy import model as host
from nexfort_engine.hosts.comfy.weights import ComfyWeights

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("comfyui", "artefact_cache")]
BLOCK = 8  # weights that share a scale


class Packed(torch.Tensor):
    """Eight-bit weights in rows of bytes, each block behind its scale. It shows the shape that it has unpacked."""

    packed_shape: torch.Size
    patches: list[torch.Tensor]

    @staticmethod
    def of(plain: torch.Tensor) -> Packed:
        blocks = plain.detach().float().reshape(-1, BLOCK)
        scale = (blocks.abs().amax(1, keepdim=True) / 127).half()
        whole = (blocks / scale.float().clamp(min=1e-8)).round().clamp(-127, 127).to(torch.int8)
        found = torch.cat([scale.view(torch.uint8), whole.view(torch.uint8)], 1).as_subclass(Packed)
        return found._with(plain.shape, [])

    def _with(self, shape: torch.Size, patches: list[torch.Tensor]) -> Packed:
        self.packed_shape, self.patches = shape, list(patches)
        return self

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return getattr(self, "packed_shape", None) or self.size()

    def to(self, *args: Any, **words: Any) -> Packed:
        return super().to(*args, **words).as_subclass(Packed)._with(self.packed_shape, self.patches)

    def detach(self) -> Packed:
        return self

    def clone(self, *_: Any, **__: Any) -> Packed:
        return self

    def unpacked(self, dtype: torch.dtype) -> torch.Tensor:
        rows = self.as_subclass(torch.Tensor)
        scale, whole = rows[:, :2].contiguous().view(torch.half), rows[:, 2:].contiguous().view(torch.int8)
        plain = (scale.float() * whole.float()).reshape(self.packed_shape).to(dtype)
        for patch in self.patches:
            plain = plain + patch.to(plain)
        return plain


@functools.cache
def operations(factor: float = 1.0) -> Any:
    """Operations of a plugin. factor: what its Linear multiplies its result by, which a plain one would not."""
    import comfy.ops

    class Layer(torch.nn.Module):
        comfy_cast_weights = True

        def cast_bias_weight(self, input: Any = None, dtype: Any = None, device: Any = None, bias_dtype: Any = None):
            dtype = dtype or input.dtype
            plain = [self.weight, self.bias]
            for i, value in enumerate(plain):
                if value is not None:
                    value = value.to(device or input.device)
                    plain[i] = value.unpacked(dtype) if isinstance(value, Packed) else value.to(dtype)
            return tuple(plain)

    class Operations(comfy.ops.manual_cast):
        class Linear(Layer, comfy.ops.manual_cast.Linear):
            def forward_comfy_cast_weights(self, input: torch.Tensor) -> torch.Tensor:
                return functional.linear(input, *self.cast_bias_weight(input)) * factor

        class LayerNorm(Layer, comfy.ops.manual_cast.LayerNorm):
            def forward_comfy_cast_weights(self, input: torch.Tensor) -> torch.Tensor:
                if self.weight is None:
                    return super().forward_comfy_cast_weights(input)
                return functional.layer_norm(input, self.normalized_shape, *self.cast_bias_weight(input), self.eps)

    return Operations


def packed_flux(factor: float = 1.0) -> Any:
    """The tiny Flux made of a plugin's layers, its matrices packed."""
    network = comfy_networks.flux(2, operations=operations(factor))
    network.load_state_dict(make("comfy_flux").module.state_dict())
    for layer in network.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight = torch.nn.Parameter(Packed.of(layer.weight), requires_grad=False)
    return network.eval().requires_grad_(False)


def matrices(network: Any) -> list[Any]:
    return [layer for layer in network.modules() if isinstance(layer, torch.nn.Linear)]


def test_they_run_compiled_with_the_weights_that_they_make() -> None:
    with graphs_as_they_are():
        patcher = patcher_around(packed_flux(), flux=True)
        wanted = sample(patcher)
        plain = sample(patcher_around(make("comfy_flux").module, flux=True))
        assert 0 < distance(wanted, plain) < 0.2, "packing changes the picture a little"
        clone = host.attach(patcher, CONFIG)
        assert distance(sample(clone), wanted) < TOLERANCE
        found = reported(clone)
        assert not found["eager"] and found["artefacts_compiled"] > 2
        assert torch.equal(sample(patcher), wanted)


def test_what_their_code_adds_is_felt_at_once_and_compiles_nothing() -> None:
    """A LoRA of such plugins lies beside the packed weight and is added whenever it is unpacked."""
    with graphs_as_they_are():
        patcher = patcher_around(packed_flux(), flux=True)
        clone = host.attach(patcher, CONFIG)
        before = sample(clone)
        mark = host.report_of(clone).mark()  # type: ignore[union-attr]
        generator = torch.Generator().manual_seed(5)
        for layer in matrices(patcher.model.diffusion_model.double_blocks):
            layer.weight.patches.append(0.05 * torch.randn(layer.weight.shape, generator=generator))
        wanted = sample(patcher)
        assert distance(wanted, before) > MOVES
        assert distance(sample(clone), wanted) < TOLERANCE
        for layer in matrices(patcher.model.diffusion_model):
            layer.weight.patches.clear()
        assert torch.equal(sample(clone), before)
        new = host.report_of(clone).since(mark)  # type: ignore[union-attr]
        assert not new["artefacts"] and not new["eager"], new


def test_layers_that_do_more_than_the_plain_one_run_as_they_are_and_it_is_said() -> None:
    with graphs_as_they_are():
        patcher = patcher_around(packed_flux(factor=1.25), flux=True)
        wanted = sample(patcher)
        assert distance(wanted, sample(patcher_around(packed_flux(), flux=True))) > MOVES
        clone = host.attach(patcher, CONFIG)
        assert distance(sample(clone), wanted) < TOLERANCE
        assert {row["region"] for row in reported(clone)["eager"]} >= {"double_blocks.0", "single_blocks.1"}


@pytest.mark.parametrize(
    "break_it",
    [
        lambda layer: setattr(layer, "in_features", layer.in_features + 1),
        lambda layer: layer.register_buffer("more", torch.ones(2)),
    ],
    ids=["its code raises", "it has a tensor that the method does not make"],
)
def test_a_layer_that_cannot_be_tried_is_not_lent(break_it: Any) -> None:
    network = packed_flux()
    patcher = patcher_around(network, flux=True)
    layer = matrices(network.double_blocks)[0]
    assert ComfyWeights(patcher.model).can_lease(layer)
    break_it(layer)
    assert not ComfyWeights(patcher.model).can_lease(layer)


def test_a_cancel_while_a_layer_is_tried_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    from comfy.model_management import InterruptProcessingException

    network = packed_flux()
    provider, layer = ComfyWeights(patcher_around(network, flux=True).model), matrices(network.double_blocks)[0]

    def cancelled(*_: Any, **__: Any) -> Any:
        raise InterruptProcessingException

    with monkeypatch.context() as patch:
        patch.setattr(type(layer), "cast_bias_weight", cancelled)
        with pytest.raises(InterruptProcessingException):
            provider.can_lease(layer)
    assert provider.can_lease(layer)


def test_a_method_that_the_layer_s_forward_does_not_use_makes_no_weights() -> None:
    """A layer that casts as ComfyUI's do, whatever else is called so in it."""
    import comfy.ops

    class Linear(comfy.ops.manual_cast.Linear):
        def cast_bias_weight(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("nobody asks it")

    provider = ComfyWeights(patcher_around(packed_flux(), flux=True).model)
    layer = Linear(8, 4).requires_grad_(False)
    layer.weight.normal_(generator=torch.Generator().manual_seed(0))
    layer.bias.zero_()
    assert provider.can_lease(layer)
    (leased,) = provider.acquire([layer], torch.device("cpu")).tensors
    assert torch.equal(leased["weight"], layer.weight)
