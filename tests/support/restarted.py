# SPDX-License-Identifier: Apache-2.0
"""The second process of a contract: `python restarted.py [--control] NAME...` runs backbones anew and prints JSON.

For each backbone what its report counts, how often Inductor and export were at work, and digests of the results, which
the first process compares with its own. No test lives here.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

THREADS = 1


class Counted:
    """How often torch traced (`exports`) and lowered (`lowerings`) since the hooks were put in."""

    exports = 0
    lowerings = 0

    def as_dict(self) -> dict[str, int]:
        return {"exports": self.exports, "lowerings": self.lowerings}


@contextmanager
def counting() -> Iterator[Counted]:
    """Hooks on torch.export and on Inductor's code generation inside the block."""
    from torch._inductor import compile_fx

    counted = Counted()

    def hooked(original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            setattr(counted, name, getattr(counted, name) + 1)
            return original(*args, **kwargs)

        return run

    export, lowering = torch.export.export, compile_fx.fx_codegen_and_compile
    torch.export.export = hooked(export, "exports")
    compile_fx.fx_codegen_and_compile = hooked(lowering, "lowerings")
    try:
        yield counted
    finally:
        torch.export.export, compile_fx.fx_codegen_and_compile = export, lowering


def calls_of(tiny: Any) -> list[dict[str, Any]]:
    """A few calls that differ in batch, size, prompt length and step."""
    sizes, lengths = tiny.kind.sizes, tiny.kind.lengths
    return [
        {"batch": 2, "size": sizes[0], "length": lengths[0]},
        {"batch": 2, "size": sizes[0], "length": lengths[0], "step": 1},
        {"batch": 1, "size": sizes[3], "length": lengths[1], "seed": 1},
        {"batch": 3, "size": sizes[1], "length": lengths[2], "prompt": 1},
    ]


def digest(tensors: list[torch.Tensor]) -> str:
    """A hash of the exact bits."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(str((tensor.dtype, tuple(tensor.shape))).encode())
        found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def digests(tiny: Any, module: Any) -> list[str]:
    """What a module gives for `calls_of`, as digests."""
    from inputs import tensors_of

    found = []
    with torch.inference_mode():
        for call in calls_of(tiny):
            args, kwargs = tiny.make_inputs(**call)
            found.append(digest(tensors_of(module(*args, **kwargs))))
    return found


def main(names: list[str], control: bool) -> None:
    """Run the named backbones compiled. control: prove on one block then that the hooks would have seen a compile."""
    torch.set_num_threads(THREADS)
    if os.environ.get("COMFYUI_PATH"):
        from conftest import import_comfyui

        import_comfyui(Path(os.environ["COMFYUI_PATH"]))
    import backbones

    import nexfort_engine
    from nexfort_engine.compilation import selfcheck

    found: dict[str, Any] = {}
    with counting() as counted:
        for name in names:
            tiny = backbones.make(name)
            compiled = nexfort_engine.compile(tiny.module)
            results = digests(tiny, compiled)
            report = compiled.report.as_dict()
            kept = ("artefacts_compiled", "artefacts_loaded", "eager", "notes", "seconds_warm")
            found[name] = {"digests": results, **{key: report[key] for key in kept}}
        answer = {"backbones": found, "counted": counted.as_dict()}
    if control:
        with counting() as counted:
            problem = selfcheck.run("cpu")
            answer["control"] = {"problem": problem, **counted.as_dict()}
    print(json.dumps(answer))


if __name__ == "__main__":
    main([name for name in sys.argv[1:] if name != "--control"], "--control" in sys.argv)
