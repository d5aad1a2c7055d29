# SPDX-License-Identifier: Apache-2.0
"""One backbone, one way of running it, one process: first step, steady step, memory, final latent. Prints a JSON line.

    COMFYUI_PATH=... python -m benchmarks.one_run sdxl nexfort --options '{"mode": "O2"}' --latent out.pt

Ways: eager, fp32 (eager in float32: the truth that errors are measured against), noise (eager with another attention
kernel: the noise floor), core (ComfyUI's TorchCompileModel), regional (torch.compile on each repeated block), nexfort.
The model is loaded before the first step is timed. Run by benchmarks.record and benchmarks.ladder, which put the lines
into results.csv.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WAYS = ("eager", "fp32", "noise", "core", "regional", "nexfort")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backbone")
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--options", default="", help="options of Nexfort as JSON")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--size", default="", help="HEIGHTxWIDTH, default the backbone's")
    parser.add_argument("--latent", default="", help="file for the final latent")
    parser.add_argument(
        "--sweep", default="", help="more sizes after it, HxW,HxW: first, second, steady and queued step of each"
    )
    parser.add_argument(
        "--dynamic-vram", action="store_true", help="with ComfyUI's dynamic VRAM, its default on NVIDIA"
    )
    parser.add_argument(
        "--budget", type=float, default=0.0, help="GiB of the card that are left free, weights included"
    )
    parser.add_argument("--channels-last", action="store_true", help="as ComfyUI started with --force-channels-last")
    parser.add_argument("--lora", action="store_true", help="also: seconds of the step after a LoRA's strength changed")
    parser.add_argument("--small", action="store_true", help="the backbone at a size for a processor, in float32")
    parser.add_argument("--flops", action="store_true", help="also: TFLOP/s, and the share of what a product reaches")
    parser.add_argument("--profile", action="store_true", help="print where the time of four queued steps goes")
    return parser.parse_args(argv)


def main() -> int:
    """Measure and print."""
    args = parse()
    find_comfyui()
    if args.dynamic_vram:
        import comfy_aimdo.control

        comfy_aimdo.control.init()  # before torch loads CUDA, as ComfyUI's main does it
    import torch

    from . import card
    from .backbones import BACKBONES, state_dict

    backbone = BACKBONES[args.backbone].at_small_size() if args.small else BACKBONES[args.backbone]
    as_without_card()
    import comfy.cli_args
    import comfy.model_management
    import comfy.sd

    comfy.cli_args.args.force_channels_last = args.channels_last
    device = comfy.model_management.get_torch_device()
    dtype = torch.float32 if args.way == "fp32" else backbone.dtype
    elsewhere = args.dynamic_vram or args.budget
    began_with = card.used()
    weights = state_dict(backbone, device, torch.device("cpu") if elsewhere else None)
    if args.dynamic_vram:
        card.use_dynamic_vram(device.index)  # layers that are made under it have no weights to take names from
    torch.cuda.empty_cache()
    ballast = card.fill(args.budget) if args.budget else None
    began_with += ballast.nbytes if ballast is not None else 0
    patcher = comfy.sd.load_diffusion_model_state_dict(weights, model_options={"dtype": dtype})
    del weights
    model = prepare(patcher, args.way, args.options, backbone.repeated)
    comfy.model_management.load_models_gpu([model])
    found = measure(model, backbone, args)
    sampling = Sampling(backbone, args.size)
    most = card.most_used(lambda: sampling(model, 4))
    found["device_gib"] = None if most is None else card.gib(most - began_with)
    if args.flops:
        found |= rate(lambda: sampling(patcher, 1), found["ms"], card.ceiling(dtype, device))
    print(json.dumps(found), flush=True)
    del ballast
    return 0


def find_comfyui() -> None:
    """Make ComfyUI importable, which parses the command line of whoever imports it."""
    sys.argv = sys.argv[:1]
    sys.path.insert(0, os.environ.get("COMFYUI_PATH") or str(Path.home() / "comfy" / "ComfyUI"))


def as_without_card() -> None:
    """Where there is no card, tell ComfyUI so, and to take the attention that can be traced."""
    import torch

    if torch.cuda.is_available():
        return
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    comfy.cli_args.args.use_pytorch_cross_attention = True


def rate(eager_step: Callable[[], Any], ms: float, ceiling: float) -> dict[str, float]:
    """What a step computes, how fast the measured one did it, and how fast the card multiplies."""
    from . import card

    work = card.teraflop(eager_step)
    speed = work / (ms / 1e3)
    numbers = {"tflop": work, "tflops": speed, "ceiling_tflops": ceiling, "of_ceiling": speed / ceiling}
    return {name: float(f"{number:.4g}") for name, number in numbers.items()}


def prepare(patcher: Any, way: str, options: str, repeated: tuple[str, ...]) -> Any:
    """The patcher run the given way. repeated: classes of the blocks that are compiled one by one."""
    import torch

    if way == "noise":
        for kind in ("cudnn", "flash"):
            getattr(torch.backends.cuda, f"enable_{kind}_sdp")(False)
        use_only_efficient_attention()
    if way in ("core", "regional"):
        return with_core(patcher, repeated if way == "regional" else None)
    if way == "nexfort":
        from nexfort_engine.config.compile_config import CompileConfig
        from nexfort_engine.hosts.comfy.model import attach

        return attach(patcher, CompileConfig.parse(options or None))
    return patcher


def with_core(patcher: Any, repeated: tuple[str, ...] | None) -> Any:
    """What ComfyUI's node TorchCompileModel does with its default backend; the node itself imports video codecs.

    repeated: instead of the whole network each block of these classes, as diffusers' `compile_repeated_blocks`.
    """
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    def skip(entries: Any) -> list[bool]:
        return ["transformer_options" not in entry.name for entry in entries]

    network = patcher.model.diffusion_model
    keys = ["diffusion_model"]
    if repeated is not None:
        blocks = [path for path, module in network.named_modules() if type(module).__name__ in repeated]
        assert blocks, f"{type(network).__name__} has no block of the classes {', '.join(repeated)}"
        keys = [f"diffusion_model.{path}" for path in blocks]
    model = patcher.clone()
    set_torch_compile_wrapper(model=model, backend="inductor", options={"guard_filter_fn": skip}, keys=keys)
    return model


def use_only_efficient_attention() -> None:
    """ComfyUI asks for its kernels by a list of priorities, which overrides the flags of torch.backends."""
    import comfy.ops
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            return torch.nn.functional.scaled_dot_product_attention(*args, **kwargs)

    comfy.ops.scaled_dot_product_attention = attention


class Sampling:
    """Euler on a backbone's inputs at one seed, with the time of each step.

    Each step is waited for, as previews wait for it; with `queued` none is, as ComfyUI does it without previews.
    """

    def __init__(self, backbone: Any, size: str) -> None:
        import comfy.sample  # noqa: F401  # as ComfyUI has it when it starts: no part of a first step
        import torch

        generator = torch.Generator().manual_seed(7)
        self.backbone = backbone
        self.positive, self.negative = backbone.conditioning(generator), backbone.conditioning(generator)
        self.size = tuple(map(int, size.split("x"))) if size else backbone.size

    def __call__(self, model: Any, steps: int, size: Any = None, times: list[float] | None = None) -> Any:
        """The latent after so many steps; `times` gets the seconds of each, from where the sampler begins."""
        from comfy.k_diffusion import sampling

        from . import card

        ends: list[float] = []

        def settled(*_: Any) -> None:
            card.settle()
            ends.append(time.perf_counter())

        @functools.wraps(sampling.sample_euler)
        def begun(*args: Any, **kwargs: Any) -> Any:
            settled()
            return euler(*args, **kwargs)

        gc.collect()  # what was left before is no part of a step
        euler, sampling.sample_euler = sampling.sample_euler, begun
        try:
            result = self._sample(model, steps, size or self.size, settled)
        finally:
            sampling.sample_euler = euler
        if times is not None:
            times += [after - before for before, after in itertools.pairwise(ends)]
        return result

    def _sample(self, model: Any, steps: int, size: Any, after: Callable[..., None]) -> Any:
        import comfy.sample
        import torch

        latent = self.backbone.latent(*size)
        noise = comfy.sample.prepare_noise(latent, 1)
        found = comfy.sample.sample(
            model, noise, steps, self.backbone.cfg, "euler", self.backbone.scheduler, self.positive, self.negative,
            latent, callback=after, disable_pbar=True, seed=1,
        )  # fmt: skip
        return torch.cat([one.flatten() for one in found.unbind()]) if getattr(found, "is_nested", False) else found

    def queued(self, model: Any, steps: int, size: Any = None) -> float:
        """Seconds a step where only the first and the last are waited for."""
        from . import card

        ends: list[float] = []

        def after(step: int, _x0: Any, _x: Any, total: int) -> None:
            if step in (0, total - 1):
                card.settle()
                ends.append(time.perf_counter())

        gc.collect()
        self._sample(model, steps, size or self.size, after)
        return (ends[-1] - ends[0]) / (steps - 1)

    def first(self, model: Any, size: Any = None) -> float:
        """Seconds of one picture of one step."""
        from . import card

        gc.collect()
        card.settle()
        began = time.perf_counter()
        self._sample(model, 1, size or self.size, _nothing)
        card.settle()
        return time.perf_counter() - began


def _nothing(*_: Any) -> None:
    """After a step."""


def measure(model: Any, backbone: Any, args: argparse.Namespace) -> dict[str, Any]:
    """First step, steady step (median), peak memory and the final latent of one model."""
    import torch

    from . import card

    sampling = Sampling(backbone, args.size)
    height, width = sampling.size
    card.count_anew()
    first = sampling.first(model)
    compiling_peak = card.peak()
    sampling(model, 2)
    card.count_anew()
    times: list[float] = []
    out = sampling(model, args.steps, times=times)
    del times[:1]  # of the first the sampler's own beginning is a part
    found = {
        "backbone": backbone.name,
        "way": args.way,
        "options": args.options,
        "size": f"{height}x{width}" + (f"x{backbone.frames}" if backbone.frames else ""),
        "steps": args.steps,
        "first_s": round(first, 2),
        "ms": round(sorted(times)[len(times) // 2] * 1e3, 2),
        "ms_least": round(min(times) * 1e3, 2),
        "ms_queued": round(sampling.queued(model, max(args.steps, 2)) * 1e3, 2),
        "peak_gib": card.peak(),
        "first_peak_gib": compiling_peak,
        "gpu": card.name(),
        "torch": torch.__version__,
        "finite": bool(out.isfinite().all()),
    }
    if args.way == "nexfort":
        from nexfort_engine.hosts.comfy.model import report_of

        found["report"] = report_of(model).as_dict()
    if args.latent:
        torch.save(out, args.latent)
    if args.sweep:
        found["sweep"] = {size: sweep(sampling, model, size) for size in args.sweep.split(",")}
        if args.way == "nexfort":
            found["compiled_after_sweep"] = report_of(model).as_dict()["artefacts_compiled"]
    if args.lora:
        compiled = found.get("report", {}).get("artefacts_compiled", 0)
        found["lora_s"] = lora_change(sampling, model)
        if args.way == "nexfort":
            found["compiled_by_lora"] = report_of(model).as_dict()["artefacts_compiled"] - compiled
    if args.profile:
        card.profile(lambda: sampling.queued(model, 4))
    return found


def sweep(sampling: Sampling, model: Any, size: str) -> dict[str, float]:
    """Milliseconds of the first step at another size, of the second (which captures the graph), of a steady and a
    queued one; with the median of the first step once that size is known, which is what it takes without either."""
    height_width = tuple(map(int, size.split("x")))
    times, known = list[float](), list[float]()
    sampling(model, 6, height_width, times)
    for _ in range(3):
        sampling(model, 1, height_width, known)
    found = {"first_ms": times[0], "second_ms": times[1], "steady_ms": statistics.median(times[2:])}
    found["again_first_ms"] = statistics.median(known)
    found["queued_ms"] = sampling.queued(model, 6, height_width)
    return {name: round(seconds * 1e3, 2) for name, seconds in found.items()}


def lora_change(sampling: Sampling, model: Any) -> list[float]:
    """Seconds of a step right after a LoRA on every matrix went to strength 0.5, 0.8 and 0.3; ends without it."""
    import comfy.lora
    import comfy.sd
    import torch

    keys = comfy.lora.model_lora_keys_unet(model.model, {})
    shapes = {name: tuple(like.shape) for name, like in model.model.state_dict().items()}
    generator = torch.Generator().manual_seed(3)
    file = {}
    for alias, name in keys.items():
        if isinstance(name, str) and len(shapes.get(name, ())) == 2 and alias.startswith("lora_unet_"):
            out, wide = shapes[name]
            file[f"{alias}.lora_up.weight"] = torch.randn((out, 16), generator=generator) * 0.01
            file[f"{alias}.lora_down.weight"] = torch.randn((16, wide), generator=generator) / wide**0.5
            file[f"{alias}.alpha"] = torch.tensor(16.0)
    assert file, "no matrix of this model has a name that a LoRA could give"
    found = []
    for strength in (0.5, 0.8, 0.3):
        patched, _ = comfy.sd.load_lora_for_models(model, None, file, strength, 0)
        found.append(round(sampling.first(patched), 3))
    sampling(model, 1)
    return found


if __name__ == "__main__":
    sys.exit(main())
