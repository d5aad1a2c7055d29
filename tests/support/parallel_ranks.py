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
import signal
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


def _parallel(module: Any, world: int) -> None:
    """Ulysses: a ring needs attention that gives its log-sum-exp, which diffusers has on GPUs alone."""
    from diffusers.models._modeling_parallel import ContextParallelConfig

    module.enable_parallelism(config=ContextParallelConfig(ulysses_degree=world))


def _calls(pipe: Any, sizes: int) -> list[dict[str, Any]]:
    lengths = (64, 20, 32)
    return [{"size": size, "length": lengths[i % 3]} for i, size in enumerate(pipe.family.sizes[:sizes])]


def families(names: list[str], first: str, heads: int | None = None, odd: Any = None) -> dict[str, Any]:
    """Each compiled and parallel, beside its eager self that is as parallel. first: what is done first.

    odd: size and length of one more call, which diffusers cannot split.
    """
    from subjects import distance, graphs_as_they_are

    import nexfort_engine
    from nexfort_engine.api import engine_of

    told: dict[str, Any] = {}
    with _group() as (_, world), graphs_as_they_are():
        for name in names:
            eager, ours = _network(name, heads), _network(name, heads)
            alone = eager(**_calls(eager, 1)[0])
            _parallel(eager.transformer, world)
            if first == "compile":
                ours = nexfort_engine.compile_pipe(ours)
                _parallel(ours.transformer, world)
            else:
                _parallel(ours.transformer, world)
                ours = nexfort_engine.compile_pipe(ours)
            report = ours.reports["transformer"]
            rows: dict[str, Any] = {"distances": [], "alone": 0.0, "new": []}
            for number, call in enumerate(_calls(eager, 3)):
                mark, wanted, found = report.mark(), eager(**call), ours(**call)
                rows["distances"].append(distance(found, wanted))
                rows["new"].append(len(report.since(mark)["artefacts"]))
                if not number:
                    rows["alone"] = distance(wanted, alone)
            regions = engine_of(ours.transformer).regions
            rows["speak"] = sum(any(one.artefact.groups for one in region.bindings) for region in regions)
            rows["eager"] = [f"{row['region']}: {row['reason']}" for row in report.as_dict()["eager"]]
            rows["refused"] = [_said(pipe, *odd) for pipe in (eager, ours)] if odd else []
            told[name] = rows
    return told


class Speaks:
    """What a block of `small` speaks through, as processors of attention in diffusers do."""

    def __init__(self, group: Any) -> None:
        self.group, self.my_rank = group, group.rank()

    def __call__(self, tokens: Any) -> Any:
        import torch.distributed._functional_collectives as functional

        shape = tokens.shape
        one = functional.all_to_all_single(tokens.flatten(), None, None, self.group)
        other = functional.all_to_all_single((2 * tokens).flatten(), None, None, self.group)
        return (functional.wait_tensor(one) - 0.25 * functional.wait_tensor(other).sin()).reshape(shape)


def _small(blocks: int = 3) -> Any:
    """A network of equal blocks that speak with those of the other ranks."""
    import torch
    import torch.distributed as dist
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.speaks = nn.Linear(8, 8), Speaks(dist.group.WORLD)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return tokens + self.linear(self.speaks(torch.tanh(self.linear(tokens))))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block() for _ in range(blocks)])

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                tokens = block(tokens)
            return tokens

    torch.manual_seed(0)
    return Net().eval().requires_grad_(False)


def small(fails_on: int | None = None, dies_on: int | None = None, lower: bool = False) -> dict[str, Any]:
    """The small network for some lengths. fails_on: a rank that can compile nothing; dies_on: one that is killed."""
    import torch
    from subjects import distance, graphs_as_they_are

    import nexfort_engine
    from nexfort_engine.compilation import builder

    def no_capture(*_: Any, **__: Any) -> Any:
        raise RuntimeError("nothing is captured here")

    told: dict[str, Any] = {"distances": [], "calls": 0}
    with _group() as (rank, _), contextlib.nullcontext() if lower else graphs_as_they_are(), torch.no_grad():
        if rank == fails_on:
            builder.capture = no_capture
        net = _small()
        ours = nexfort_engine.compile(net)
        for length in (4, 6, 10, 4):
            tokens = torch.randn(2, length, 8, generator=torch.Generator().manual_seed(rank))
            told["distances"].append(distance([ours(tokens)], [net(tokens)]))
        told["artefacts"] = [row["source"] for row in ours.report.as_dict()["artefacts"]]
        told["eager"] = [row["reason"] for row in ours.report.as_dict()["eager"]]
        if dies_on is not None:
            print(json.dumps(told), flush=True)
            if rank == dies_on:
                os.kill(os.getpid(), signal.SIGKILL)
            ours(tokens)
    return told


def refused(names: list[str], size: list[int], length: int, heads: int | None = None) -> dict[str, Any]:
    """What eager and compiled networks say to a call that diffusers cannot split."""
    from subjects import graphs_as_they_are

    import nexfort_engine

    told: dict[str, Any] = {}
    with _group() as (_, world), graphs_as_they_are():
        for name in names:
            eager, ours = _network(name, heads), _network(name, heads)
            for pipe in (eager, ours):
                _parallel(pipe.transformer, world)
            ours = nexfort_engine.compile_pipe(ours)
            told[name] = [_said(pipe, size, length) for pipe in (eager, ours)]
    return told


def benchmark(flags: list[str]) -> dict[str, Any]:
    """text_to_image.py with these flags, as torchrun starts it."""
    import torch
    from subjects import graphs_as_they_are

    from benchmarks import text_to_image

    torch.accelerator.device_count = lambda: 1  # as in `_group`
    with graphs_as_they_are():
        return {"code": text_to_image.main(flags)}


def _said(pipe: Any, size: list[int], length: int) -> str:
    """What a network raises in a call, "" where it raises nothing."""
    try:
        pipe(size=tuple(size), length=length)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](**json.loads(sys.argv[2]))))
