# SPDX-License-Identifier: Apache-2.0
"""The pipeline that a benchmark runs: from the hub, from a folder, or with random weights; with what was asked added.

Everything that can be wrong with it is looked at before its weights are: names and folders first, then the room on the
GPU, and, once it is loaded, the keywords and sizes it takes.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import random_pipelines
from benchmarks.unusable import Unusable, nearest

_ROOM = 1.15  # a step needs more than the weights alone
_DENOISERS = ("unet", "transformer", "prior")


@dataclass
class Source:
    """A pipeline and how it is called: height and width in pixels, and keywords of its own."""

    pipe: Any
    size: tuple[int, int]
    call: dict[str, Any] = field(default_factory=dict)
    shrink: int = 1  # sizes of a sweep are divided by it

    def fitted(self, height: int, width: int) -> tuple[int, int]:
        """The nearest larger size that the model takes, for a size meant for models of full size."""
        step = multiple_of(self.pipe, self.call)
        return tuple(-(-one // self.shrink // step) * step for one in (height, width))  # type: ignore[return-value]


# ---- before anything is loaded ------------------------------------------------------------------------------


def check_model(model: str, flag: str = "--model") -> None:
    """Raise Unusable unless the text names random weights, a folder with a pipeline, or may be a name on the hub."""
    if random_pipelines.is_random(model):
        random_pipelines.recipe_of(model)
        return
    folder = Path(model).expanduser()
    if folder.is_dir():
        if flag == "--model" and not (folder / "model_index.json").is_file():
            raise Unusable(
                f"{flag} is the folder {model}, which has no model_index.json; expected a diffusers pipeline"
            )
        return
    if folder.is_file():
        raise Unusable(f"{flag} is the file {model}, expected a folder or a name on the hub; convert it to diffusers")
    if model.startswith(("/", ".", "~")) or model.endswith("/") or model.count("/") != 1:
        raise Unusable(
            f"{flag} is {model!r}, and there is no such folder; expected one, or a hub name such as org/name"
        )
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        raise Unusable(f"{flag} is {model!r}, expected a folder, a hub name such as org/name, or random:sdxl")


def check_scheduler(name: str) -> None:
    """Raise Unusable unless diffusers has a scheduler of this name."""
    import diffusers

    valid = [one for one in dir(diffusers) if one.endswith("Scheduler")]
    if name not in valid:
        raise Unusable(
            f"--scheduler is {name!r}, which diffusers {diffusers.__version__} does not have; did you mean "
            f"{nearest(name, valid)!r}, or none to keep the pipeline's own?"
        )


def check_room(model: str, dtype: torch.dtype, device: torch.device, variant: str | None = None) -> None:
    """Raise Unusable where the weights alone would fill the GPU."""
    if device.type != "cuda":
        return
    random = random_pipelines.is_random(model)
    needed = _ROOM * (random_pipelines.weights_gib(model, dtype) if random else folder_gib(model, variant))
    free = torch.cuda.mem_get_info(device)[0] / 2**30
    if needed > free:
        raise Unusable(
            f"{torch.cuda.get_device_name(device)} has {free:.1f} GiB free and {model} needs about {needed:.1f} GiB; "
            "expected a larger card, or a smaller model"
        )


def folder_gib(model: str, variant: str | None) -> float:
    """GiB of the weights that would be loaded from a folder; 0 for what is still on the hub."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return 0.0
    total = 0
    for part in (one for one in folder.iterdir() if one.is_dir()):
        files = [file for file in part.iterdir() if file.suffix == ".safetensors"] or list(part.glob("*.bin"))
        plain = [file for file in files if file.name.count(".") == 1]
        chosen = [file for file in files if variant and f".{variant}" in file.name] or plain
        total += sum(file.stat().st_size for file in chosen)
    return total / 2**30


# ---- loading ------------------------------------------------------------------------------------------------


def load(args: Any, device: torch.device, dtype: torch.dtype) -> Source:
    """The pipeline on `device`, with scheduler, LoRA and ControlNet. Raises Unusable."""
    from diffusers.utils import logging

    logging.disable_progress_bar()
    check_room(args.model, dtype, device, args.variant)
    if random_pipelines.is_random(args.model):
        recipe, tiny = random_pipelines.recipe_of(args.model)
        pipe = random_pipelines.build(args.model, device, dtype)
        side = recipe.size // (random_pipelines.SHRINK if tiny else 1)
        call = {**recipe.call, **(recipe.tiny_call if tiny else {})}
        source = Source(pipe, (side, side), call, random_pipelines.SHRINK if tiny else 1)
    else:
        pipe = _pretrained(args, dtype).to(device)
        side = _own_side(pipe)
        source = Source(pipe, (side, side))
    _schedule(source.pipe, args.scheduler)
    if getattr(args, "lora", None):
        _fuse_lora(source.pipe, args.lora)
    _exchange(source, args, device, dtype)
    return source


def _pretrained(args: Any, dtype: torch.dtype) -> Any:
    import diffusers

    more = {"variant": args.variant, "custom_pipeline": args.custom_pipeline, "torch_dtype": dtype}
    more = {name: value for name, value in more.items() if value is not None}
    auto = diffusers.DiffusionPipeline if args.custom_pipeline else getattr(diffusers, args.pipeline)
    try:
        return auto.from_pretrained(str(Path(args.model).expanduser()), **more)
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise Unusable(f"{args.model} does not load: {reason}") from error


