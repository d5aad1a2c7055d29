# SPDX-License-Identifier: Apache-2.0
"""A node pack that `python -m nexfort_engine warm --model` mounts, and nobody else: inputs that fit a diffusion model.

To warm a model no text encoder is needed, only conditioning as wide as the model takes; ComfyUI's own nodes make
conditioning from text alone. The pack stands by itself and imports nothing of the engine. Users never see it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from comfy_api.latest import ComfyExtension, io

# network class -> (tokens, width, width of the pooled vector or 0) of what its text encoders give
Shape = tuple[int, int, int]


def _unet(model: Any) -> Shape:
    config = model.model_config.unet_config
    if config.get("context_dim") is None or type(model).__name__.startswith(("SVD", "SV3D", "Stable_Zero")):
        raise _unknown(model)
    # SDXL and its refiner put a pooled text vector and sizes into one; others with such an input take images.
    return 77, int(config["context_dim"]), 1280 if config.get("adm_in_channels") in (2816, 2560) else 0


def _flux(model: Any) -> Shape:
    params = model.diffusion_model.params
    return 256, int(params.context_in_dim), int(params.vec_in_dim or 0)


def _sd3(model: Any) -> Shape:
    network = model.diffusion_model
    return 154, network.context_embedder.in_features, network.y_embedder.mlp[0].in_features


def _wan(model: Any) -> Shape:
    return 512, model.diffusion_model.text_embedding[0].in_features, 0


def _pixart(model: Any) -> Shape:
    return 300, model.diffusion_model.y_embedder.y_proj.fc1.in_features, 0


SHAPES: dict[str, Callable[[Any], Shape]] = {
    "UNetModel": _unet,
    "Flux": _flux,
    "OpenAISignatureMMDITWrapper": _sd3,
    "WanModel": _wan,
    "PixArtMS": _pixart,
}
# Models whose network is one of these and which want more than text and noise, such as reference pictures.
OTHERS = ("Flux2", "LongCatImage", "SD_X4Upscaler", "Lotus", "StableCascade", "SD21UNCLIP")


def _unknown(model: Any) -> ValueError:
    return ValueError(
        f"found a {type(model).__name__} ({type(model.diffusion_model).__name__}), which `warm --model` has no inputs "
        f"for; it knows {', '.join(SHAPES)}. Export a workflow that uses it and give that to `warm --workflow`"
    )


def conditioning_shape(model: Any) -> Shape:
    """(tokens, width, pooled) for ComfyUI's model object; ValueError with one sentence if it is not known."""
    found = SHAPES.get(type(model.diffusion_model).__name__)
    if found is None or type(model).__name__.startswith(OTHERS):
        raise _unknown(model)
    return found(model)


def latent_shape(latent_format: Any, width: int, height: int, batch: int, length: int) -> list[int]:
    """The shape of the noise for that many pictures, or videos of `length` frames."""
    across = latent_format.spacial_downscale_ratio
    shape = [height // across, width // across]
    if latent_format.latent_dimensions == 3:
        shape = [(length - 1) // latent_format.temporal_downscale_ratio + 1, *shape]
    return [batch, latent_format.latent_channels, *shape]


class NexfortWarmInputs(io.ComfyNode):
    """Conditioning and an empty latent that fit the model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The node as the server sees it."""
        return io.Schema(
            node_id="NexfortWarmInputs",
            display_name="Nexfort Warm Inputs",
            category="nexfort",
            inputs=[
                io.Model.Input("model"),
                io.Int.Input("width", default=1024, min=16, max=16384),
                io.Int.Input("height", default=1024, min=16, max=16384),
                io.Int.Input("batch", default=1, min=1, max=4096),
                io.Int.Input("length", default=33, min=1, max=16384),
            ],
            outputs=[io.Conditioning.Output(), io.Latent.Output()],
        )

    @classmethod
    def execute(cls, model: Any, width: int, height: int, batch: int, length: int) -> io.NodeOutput:
        """Zeros would do for compiling; noise also passes models that normalise by the size of their input."""
        tokens, features, pooled = conditioning_shape(model.model)
        generator = torch.Generator().manual_seed(0)
        context = torch.randn((1, tokens, features), generator=generator)
        extra = {"pooled_output": torch.randn((1, pooled), generator=generator)} if pooled else {}
        samples = torch.zeros(latent_shape(model.model.latent_format, width, height, batch, length))
        return io.NodeOutput([[context, extra]], {"samples": samples})


class WarmExtension(ComfyExtension):
    """The pack's node list."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """The nodes of this pack."""
        return [NexfortWarmInputs]


async def comfy_entrypoint() -> WarmExtension:
    """ComfyUI's entry point of a pack."""
    return WarmExtension()
