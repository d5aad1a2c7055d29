# SPDX-License-Identifier: Apache-2.0
"""A node pack for tests on the real server: what stands for networks, text encoders and decoders that cannot be tiny.

Tests mount this folder in ComfyUI's custom_nodes. It is no part of the plugin.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from comfy_api.latest import ComfyExtension, io


class TestRandomConditioning(io.ComfyNode):
    """Conditioning from a seed: what a text encoder would give for a prompt of `tokens` tokens."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The node as the front end sees it."""
        return io.Schema(
            node_id="TestRandomConditioning",
            display_name="Test Random Conditioning",
            category="testing",
            inputs=[
                io.Int.Input("seed", default=0, min=0),
                io.Int.Input("tokens", default=77, min=1, max=4096),
                io.Int.Input("width", default=768, min=1, max=16384),
                io.Int.Input("pooled", default=0, min=0, max=16384, tooltip="0: no pooled vector"),
                io.Boolean.Input("mask", default=False, optional=True, tooltip="which tokens count: all of them"),
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, seed: int, tokens: int, width: int, pooled: int, mask: bool = False) -> io.NodeOutput:
        """The same tensors for the same numbers."""
        generator = torch.Generator().manual_seed(seed)
        context = torch.randn((1, tokens, width), generator=generator)
        extra = {"pooled_output": torch.randn((1, pooled), generator=generator)} if pooled else {}
        if mask:
            extra["attention_mask"] = torch.ones((1, tokens), dtype=torch.int64)
        return io.NodeOutput([[context, extra]])


class TestBlockForward(io.ComfyNode):
    """A Flux with another forward on its first double block, as some packs put there. It stays as long as the model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The node as the front end sees it."""
        return io.Schema(
            node_id="TestBlockForward",
            display_name="Test Block Forward",
            category="testing",
            inputs=[io.Model.Input("model")],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model: io.Model.Type) -> io.NodeOutput:
        """The model itself."""
        block = model.model.diffusion_model.double_blocks[0]
        block.forward = lambda *args, **kwargs: type(block).forward(block, *args, **kwargs)
        return io.NodeOutput(model)


class TestModelForward(io.ComfyNode):
    """A model with another forward that never calls its own, so that nothing of it can be compiled."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The node as the front end sees it."""
        return io.Schema(
            node_id="TestModelForward",
            display_name="Test Model Forward",
            category="testing",
            inputs=[io.Model.Input("model")],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model: io.Model.Type) -> io.NodeOutput:
        """The model itself."""
        model.model.diffusion_model.forward = lambda x, *args, **kwargs: x * 0.5
        return io.NodeOutput(model)


class TestSlow(io.ComfyNode):
    """A Flux whose uncompiled attention, or whose compiled blocks, take longer than they need."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The node as the front end sees it."""
        return io.Schema(
            node_id="TestSlow",
            display_name="Test Slow",
            category="testing",
            inputs=[io.Model.Input("model"), io.Combo.Input("slow", options=["uncompiled", "compiled"])],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model: io.Model.Type, slow: str) -> io.NodeOutput:
        """A clone with a wrapper around each step."""
        kind = _slow_attention if slow == "uncompiled" else _slow_regions
        made: list[tuple[Any, str, Any]] = []  # at the first step: what is compiled for is loaded by then

        def step(apply: Callable[..., Any], given: dict[str, Any]) -> Any:
            made.extend([] if made else [kind()])
            with mock.patch.object(*made[0]):
                return apply(given["input"], given["timestep"], **given["c"])

        clone = model.clone()
        clone.set_model_unet_function_wrapper(step)
        return io.NodeOutput(clone)


def _slow_attention() -> tuple[Any, str, Any]:
    """Attention that waits before it begins, which compiled code does not."""
    from comfy.ldm.flux import layers

    own = layers.attention

    def attention(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.05)
        return own(*args, **kwargs)

    return layers, "attention", attention


def _slow_regions() -> tuple[Any, str, Any]:
    region = next(module for name, module in sys.modules.items() if name.endswith("nexfort_engine.dispatch.region"))
    own = region.Region._ran

    def ran(self: Any, *args: Any) -> Any:
        time.sleep(0.05)
        return own(self, *args)

    return region.Region, "_ran", ran


class TestNetwork(io.ComfyNode):
    """A tiny network of a family whose files ComfyUI can tell by their real widths alone."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The node as the front end sees it."""
        return io.Schema(
            node_id="TestNetwork",
            display_name="Test Network",
            category="testing",
            inputs=[io.String.Input("family", tooltip="of tests/support/loader_families.py")],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, family: str) -> io.NodeOutput:
        """What ComfyUI's loader makes of the file."""
        support = Path(__file__).resolve().parents[1]
        sys.path += [path for path in (str(support), str(support.parent)) if path not in sys.path]
        import loader_families

        known = {**loader_families.FAMILIES, **loader_families.SOUNDING}
        return io.NodeOutput(loader_families.loaded(known[family]))


class TestSoundLatent(io.ComfyNode):
    """An empty latent of a sound, as LTX's own node makes it with the sound's autoencoder at hand."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The node as the front end sees it."""
        return io.Schema(
            node_id="TestSoundLatent",
            display_name="Test Sound Latent",
            category="testing",
            inputs=[io.Int.Input("frames", default=6, min=1, max=64)],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, frames: int) -> io.NodeOutput:
        """Of LTX's channels and bins."""
        return io.NodeOutput({"samples": torch.zeros(1, 8, frames, 16), "sample_rate": 16000, "type": "audio"})


class TestFrames(io.ComfyNode):
    """Frames from the latent of a video, or of a video with its sound: its first channels as colours."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The node as the front end sees it."""
        return io.Schema(
            node_id="TestFrames",
            display_name="Test Frames",
            category="testing",
            inputs=[io.Latent.Input("samples")],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(cls, samples: io.Latent.Type) -> io.NodeOutput:
        """One frame for each of the latent's."""
        latent = samples["samples"]
        video = latent.unbind()[0] if getattr(latent, "is_nested", False) else latent
        colours = torch.sigmoid(video[0, :3].float()).movedim(0, -1)
        return io.NodeOutput(colours.repeat_interleave(8, 1).repeat_interleave(8, 2).contiguous())


class TestSound(io.ComfyNode):
    """A short sound from the latent of one, or of a video with its sound."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The node as the front end sees it."""
        return io.Schema(
            node_id="TestSound",
            display_name="Test Sound",
            category="testing",
            inputs=[io.Latent.Input("samples")],
            outputs=[io.Audio.Output()],
        )

    @classmethod
    def execute(cls, samples: io.Latent.Type) -> io.NodeOutput:
        """Its numbers as a wave."""
        latent = samples["samples"]
        sound = latent.unbind()[-1] if getattr(latent, "is_nested", False) else latent
        wave = torch.tanh(sound.float().flatten()).repeat(64)[:16000]
        return io.NodeOutput({"waveform": wave.repeat(2, 1)[None], "sample_rate": 16000})


class TestingExtension(ComfyExtension):
    """The pack's node list."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """The nodes of this pack."""
        return [
            *(TestRandomConditioning, TestBlockForward, TestModelForward, TestSlow),
            *(TestNetwork, TestSoundLatent, TestFrames, TestSound),
        ]


async def comfy_entrypoint() -> TestingExtension:
    """ComfyUI's entry point of a pack."""
    return TestingExtension()