def _own_side(pipe: Any) -> int:
    """The side of the square that the model was made for, in pixels."""
    size = getattr(denoiser(pipe).config, "sample_size", None) or getattr(pipe, "default_sample_size", None) or 64
    return int(max(size) if isinstance(size, (list, tuple)) else size) * pipe.vae_scale_factor


def denoiser(pipe: Any) -> Any:
    """The network that runs on every step. Raises Unusable for a pipeline without one."""
    for name in _DENOISERS:
        if getattr(pipe, name, None) is not None:
            return getattr(pipe, name)
    raise Unusable(f"a {type(pipe).__name__} has none of {', '.join(_DENOISERS)}; expected a diffusion pipeline")


def _schedule(pipe: Any, name: str | None) -> None:
    """Exchange the scheduler for the one asked for. Without a word about it: the old engine's, where it fits."""
    import diffusers

    if name == "none":
        return
    asked = name or "EulerAncestralDiscreteScheduler"
    fits = {cls.__name__ for cls in pipe.scheduler.compatibles} | {type(pipe.scheduler).__name__}
    if asked not in fits:
        if name is None:
            return
        raise Unusable(
            f"--scheduler is {name}, which a {type(pipe.scheduler).__name__} cannot be exchanged for; expected one of "
            f"{', '.join(sorted(fits))}, or none"
        )
    pipe.scheduler = getattr(diffusers, asked).from_config(pipe.scheduler.config)


def _fuse_lora(pipe: Any, lora: str) -> None:
    import importlib.util

    if not hasattr(pipe, "load_lora_weights") or importlib.util.find_spec("peft") is None:
        lacks = "peft is not installed" if hasattr(pipe, "load_lora_weights") else "it takes none"
        raise Unusable(f"--lora was given for a {type(pipe).__name__}, but {lacks}; expected a pipeline with peft")
    try:
        pipe.load_lora_weights(str(Path(lora).expanduser()))
    except (OSError, ValueError) as error:
        raise Unusable(f"--lora {lora} does not load: {str(error).strip().splitlines()[0]}") from error
    pipe.fuse_lora()
    pipe.unload_lora_weights()  # it is in the weights now: layers are plain ones again


def _exchange(source: Source, args: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Make it a pipeline with a ControlNet, or from image to image, around the same networks."""
    import diffusers

    more: dict[str, Any] = {}
    if getattr(args, "controlnet", None):
        more["controlnet"] = _controlnet(source.pipe, args.controlnet, device, dtype)
    elif not getattr(args, "input_image", None):
        return
    auto = diffusers.AutoPipelineForImage2Image if args.input_image else diffusers.AutoPipelineForText2Image
    try:
        source.pipe = auto.from_pipe(source.pipe, **more)
    except (ValueError, TypeError) as error:
        raise Unusable(f"a {type(source.pipe).__name__} has no such variant: {str(error).splitlines()[0]}") from error


def _controlnet(pipe: Any, name: str, device: torch.device, dtype: torch.dtype) -> Any:
    import diffusers

    if name != "random":
        return diffusers.ControlNetModel.from_pretrained(str(Path(name).expanduser()), torch_dtype=dtype).to(device)
    if getattr(pipe, "unet", None) is None:
        raise Unusable(f"--controlnet random is made from a unet, and a {type(pipe).__name__} has none; name a folder")
    with random_pipelines.made_in(dtype, device):
        net = diffusers.ControlNetModel.from_unet(pipe.unet, load_weights_from_unet=False)
    random_pipelines.fill(net, "controlnet", dtype)
    return net.eval().requires_grad_(False)


# ---- once it is loaded --------------------------------------------------------------------------------------


def multiple_of(pipe: Any, call: dict[str, Any]) -> int:
    """What height and width must be a multiple of, in pixels, for a pipeline called with these keywords."""
    bins = "use_resolution_binning" in inspect.signature(type(pipe).__call__).parameters
    if bins and call.get("use_resolution_binning", True):
        return pipe.vae_scale_factor  # it works at the nearest size of a table of its own
    patch = getattr(denoiser(pipe).config, "patch_size", None) or 1
    processor = getattr(pipe, "image_processor", None) or getattr(pipe, "video_processor", None)
    own = processor.config.vae_scale_factor if processor is not None else 1
    return max(own, pipe.vae_scale_factor * (patch if isinstance(patch, int) else max(patch)))


def check_size(pipe: Any, height: int, width: int, call: dict[str, Any]) -> None:
    """Raise Unusable for a size that the model cannot take."""
    step = multiple_of(pipe, call)
    if height < step or width < step or height % step or width % step:
        near = [max(step, round(one / step) * step) for one in (height, width)]
        raise Unusable(
            f"--height {height} --width {width}: a {type(pipe).__name__} takes multiples of {step}; "
            f"expected for example --height {near[0]} --width {near[1]}"
        )


def check_keywords(pipe: Any, keywords: dict[str, Any]) -> None:
    """Raise Unusable for a keyword that the pipeline's call does not have."""
    valid = [name for name in inspect.signature(type(pipe).__call__).parameters if name != "self"]
    for name in keywords:
        if name not in valid:
            raise Unusable(
                f"--extra-call-kwargs has {name!r}, which a {type(pipe).__name__} does not take; "
                f"did you mean {nearest(name, valid)!r}? It takes {', '.join(valid)}"
            )
