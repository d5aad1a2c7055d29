# SPDX-License-Identifier: Apache-2.0
"""Tiny control nets of ComfyUI's own classes with random weights, and what its nodes make of them.

Each kind fits one backbone of patchers.py. `under(links)` does to the conditions what ComfyUI's "Apply ControlNet
(Advanced)" does, one node a link. No test lives here; ComfyUI must have been imported (the fixture `comfyui`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from backbones import make, with_weights
from patchers import FAMILIES, Conditions, patcher_around, sample

HINT = (128, 128)
Edit = Callable[[Conditions, Conditions], tuple[Conditions, Conditions]]
_UNET: dict[str, Any] = {
    **{"image_size": 32, "in_channels": 4, "model_channels": 64, "num_res_blocks": [2, 2], "channel_mult": [1, 1]},
    **{"num_heads": 2, "context_dim": 16, "transformer_depth": [1] * 4, "transformer_depth_middle": 1},
    **{"use_spatial_transformer": True, "use_linear_in_transformer": False, "legacy": False},
}


def _cpu() -> dict[str, Any]:
    import comfy.ops

    return {"device": "cpu", "dtype": torch.float32, "operations": comfy.ops.disable_weight_init}


def unet(**settings: Any) -> Any:
    """The ControlNet of SD1.5 and SDXL: a UNet's first half. settings: what is not as usual."""
    import comfy.cldm.cldm
    import comfy.controlnet

    network = comfy.cldm.cldm.ControlNet(**{**_UNET, "hint_channels": 3, **_cpu(), **settings})
    return comfy.controlnet.ControlNet(with_weights(network, "control_unet"), load_device=torch.device("cpu"))


def flux() -> Any:
    """A union ControlNet of Flux that is given images."""
    import comfy.controlnet
    import comfy.ldm.flux.controlnet

    network = comfy.ldm.flux.controlnet.ControlNetFlux(
        **{**_cpu(), "image_model": "flux", "in_channels": 4, "out_channels": 4, "vec_in_dim": 8},
        **{"context_in_dim": 16, "hidden_size": 32, "mlp_ratio": 4.0, "num_heads": 2, "axes_dim": [4, 6, 6]},
        **{"depth": 2, "depth_single_blocks": 2, "theta": 10000, "patch_size": 2, "qkv_bias": True},
        **{"guidance_embed": True, "txt_ids_dims": [], "num_union_modes": 4, "control_latent_channels": 16},
    )
    cpu = torch.device("cpu")
    return comfy.controlnet.ControlNet(
        with_weights(network, "control_flux"), load_device=cpu, extra_conds=["y", "guidance"]
    )


def t2i() -> Any:
    """A T2I adapter, which is called once a run."""
    import comfy.controlnet
    import comfy.t2i_adapter.adapter

    network = comfy.t2i_adapter.adapter.Adapter(
        cin=192, channels=[64, 64, 64, 64], nums_rb=1, ksize=1, sk=True, use_conv=False, xl=False
    )
    cpu = torch.device("cpu")
    return comfy.controlnet.T2IAdapter(
        with_weights(network, "t2i"), network.input_channels, 8, "nearest-exact", device=cpu
    )


def lora() -> Any:
    """A control LoRA: it makes its network in `pre_run` out of the UNet that is sampled."""
    import comfy.controlnet

    found = {"lora_controlnet": torch.zeros([])}
    draw = torch.Generator().manual_seed(4)
    for name, weight in unet().control_model.state_dict().items():
        if name.startswith(("input_hint_block", "zero_convs", "middle_block_out")):
            found[name] = weight
        elif name.endswith("to_q.weight"):
            place = name.removesuffix("weight")
            found[f"{place}up"] = torch.randn(weight.shape[0], 2, generator=draw)
            found[f"{place}down"] = torch.randn(2, weight.shape[1], generator=draw)
    return comfy.controlnet.ControlLora(found)


