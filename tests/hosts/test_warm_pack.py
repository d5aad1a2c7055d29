# SPDX-License-Identifier: Apache-2.0
"""The inputs that `warm --model` makes, held against what ComfyUI's own models take; test_warm.py runs them."""

from __future__ import annotations

import importlib
import types
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.comfy


@pytest.fixture(scope="module")
def pack(comfyui: Path) -> types.ModuleType:
    return importlib.import_module("nexfort_engine.hosts.warm_pack")


def model(kind: str, network: str, *, config: dict[str, Any] | None = None, **attributes: Any) -> Any:
    """What `conditioning_shape` looks at of ComfyUI's model object."""
    diffusion_model = type(network, (), attributes)()
    made = type(kind, (), {"model_config": types.SimpleNamespace(unet_config=config or {})})()
    made.diffusion_model = diffusion_model
    return made


@pytest.mark.parametrize(
    ("name", "width", "pooled"),
    [("SD15", 768, 0), ("SD20", 1024, 0), ("SDXL", 2048, 1280), ("SDXLRefiner", 1280, 1280), ("SSD1B", 2048, 1280)],
)
def test_unets_by_comfyuis_own_configs(pack: types.ModuleType, name: str, width: int, pooled: int) -> None:
    import comfy.supported_models

    config = getattr(comfy.supported_models, name).unet_config
    assert pack.conditioning_shape(model("BaseModel", "UNetModel", config=config)) == (77, width, pooled)


def linear(width: int) -> Any:
    return types.SimpleNamespace(in_features=width)


@pytest.mark.parametrize(
    ("given", "width", "pooled"),
    [
        (("Flux", "Flux", {"params": types.SimpleNamespace(context_in_dim=4096, vec_in_dim=768)}), 4096, 768),
        (("WAN21", "WanModel", {"text_embedding": [linear(4096)]}), 4096, 0),
        (
            (
                "SD3",
                "OpenAISignatureMMDITWrapper",
                {"context_embedder": linear(4096), "y_embedder": types.SimpleNamespace(mlp=[linear(2048)])},
            ),
            4096,
            2048,
        ),
    ],
)
def test_transformers_by_their_layers(
    pack: types.ModuleType, given: tuple[str, str, dict[str, Any]], width: int, pooled: int
) -> None:
    kind, network, attributes = given
    assert pack.conditioning_shape(model(kind, network, **attributes))[1:] == (width, pooled)


@pytest.mark.parametrize(
    ("kind", "network"),
    [("HunyuanVideo", "HunyuanVideo"), ("Flux2", "Flux"), ("SVD_img2vid", "UNetModel"), ("SD21UNCLIP", "UNetModel")],
)
def test_what_takes_more_than_text_is_refused_in_one_sentence(pack: types.ModuleType, kind: str, network: str) -> None:
    with pytest.raises(ValueError, match="warm --workflow") as refused:
        pack.conditioning_shape(model(kind, network, config={"context_dim": 1024}))
    assert kind in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("SD15", [2, 4, 64, 96]), ("Flux", [2, 16, 64, 96]), ("Wan21", [2, 16, 9, 64, 96]), ("Wan22", [2, 48, 9, 32, 48])],
)
def test_the_noise_fits_comfyuis_latent_formats(pack: types.ModuleType, name: str, shape: list[int]) -> None:
    import comfy.latent_formats

    latent_format = getattr(comfy.latent_formats, name)()
    assert pack.latent_shape(latent_format, 768, 512, 2, 33) == shape
