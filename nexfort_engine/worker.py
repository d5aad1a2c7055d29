# SPDX-License-Identifier: Apache-2.0
"""A lowering worker: `python -m nexfort_engine.worker`, one job a line on standard input, one answer a line on output.

A job names a file with a pickled graph (written by `pack`, in a private directory of the same user), the directory the
payload goes to, and the settings. Nothing of the host is imported here; operators come from installed packages only.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from .capture import Captured


def pack(captured: Captured) -> bytes:
    """A captured graph as bytes for a worker of this very torch."""
    from torch.fx._graph_pickler import GraphPickler, Options

    for node in captured.graph.graph.nodes:  # stack traces and module names are not needed to lower it
        node.meta = {"val": node.meta["val"]} if "val" in node.meta else {}
    captured.graph.meta.clear()
    options = Options(ops_filter=None, node_metadata_key_filter=None)
    return GraphPickler.dumps((captured.graph, captured.constants), options)


def unpack(data: bytes) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    """What `pack` packed, in a shape environment of its own."""
    from torch._subclasses import FakeTensorMode
    from torch.fx._graph_pickler import GraphPickler
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    packed: Any = GraphPickler.loads(data, FakeTensorMode(shape_env=ShapeEnv()))
    graph, constants = packed
    graph.recompile()
    return graph, constants


def work(job: dict[str, Any]) -> None:
    """Lower one job. Raises what Inductor raises."""
    from . import lower
    from .cpu_probe import remember_in

    for name in job["modules"]:
        importlib.import_module(name)
    if job["probes"]:
        remember_in(Path(job["probes"]))
    if job["device"].startswith("cuda"):
        torch.cuda.set_device(torch.device(job["device"]))
    file = Path(job["file"])
    graph, constants = unpack(file.read_bytes())
    file.unlink()
    lower.lower_graph(graph, constants, Path(job["payload"]), job["options"])


def main() -> int:
    """Serve jobs until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # compilers print to standard output; answers must stay readable
    import torch._inductor.compile_fx  # noqa: F401  # while the parent still captures

    for line in sys.stdin:
        job = json.loads(line)
        try:
            work(job)
            answer: dict[str, Any] = {"ok": True}
        except Exception as error:
            # whatever went wrong is the answer: the parent reports it for the region
            first = (str(error).strip().splitlines() or [""])[0][:300]
            answer = {"ok": False, "error": f"{type(error).__name__}: {first}"}
        print(json.dumps(answer), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
