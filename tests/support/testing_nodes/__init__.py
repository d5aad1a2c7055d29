# SPDX-License-Identifier: Apache-2.0
"""A node pack for tests on the real server: what stands for networks, text encoders and decoders that cannot be tiny.

Tests mount this folder in ComfyUI's custom_nodes. It is no part of the plugin.
"""

from __future__ import annotations

import sys
from pathlib import Path

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
            *(TestRandomConditioning, TestBlockForward, TestModelForward),
            *(TestNetwork, TestSoundLatent, TestFrames, TestSound),
        ]


async def comfy_entrypoint() -> TestingExtension:
    """ComfyUI's entry point of a pack."""
    return TestingExtension()
