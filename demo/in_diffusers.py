# SPDX-License-Identifier: Apache-2.0
"""The demo without ComfyUI: diffusers' own Flux pipeline around a small transformer with random weights.

Two processes share one artefact cache: the first finds it empty, the second does not. Each is this file run as a
module with a role; they leave what they measured in a folder.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .outcome import SIZES, STEPS, Outcome, Stop, first_step_s, per_step_ms

TOKENS = 77


def run(output: Path, scratch: Path, say: Any) -> Outcome:
    """Run both processes and put together what they found. Pictures land in `output`."""
    env = {**os.environ, "NEXFORT_CACHE_DIR": str(scratch / "cache"), "HF_HUB_OFFLINE": "1"}
    found = {}
    for role in ("cold", "warm"):
        say(f"{role} process: {'eager and compiled at each size' if role == 'cold' else 'compiled once more'}")
        command = [sys.executable, "-m", f"{__package__}.in_diffusers", role, str(scratch), str(output)]
        done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"the {role} process ended with exit code {done.returncode}; it says why above")
        found[role] = json.loads((scratch / f"{role}.json").read_text(encoding="utf-8"))
    cold, warm = found["cold"], found["warm"]
    return Outcome(
        host=cold["host"],
        model=cold["model"],
        device=cold["device"],
        stops=[Stop(**{**stop, "size": tuple(stop["size"])}) for stop in cold["stops"]],
        cold_first_step=cold["first_step"],
        warm_first_step=warm["first_step"],
        warm_compiled=warm["report"]["artefacts_compiled"],
        warm_loaded=warm["report"]["artefacts_loaded"],
        same_bits=cold["digest"] == warm["digest"],
        moved=cold["moved"],
        images=cold["images"],
        reports={"cold": cold["report"], "warm": warm["report"]},
    )


# ---- inside the two processes ------------------------------------------------------------------------------


def build_pipeline(device: str) -> Any:
    """A Flux pipeline without text encoders; all its weights are drawn here."""
    import torch
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(
        patch_size=1, in_channels=64, num_layers=2, num_single_layers=4, attention_head_dim=64, num_attention_heads=2,
        joint_attention_dim=256, pooled_projection_dim=64, guidance_embeds=True, axes_dims_rope=(16, 24, 24),
    )  # fmt: skip
    vae = AutoencoderKL(
        latent_channels=16, block_out_channels=(16, 16, 32, 32), norm_num_groups=8, sample_size=512,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0), vae=vae, transformer=transformer, text_encoder=None,
        tokenizer=None, text_encoder_2=None, tokenizer_2=None,
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(device)


def sample(pipe: Any, size: tuple[int, int], prompt: int = 1) -> tuple[Any, Any, list[tuple[int, float]]]:
    """(picture, final latent, (steps done, when) from the sampler's beginning on)."""
    import torch

    device = pipe.transformer.device
    generator = torch.Generator().manual_seed(prompt)
    words = torch.randn(1, TOKENS, 256, generator=generator).to(device)
    pooled = torch.randn(1, 64, generator=generator).to(device)
    kept: list[Any] = []
    ends = [(0, time.perf_counter())]

    def after_step(_pipe: Any, step: int, _timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        kept[:] = [values["latents"].float().cpu()]  # waits for the device
        ends.append((step + 1, time.perf_counter()))
        return {}

    picture = pipe(
        prompt_embeds=words, pooled_prompt_embeds=pooled, width=size[0], height=size[1], num_inference_steps=STEPS,
        generator=torch.Generator().manual_seed(7), callback_on_step_end=after_step,
    ).images[0]  # fmt: skip
    return picture, kept[0], ends


def cold(output: Path) -> dict[str, Any]:
    """Eager and compiled at every size, from an empty cache."""
    import diffusers
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    pipe = build_pipeline(device)
    sample(pipe, SIZES[0])  # whatever a first call costs is not eager's speed
    compiled = compile_transformer(pipe)
    report = compiled.transformer.report
    stops, images, first_step, digest, moved = [], [], 0.0, "", 0.0
    for size in SIZES:
        eager_picture, eager_latent, eager_ends = sample(pipe, size)
        mark = report.mark()
        picture, latent, ends = sample(compiled, size)
        if not stops:
            first_step, digest = first_step_s(ends), digest_of(latent)
            moved = distance(sample(pipe, size, prompt=2)[1], eager_latent)
        stop = Stop(size, per_step_ms(eager_ends), per_step_ms(ends), distance(latent, eager_latent))
        stop.artefacts_compiled = report.since(mark)["artefacts_compiled"]
        stops.append(vars(stop))
        for kind, image in (("eager", eager_picture), ("compiled", picture)):
            images.append(f"{size[0]}x{size[1]}_{kind}.png")
            image.save(output / images[-1])
    return {
        "host": f"diffusers {diffusers.__version__}",
        "model": "a tiny Flux",
        "device": f"{device}, float32, torch {torch.__version__}, {torch.get_num_threads()} threads",
        "stops": stops,
        "first_step": first_step,
        "digest": digest,
        "moved": moved,
        "images": images,
        "report": report.as_dict(),
    }


def warm(output: Path) -> dict[str, Any]:
    """The first size once more, from the cache that the other process left."""
    import torch

    pipe = build_pipeline("cuda" if torch.cuda.is_available() else "cpu")
    sample(pipe, SIZES[0])  # as before the cold first step
    compiled = compile_transformer(pipe)
    _, latent, ends = sample(compiled, SIZES[0])
    report = compiled.transformer.report
    return {"first_step": first_step_s(ends), "digest": digest_of(latent), "report": report.as_dict()}


def compile_transformer(pipe: Any) -> Any:
    """The pipeline with its transformer compiled. The VAE runs once a picture and stays eager, for a shorter demo."""
    import nexfort_engine

    return nexfort_engine.compile_pipe(pipe, ignores=("vae",))


def distance(ours: Any, eager: Any) -> float:
    """||ours - eager|| / ||eager||."""
    return float((ours - eager).norm() / eager.norm())


def digest_of(tensor: Any) -> str:
    """A hash that is the same for the same bits."""
    import hashlib

    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def main() -> None:
    """One role: `python -m demo.in_diffusers cold|warm SCRATCH OUTPUT`."""
    import logging

    from nexfort_engine.reporting import progress

    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("cold", "warm"))
    parser.add_argument("scratch", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="  %(message)s")
    logging.getLogger("nexfort").setLevel(logging.INFO)
    shown = [-1]

    def show(event: progress.Event) -> None:
        if event.done != shown[0]:
            shown[0] = event.done
            sys.stdout.write(f"  {event.text}\n")
            sys.stdout.flush()

    with progress.use_sink(show):
        found = (cold if options.role == "cold" else warm)(options.output)
    (options.scratch / f"{options.role}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
