# SPDX-License-Identifier: Apache-2.0
"""A node pack for tests on the real server: random conditioning where a text encoder cannot be tiny.

Tests mount this folder in ComfyUI's custom_nodes. It is no part of the plugin.
"""

from __future__ import annotations

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


class TestingExtension(ComfyExtension):
    """The pack's node list."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """The nodes of this pack."""
        return [TestRandomConditioning, TestBlockForward]


async def comfy_entrypoint() -> TestingExtension:
    """ComfyUI's entry point of a pack."""
    return TestingExtension()
