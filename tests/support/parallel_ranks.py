# SPDX-License-Identifier: Apache-2.0
"""Networks of diffusers in several processes that split a picture's tokens among them, by gloo on a CPU.

`run` starts the processes, each of which is this file, and gives what they print: a JSON object each. No test lives
here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclasses.dataclass
class Ended:
    """How a rank ended: its exit code, what it printed as JSON, and all that it wrote."""

    code: int | None
    told: dict[str, Any]
    text: str


def start(world: int, work: str, folder: Path, **settings: Any) -> list[subprocess.Popen[str]]:
    """So many ranks that do some work, one of the functions below, with a cache in a folder. settings: its keywords."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    paths = os.pathsep.join(map(str, (HERE.parent.parent, HERE, HERE.parent)))
    env = {**os.environ, **own, "NEXFORT_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": paths}
    return [
        subprocess.Popen(
            [sys.executable, __file__, work, json.dumps(settings)],
            env={**env, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]


def ends(ranks: list[subprocess.Popen[str]], seconds: float) -> list[Ended]:
    """How ranks end; those that have not ended by then are killed, and their exit code is None."""
    until, found = time.monotonic() + seconds, []
    for rank in ranks:
        code: int | None
        try:
            text, _ = rank.communicate(timeout=max(0.1, until - time.monotonic()))
            code = rank.returncode
        except subprocess.TimeoutExpired:
            rank.kill()
            text, code = rank.communicate()[0], None
        told = [line for line in text.splitlines() if line.startswith("{")]
        found.append(Ended(code, json.loads(told[-1]) if told else {}, text))
    return found


def run(world: int, work: str, folder: Path, seconds: float = 300, **settings: Any) -> list[Ended]:
    """What ranks tell once all ended well."""
    ended = ends(start(world, work, folder, **settings), seconds)
    assert all(one.code == 0 for one in ended), "\n".join(one.text[-3000:] for one in ended)
    return ended


# ---- what a rank does ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _group() -> Iterator[tuple[int, int]]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    torch.accelerator.device_count = lambda: 1  # diffusers asks for it, and divides by it
    yield dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()


def _flux() -> Any:
    from diffusers_families.family import Family
    from diffusers_families.image_calls import packed

    tokens = packed(8)
    config = {"patch_size": 1, "in_channels": 8, "joint_attention_dim": 16, "pooled_projection_dim": 16}
    config |= {"num_attention_heads": 2, "attention_head_dim": 16, "axes_dims_rope": (4, 6, 6)}  # type: ignore[dict-item]

    def give(draw: Any, batch: int, size: Any, length: int) -> dict[str, Any]:
        return {**tokens(draw, batch, size, length), "pooled_projections": draw.prompt(batch, 16)}

    return Family("flux", "FluxTransformer2DModel", give, config, depth=("num_layers", "num_single_layers"))


def _network(name: str, heads: int | None) -> Any:
    from diffusers_families import FAMILIES, Pipe

    family = _flux() if name == "flux" else FAMILIES[name]
    more = {} if heads is None else {"num_attention_heads": heads}

    def give(draw: Any, batch: int, size: Any, length: int) -> dict[str, Any]:
        """Without a mask of the prompt: diffusers' own attention takes none for its heads where it splits them."""
        found = family.give(draw, batch, size, length)
        return {**found, "encoder_attention_mask": None} if name == "ltx" else found

    return Pipe(dataclasses.replace(family, config={**family.config, **more}, give=give))


def _parallel(module: Any, world: int, how: str) -> None:
    from diffusers.models._modeling_parallel import ContextParallelConfig

    degrees = {"ulysses": {"ulysses_degree": world}, "ring": {"ring_degree": world}}
    both = {"both": {"ulysses_degree": 2, "ring_degree": world // 2}}
    module.enable_parallelism(config=ContextParallelConfig(**{**degrees, **both}[how]))


def _calls(pipe: Any, sizes: int) -> list[dict[str, Any]]:
    lengths = (64, 20, 32)
    return [{"size": size, "length": lengths[i % 3]} for i, size in enumerate(pipe.family.sizes[:sizes])]


def families(names: list[str], first: str, how: str = "ulysses", heads: int | None = None) -> dict[str, Any]:
    """Each compiled and parallel, beside its eager self that is as parallel. first: what is done first."""
    from subjects import distance, graphs_as_they_are

    import nexfort_engine

    told: dict[str, Any] = {}
    with _group() as (_, world), graphs_as_they_are():
        for name in names:
            eager, ours = _network(name, heads), _network(name, heads)
            alone = eager(**_calls(eager, 1)[0])
            _parallel(eager.transformer, world, how)
            if first == "compile":
                ours = nexfort_engine.compile_pipe(ours)
                _parallel(ours.transformer, world, how)
            else:
                _parallel(ours.transformer, world, how)
                ours = nexfort_engine.compile_pipe(ours)
            report = ours.reports["transformer"]
            rows: dict[str, Any] = {"distances": [], "alone": 0.0, "new": []}
            for number, call in enumerate(_calls(eager, 3)):
                mark, wanted, found = report.mark(), eager(**call), ours(**call)
                rows["distances"].append(distance(found, wanted))
                rows["new"].append(len(report.since(mark)["artefacts"]))
                if not number:
                    rows["alone"] = distance(wanted, alone)
            rows["eager"] = [f"{row['region']}: {row['reason']}" for row in report.as_dict()["eager"]]
            told[name] = rows
    return told


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](**json.loads(sys.argv[2]))))
