# SPDX-License-Identifier: Apache-2.0
"""What a region's call costs besides its artefact: microseconds of Python on this processor, by the median.

    COMFYUI_PATH=... python -m benchmarks.dispatch_cost [--steps 40] [--csv dispatch.csv]

ComfyUI's Flux with its 57 blocks, as narrow as detection accepts, run by ComfyUI's own sampler, region by region as
where CUDA graphs are off or refused. Columns: `outside` is the whole call of a block less its artefact, `wrapper` what
torch puts around the compiled code of an artefact, both while that code gives what it gave before: as beside a GPU,
where it only launches. `tenth` is what the fastest tenth of the first stays below, for machines that do other work too.
`beside` is `outside` while the code computes on the same processor and takes its caches, and `code` the time of that.
`standing in` is what the engine does before and after a step, by region.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from benchmarks.one_run import Sampling, as_without_card, find_comfyui
from benchmarks.rows import Row, append_rows, commit

COLUMNS = (
    "date torch commit cpu regions steps kind calls outside_us tenth_us wrapper_us beside_us code_us command".split()
)
FIGURES = COLUMNS[-6:-1]
TARGET = 20.0  # microseconds
_WARM = 3  # steps before the first that counts
_DEPTH = {"depth": 19, "depth_single_blocks": 38}  # of the published Flux


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--csv", default="", help="file to append to")
    args = parser.parse_args(argv)
    find_comfyui()
    as_without_card()
    found = measure(args.steps)
    print(f"{'region':20}{'calls':>7}" + "".join(f"{name[:-3]:>10}" for name in FIGURES) + "   (microseconds, medians)")
    for row in found:
        cells = [f"{row[name]:.1f}" if row[name] != "" else "-" for name in FIGURES]
        print(f"{row['kind']:20}{row['calls']:7}" + "".join(f"{cell:>10}" for cell in cells))
    print(f"the aim is at most {TARGET:g} outside, the standing in included")
    if args.csv:
        append_rows(Path(args.csv), found, COLUMNS)
    return 0


def measure(steps: int) -> list[Row]:
    """A row for each kind of region, one for all, one for what is done once a step."""
    import torch

    from .backbones import BACKBONES

    small = BACKBONES["flux"].at_small_size()
    engine, sample = prepare(replace(small, settings={**small.settings, **_DEPTH}))
    sample(_WARM)
    eager = engine.report.as_dict()["eager"]
    assert not eager, f"a region ran eager, expected none: {eager[0]}"
    computing, still = Clock(engine), Clock(engine, still=True)
    for clock in (computing, still):
        with clock.on():
            sample(steps)
    ours = {"torch": torch.__version__, "commit": commit(), "regions": len(engine.regions), "steps": steps}
    ours["date"] = datetime.date.today().isoformat()
    ours |= {"cpu": processor(), "command": f"python -m benchmarks.dispatch_cost --steps {steps}"}
    return [dict.fromkeys(COLUMNS, "") | ours | row for row in rows(still, computing, len(engine.regions))]


def prepare(backbone: Any) -> tuple[Any, Callable[[int], Any]]:
    """The engine of a network in ComfyUI, and what runs so many steps of it."""
    import comfy.model_management
    import comfy.sd
    import torch

    from nexfort_engine.config.compile_config import CompileConfig
    from nexfort_engine.hosts.comfy.model import attach, engine_for

    from .backbones import state_dict

    device = comfy.model_management.get_torch_device()
    weights = state_dict(backbone, device)
    patcher = comfy.sd.load_diffusion_model_state_dict(weights, model_options={"dtype": torch.float32})
    config = CompileConfig.parse({"options": {"triton.cudagraphs": False}})
    model = attach(patcher, config)
    comfy.model_management.load_models_gpu([model])
    sampling = Sampling(backbone, "")
    return engine_for(patcher.model.diffusion_model, config, patcher.model), lambda steps: sampling(model, steps)


class Clock:
    """Times of each region's call, of its artefact inside it, and of the compiled code inside that.

    still: the code gives what it gave at its first call here, and computes nothing.
    """

    def __init__(self, engine: Any, still: bool = False) -> None:
        self.engine, self.still = engine, still
        self.calls: dict[str, list[tuple[int, int, int]]] = defaultdict(list)  # kind -> outside, wrapper, code
        self.steps: list[int] = []  # of placing and displacing
        self._artefact = self._code = 0

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Take the times of the engine's steps."""
        from nexfort_engine.dispatch import forward_shim
        from nexfort_engine.system.process_settings import replaced

        kinds = {id(region.module): region.kind for region in self.engine.regions}
        make = forward_shim._forward
        with contextlib.ExitStack() as put_back:
            for graph in _compiled_graphs():
                inner = _given_before(graph.current_callable) if self.still else graph.current_callable
                put_back.enter_context(replaced(graph, "current_callable", self._around("_code", inner)))
            for binding in [binding for region in self.engine.regions for binding in region.bindings]:
                put_back.enter_context(replaced(binding, "code", self._around("_artefact", binding.code)))
            stood_in = lambda block: self._stood_in(make(block), kinds.get(id(block)))  # noqa: E731
            put_back.enter_context(replaced(forward_shim, "_forward", stood_in))
            put_back.enter_context(replaced(self.engine, "active", self._stepping(self.engine.active)))
            yield

    def _around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            began = perf_counter_ns()
            result = call(*args)
            setattr(self, name, perf_counter_ns() - began)
            return result

        return run

    def _stood_in(self, forward: Any, kind: str | None) -> Any:
        """A shim with a clock; one that stands for no region, the network itself, is left as it is."""
        from nexfort_engine.modules.tree import mark_shim

        if kind is None:
            return forward

        def run(*args: Any, **kwargs: Any) -> Any:
            self._artefact = self._code = 0
            began = perf_counter_ns()
            result = forward(*args, **kwargs)
            took = perf_counter_ns() - began
            self.calls[kind].append((took - self._artefact, self._artefact - self._code, self._code))
            return result

        mark_shim(run, forward.nexfort_of)
        return run

    def _stepping(self, active: Callable[..., Any]) -> Callable[..., Any]:
        @contextlib.contextmanager
        def timed(**given: Any) -> Iterator[Any]:
            began = perf_counter_ns()
            with active(**given) as session:
                entered = perf_counter_ns()
                yield session
                left = perf_counter_ns()
            self.steps.append(entered - began + perf_counter_ns() - left)

        return timed


