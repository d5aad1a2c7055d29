# SPDX-License-Identifier: Apache-2.0
"""Decode a latent through ComfyUI's VAE of SD and SDXL, one way in one process: first call, steady call, memory, error.

    COMFYUI_PATH=... python -m benchmarks.vae_decode nexfort --size 1024 --picture ours.pt --against fp32.pt

Ways: eager, fp32 (eager in float32: the truth), core (the decoder through torch.compile with channels innermost),
nexfort. Weights are random (seed 0), in the layout of the published checkpoints. Prints a JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

WAYS = ("eager", "fp32", "core", "nexfort")
# of the published checkpoints
_CONFIG = {
    **{"double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128},
    **{"ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0},
}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--size", type=int, default=1024, help="pixels of each side")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--options", default="", help="options of Nexfort as JSON")
    parser.add_argument("--picture", default="", help="file for the picture")
    parser.add_argument("--against", default="", help="file of a picture: print the distance to it")
    args = parser.parse_args()
    sys.argv = sys.argv[:1]  # ComfyUI parses the command line of whoever imports it
    sys.path.insert(0, os.environ.get("COMFYUI_PATH") or str(Path.home() / "comfy" / "ComfyUI"))
    print(json.dumps(measure(args)), flush=True)
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one way."""
    import torch

    vae = prepare(random_vae(torch.float32 if args.way == "fp32" else torch.bfloat16), args.way, args.options)
    side = args.size // 8
    latent = torch.randn(1, 4, side, side, generator=torch.Generator().manual_seed(1))
    first, picture = timed(vae, latent)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times = [timed(vae, latent)[0] for _ in range(args.runs + 2)][2:]
    found = {
        **{"way": args.way, "options": args.options, "size": f"{args.size}x{args.size}", "runs": args.runs},
        **{"first_s": round(first, 2), "ms": round(statistics.median(times) * 1e3, 2), "torch": torch.__version__},
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if on_gpu else None,
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
    }
    if args.way == "nexfort":
        found["report"] = vae.first_stage_model.report.as_dict()
    if args.picture:
        torch.save(picture, args.picture)
    if args.against:
        truth = torch.load(args.against).float()
        found["error"] = float(f"{float((picture.float() - truth).norm() / truth.norm()):.3g}")
    return found


def random_vae(dtype: Any) -> Any:
    """ComfyUI's VAE of a checkpoint with random weights."""
    import comfy.sd
    import torch
    from comfy.ldm.models.autoencoder import AutoencoderKL

    with torch.device("meta"):
        like = AutoencoderKL(ddconfig=_CONFIG, embed_dim=4).state_dict()
    torch.manual_seed(0)
    weights = {}
    for name, value in like.items():
        scale = 1.0 / (value[0].numel() ** 0.5) if value.dim() > 1 else 0.02
        ones = value.dim() == 1 and "norm" in name and name.endswith("weight")
        weights[name] = torch.ones(value.shape) if ones else torch.randn(value.shape) * scale
    return comfy.sd.VAE(sd=weights, dtype=dtype)


def prepare(vae: Any, way: str, options: str) -> Any:
    """The VAE run the given way."""
    import torch

    if way == "core":
        model = vae.first_stage_model
        model.decoder = torch.compile(model.decoder.to(memory_format=torch.channels_last))
    if way == "nexfort":
        from nexfort_engine.config.compile_config import CompileConfig
        from nexfort_engine.hosts.comfy.model import attach_vae

        return attach_vae(vae, CompileConfig.parse(options or None))
    return vae


def timed(vae: Any, latent: Any) -> tuple[float, Any]:
    """Seconds of one decode, the copy to main memory included, and the picture."""
    import torch

    began = time.perf_counter()
    with torch.inference_mode():  # as ComfyUI runs its nodes
        picture = vae.decode(latent)
    return time.perf_counter() - began, picture


if __name__ == "__main__":
    sys.exit(main())
