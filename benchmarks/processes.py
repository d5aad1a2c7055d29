# SPDX-License-Identifier: Apache-2.0
"""One picture split over several processes by diffusers' context parallelism, one GPU each, as torchrun starts them."""

from __future__ import annotations

import contextlib
import datetime
import math
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.unusable import Unusable

KINDS = ("ulysses", "ring")
_SECONDS = 600  # that a process waits for the others: weights are made and blocks compiled meanwhile


def parse(text: str) -> dict[str, int]:
    """`ulysses:2` or `ulysses:2,ring:2` as kind -> degree. Raises Unusable."""
    degrees: dict[str, int] = {}
    for part in text.split(","):
        kind, _, count = part.partition(":")
        if kind not in KINDS or kind in degrees or not count.isdecimal() or int(count) < 1:
            raise Unusable(f"--parallel is {text!r}; expected {' or '.join(f'{kind}:N' for kind in KINDS)}, or both")
        degrees[kind] = int(count)
    return degrees


def check(degrees: dict[str, int], script: str) -> None:
    """Raise Unusable unless torchrun started as many processes as the degrees ask for. script: what it starts."""
    wanted, there = math.prod(degrees.values()), int(os.environ.get("WORLD_SIZE", "1"))
    if there != wanted or "RANK" not in os.environ:
        asked = ",".join(f"{kind}:{count}" for kind, count in degrees.items())
        raise Unusable(
            f"--parallel is {asked}, and the number of processes is {there}; expected "
            f"torchrun --nproc-per-node {wanted} {script} ..."
        )
    if not dist.is_available():
        raise Unusable("--parallel is given, and this torch was built without torch.distributed")


def is_first() -> bool:
    """Whether this process prints and writes files: the only one, or the first of several."""
    return int(os.environ.get("RANK", "0")) == 0


def own_device(device: torch.device) -> torch.device:
    """The GPU of this process among those of its host."""
    if device.type != "cuda":
        return device
    number = int(os.environ.get("LOCAL_RANK", "0"))
    if number >= torch.cuda.device_count():
        raise Unusable(f"--parallel asks for GPU {number} of this host, which has {torch.cuda.device_count()}")
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


@contextlib.contextmanager
def group(device_type: str) -> Iterator[None]:
    """Inside the block the processes speak with each other."""
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=_SECONDS))
    try:
        yield
    finally:
        dist.destroy_process_group()


def split(pipe: Any, degrees: dict[str, int]) -> None:
    """Let the pipeline's denoiser split its tokens among the processes. Raises Unusable where diffusers cannot."""
    from diffusers import ContextParallelConfig

    denoiser = getattr(pipe, "transformer", None)
    if denoiser is None or getattr(denoiser, "_cp_plan", None) is None:
        raise Unusable(f"--parallel is given, and diffusers splits no denoiser of a {type(pipe).__name__}")
    config = ContextParallelConfig(**{f"{kind}_degree": count for kind, count in degrees.items()})
    try:
        denoiser.enable_parallelism(config=config)
    except (NotImplementedError, ValueError) as error:
        raise Unusable(f"--parallel: diffusers refuses: {error}") from error