def qwen() -> Any:
    """A ControlNet of Qwen-Image in the manner of InstantX. A made-up latent stands for the encoded hint."""
    import comfy.controlnet
    import comfy.ldm.qwen_image.controlnet

    network = comfy.ldm.qwen_image.controlnet.QwenImageControlNetModel(
        **{**_cpu(), "patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 2, "joint_attention_dim": 16},
        **{"attention_head_dim": 16, "num_attention_heads": 2, "pooled_projection_dim": 8, "axes_dims_rope": (4, 6, 6)},
    )
    return comfy.controlnet.ControlNet(
        with_weights(network, "control_qwen"),
        compression_ratio=1,
        load_device=torch.device("cpu"),
        extra_conds=[],
        preprocess_image=lambda image: 8 * torch.cat([image - 0.5, 0.5 - image[:, :1]], 1).unsqueeze(2),
    )


KINDS: dict[str, tuple[Callable[[], Any], str]] = {
    "unet": (unet, "comfy_unet"),
    "flux": (flux, "comfy_flux"),
    "qwen": (qwen, "comfy_qwen"),
    "t2i": (t2i, "comfy_unet"),
    "lora": (lora, "comfy_unet"),
}
ALIKE = ("qwen",)  # another one in all but its layers: only `make test-large` runs it
ALL = [pytest.param(name, marks=pytest.mark.large if name in ALIKE else ()) for name in KINDS]
HOLDS_ITS_OWN = [param for param in ALL if param.values != ("lora",)]


def model_for(name: str) -> Any:
    """A patcher of the model that this kind of control net is for."""
    patcher = patcher_around(make(KINDS[name][1]).module, family=FAMILIES[KINDS[name][1]])
    if name == "lora":
        patcher.model.model_config.unet_config = {**_UNET, "out_channels": 4}
    return patcher


def hint(seed: int = 0, count: int = 1) -> torch.Tensor:
    """Images as nodes hand them on."""
    return torch.rand(count, *HINT, 3, generator=torch.Generator().manual_seed(50 + seed))


def under(
    *links: Any, strength: float = 1.0, span: tuple[float, float] = (0.0, 1.0), image: torch.Tensor | None = None
) -> Edit:
    """The conditions under these control nets, chained in this order."""
    picture = hint() if image is None else image

    def edit(positive: Conditions, negative: Conditions) -> tuple[Conditions, Conditions]:
        last = None
        for link in links:
            applied = link.copy().set_cond_hint(picture.movedim(-1, 1), strength, span, vae=None, extra_concat=[])
            applied.set_previous_controlnet(last)
            last = applied
        both = [
            [[words, {**more, "control": last, "control_apply_to_uncond": False}] for words, more in one]
            for one in (positive, negative)
        ]
        return both[0], both[1]

    return edit


def picture(patcher: Any, *links: Any, call: dict[str, Any] | None = None, **given: Any) -> torch.Tensor:
    """The latent under these control nets. given: `under`'s keywords; call: those of `sample`."""
    return sample(patcher, edit=under(*links, **given) if links else None, **(call or {}))


def qwen_fun() -> Any:
    """A ControlNet of Qwen-Image that is given the whole model as an argument."""
    import comfy.controlnet
    import comfy.ldm.qwen_image.controlnet

    network = comfy.ldm.qwen_image.controlnet.QwenImageFunControlNetModel(
        **{**_cpu(), "control_in_features": 64, "inner_dim": 32, "num_attention_heads": 2, "attention_head_dim": 16},
        **{"num_control_blocks": 2, "main_model_double": 4, "injection_layers": (0, 2)},
    )
    cpu = torch.device("cpu")
    return comfy.controlnet.QwenFunControlNet(
        with_weights(network, "control_qwen_fun"), compression_ratio=1, load_device=cpu, extra_conds=[]
    )


def called(control: Any, model: Any, batch: int = 2, size: tuple[int, int] = (16, 16)) -> list[torch.Tensor]:
    """What one step of a sampler asks of a control net, for models that patchers.py has no sampling of."""
    draw = torch.Generator().manual_seed(7)
    applied = control.copy().set_cond_hint(torch.rand(1, 16, *size, generator=draw))
    x, words = torch.randn(batch, 4, 1, *size, generator=draw), torch.randn(batch, 20, 16, generator=draw)
    with torch.inference_mode():
        applied.pre_run(model, lambda percent: 1.0 - percent)
        try:
            found = applied.get_control(x, torch.full((batch,), 0.5), {"c_crossattn": words}, batch, {})
        finally:
            applied.cleanup()
    return [tensor for tensors in found.values() for tensor in tensors if tensor is not None]