def _given_before(code: Callable[..., Any]) -> Callable[..., Any]:
    """Code that computes once for inputs of the same sizes."""
    kept: dict[Any, Any] = {}

    def give(inputs: Any) -> Any:
        sizes = tuple([getattr(one, "shape", one) for one in inputs])
        if sizes not in kept:
            kept[sizes] = code(inputs)
        return kept[sizes]

    return give


def rows(still: Clock, computing: Clock, regions: int) -> list[Row]:
    """Medians in microseconds: of each kind of region, of all, and of what is done once a step."""
    kinds = [[kind] for kind in sorted(still.calls, key=lambda kind: -len(still.calls[kind]))]
    found = []
    for some in (*kinds, list(still.calls)):
        outside, wrapper, _ = _medians(still, some)
        tenth = _tenth([outside for kind in some for outside, _, _ in still.calls[kind]])
        beside, _, code = _medians(computing, some)
        calls = sum(len(still.calls[kind]) for kind in some)
        name = some[0] if some in kinds else "all regions"
        figures = dict(zip(FIGURES, (outside, tenth, wrapper, beside, code), strict=True))
        found.append({"kind": name, "calls": calls, **figures})
    times = {"outside_us": still.steps, "beside_us": computing.steps}
    figures = {name: statistics.median(steps) / 1e3 for name, steps in times.items()} | {
        "tenth_us": _tenth(still.steps)
    }
    by_region = {name: round(value / regions, 2) for name, value in figures.items()}
    return [*found, {"kind": "standing in", "calls": len(still.steps), **by_region}]


def _tenth(times: list[int]) -> float:
    """Microseconds below which a tenth of the times is, of two times or more."""
    return round(statistics.quantiles(times, n=10)[0] / 1e3, 2)


def _medians(clock: Clock, kinds: list[str]) -> list[float]:
    times = [time for kind in kinds for time in clock.calls[kind]]
    return [round(statistics.median(column) / 1e3, 2) for column in zip(*times, strict=True)]


def _compiled_graphs() -> list[Any]:
    """What the artefacts of this process call in the end. Torch 2.11; a wrapper of another kind would count as code."""
    from torch._inductor.output_code import CompiledFxGraph

    gc.unfreeze()  # what was frozen is not listed
    found = [one for one in gc.get_objects() if type(one) is CompiledFxGraph and one.current_callable is not None]
    assert found, "torch keeps the code of artefacts in another way than in 2.11; look for it in _inductor/output_code"
    return found


def processor() -> str:
    """The processor's name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    sys.exit(main())
