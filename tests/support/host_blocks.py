# SPDX-License-Identifier: Apache-2.0
"""Blocks of ComfyUI's own classes, at the sizes of real models, as the engine captures them on a GPU that is not there.

Nothing is computed: weights and inputs are tensors without numbers, and every size of an input but 1 is a symbol.
ComfyUI must have been imported before one is captured (the fixture `comfyui` in conftest.py does it).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from nexfort_engine.capture.exporter import capture
from nexfort_engine.capture.types import Captured, Example
from nexfort_engine.guards.call_spec import Flat, flatten_call
from nexfort_engine.weights import subclass_unwrap

TEXT, IMAGE, FRAMES = 512, 4096, 14040  # tokens
HALF, SINGLE = torch.bfloat16, torch.float32
Input = tuple[tuple[int, ...], torch.dtype] | None


def _settings() -> dict[str, Any]:
    import comfy.ops

    return {"device": "cpu", "dtype": HALF, "operations": comfy.ops.disable_weight_init}


def flux_double() -> tuple[nn.Module, list[Input]]:
    from comfy.ldm.flux.layers import DoubleStreamBlock

    table = ((2, 1, TEXT + IMAGE, 64, 2, 2), SINGLE)
    inputs: list[Input] = [((2, IMAGE, 3072), HALF), ((2, TEXT, 3072), HALF), ((2, 3072), HALF), table]
    return DoubleStreamBlock(3072, 24, 4.0, qkv_bias=True, **_settings()), inputs


def flux_single() -> tuple[nn.Module, list[Input]]:
    from comfy.ldm.flux.layers import SingleStreamBlock

    length = TEXT + IMAGE
    table = ((2, 1, length, 64, 2, 2), SINGLE)
    return SingleStreamBlock(3072, 24, 4.0, **_settings()), [((2, length, 3072), HALF), ((2, 3072), HALF), table]


def wan() -> tuple[nn.Module, list[Input]]:
    """Of Wan2.1-1.3B, whose table is one for the whole batch and all heads, which lie behind the tokens."""
    from comfy.ldm.wan.model import WanAttentionBlock

    block = WanAttentionBlock("t2v_cross_attn", 1536, 8960, 12, cross_attn_norm=True, operation_settings=_settings())
    table = ((1, FRAMES, 1, 64, 2, 2), SINGLE)
    return block, [((2, FRAMES, 1536), HALF), ((2, 6, 1536), HALF), table, ((2, TEXT, 1536), HALF)]


def z_image() -> tuple[nn.Module, list[Input]]:
    """Its operator has the norms in it, where the package has such."""
    from comfy.ldm.lumina.model import JointTransformerBlock

    block = JointTransformerBlock(
        *(0, 3840, 30, 30, 256, 8 / 3, 1e-5, True), z_image_modulation=True, operation_settings=_settings()
    )
    table = ((2, IMAGE, 1, 64, 2, 2), SINGLE)
    return block, [((2, IMAGE, 3840), HALF), None, table, ((2, 256), HALF)]


def pixart() -> tuple[nn.Module, list[Input]]:
    """All six numbers for a row of its modulation come in one tensor of two dimensions."""
    from comfy.ldm.pixart.pixartms import PixArtMSBlock

    block = PixArtMSBlock(1152, 16, sampling="conv", **_settings())
    return block, [((2, IMAGE, 1152), HALF), ((1, 240, 1152), HALF), ((2, 6 * 1152), HALF)]


HOST_BLOCKS: dict[str, Callable[[], tuple[nn.Module, list[Input]]]] = {
    one.__name__: one for one in (flux_double, flux_single, wan, z_image)
}
WITHOUT_ROTARY = {"pixart": pixart}


def with_attention_of_others(kind: str) -> Captured:
    """As `host_captured`, with an attention override among the options."""
    return host_captured(kind, {"optimized_attention_override": lambda own, *args, **kwargs: own(*args, **kwargs)})


def host_captured(kind: str, options: dict[str, Any] | None = None) -> Captured:
    """A block as a process with a GPU captures it."""
    block, inputs = {**HOST_BLOCKS, **WITHOUT_ROTARY}[kind]()
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        patch.setattr(subclass_unwrap, "is_plain", lambda _: True)
        patch.setattr(FakeTensor, "data_ptr", lambda tensor: id(tensor))
        for module in block.modules():
            for name, weight in list(module._parameters.items()):
                if weight is not None:
                    there = torch.empty(weight.shape, dtype=weight.dtype, device="cuda:0")
                    module._parameters[name] = nn.Parameter(there, requires_grad=False)
        given = [None if one is None else torch.empty(one[0], dtype=one[1], device="cuda:0") for one in inputs]
        flat = Flat()
        spec = flatten_call(tuple(given), {"transformer_options": options or {}}, flat)
        return capture(block, Example.of(spec, flat))
