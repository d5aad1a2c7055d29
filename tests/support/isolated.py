# SPDX-License-Identifier: Apache-2.0
"""A process in which somebody else compiles too: `python isolated.py`, in an environment of the test's own.

Prints JSON: every process-wide setting before and after Nexfort has compiled and run, as far as it differs, and what
the other user's caches did. It looks by itself and not through the engine's own snapshot. No test lives here.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import types
import warnings
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.compile_fx
import torch._inductor.config
import torch.fx.experimental._config
from torch._dynamo.utils import counters

CONFIGS = (
    torch._inductor.config,
    torch._dynamo.config,
    torch._functorch.config,
    torch.fx.experimental._config,
)
GETTERS = (
    *("get_default_dtype", "get_default_device", "get_num_threads", "get_num_interop_threads", "is_grad_enabled"),
    *("is_inference_mode_enabled", "are_deterministic_algorithms_enabled"),
    *("is_deterministic_algorithms_warn_only_enabled", "get_float32_matmul_precision", "is_autocast_enabled"),
    *("is_autocast_cache_enabled", "is_warn_always_enabled", "is_anomaly_enabled", "initial_seed"),
)  # fmt: skip


def settings() -> dict[str, str]:
    """All process-wide settings that a library might change, as text."""
    found = {f"environment {name}": value for name, value in os.environ.items()}
    for module in CONFIGS:
        found.update({f"{module.__name__}.{k}": repr(v) for k, v in module.get_config_copy().items()})
    found.update({f"torch.{name}": repr(getattr(torch, name)()) for name in GETTERS})
    found.update(_backends("torch.backends", torch.backends, set()))
    found.update(_knobs())
    found["random state"] = torch.get_rng_state().numpy().tobytes().hex()
    for name, logger in [("", logging.root), *logging.Logger.manager.loggerDict.items()]:
        if isinstance(logger, logging.Logger) and name.partition(".")[0] in ("", "torch", "triton"):
            found[f"logger {name}"] = f"{logger.level} {logger.disabled} {logger.propagate} {len(logger.handlers)}"
    found["warnings"] = repr(warnings.filters)
    found["sys.path"] = repr(sys.path)
    found["hooks"] = repr((sys.excepthook, sys.displayhook, threading.excepthook, sys.gettrace(), sys.getprofile()))
    found["signals"] = repr([(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)])
    found["working directory"] = os.getcwd()
    found["umask"] = oct(_umask())
    return found


def _backends(name: str, module: Any, seen: set[int]) -> dict[str, str]:
    found: dict[str, str] = {}
    seen.add(id(module))
    for key in dir(module):
        if key.startswith("__"):
            continue
        try:
            value = getattr(module, key)
        except (RuntimeError, AssertionError) as error:  # a card that is not there
            value = f"{type(error).__name__}: {error}"
        if (
            isinstance(value, types.ModuleType)
            and value.__name__.startswith("torch.backends")
            and id(value) not in seen
        ):
            found.update(_backends(f"{name}.{key}", value, seen))
        elif isinstance(value, (bool, int, float, str, type(None))):
            found[f"{name}.{key}"] = repr(value)
    return found


def _knobs() -> dict[str, str]:
    try:
        from triton import knobs
    except ImportError:  # no Triton, or one from before it had them
        return {}
    groups = {name: group for name, group in vars(knobs).items() if isinstance(group, knobs.base_knobs)}
    return {f"triton.{name}.{k}": repr(v) for name, group in groups.items() for k, v in group.knobs.items()}


def _umask() -> int:
    before = os.umask(0o077)
    os.umask(before)
    return before


def files_in(folder: Path) -> dict[str, int]:
    """Every file below a folder and its time of change."""
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}


def others_code(x: torch.Tensor) -> torch.Tensor:
    """What somebody else compiles."""
    return torch.nn.functional.gelu(x) * x.sum(-1, keepdim=True)


def compile_others(x: torch.Tensor) -> dict[str, int]:
    """Compile the other user's code anew; how often his cache of graphs was hit and missed."""
    torch._dynamo.reset()
    counters.clear()
    torch.compile(others_code)(x)
    return {name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss")}


def main() -> None:
    """See the module's docstring."""
    users = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    x = torch.linspace(-1, 1, 64).view(8, 8)
    first = compile_others(x)
    from backbones import make

    tiny = make("torch_dit")
    args, kwargs = tiny.make_inputs()
    before, files = settings(), files_in(users)
    import nexfort_engine

    compiled = nexfort_engine.compile(tiny.module)
    with torch.inference_mode():
        compiled(*args, **kwargs)
    after, files_after = settings(), files_in(users)
    report = compiled.report.as_dict()
    changed = {k: [before.get(k), after.get(k)] for k in {*before, *after} if before.get(k) != after.get(k)}
    again = compile_others(x)
    found = {
        "settings": len(before),
        "changed": changed,
        "files_changed": files != files_after,
        "files": len(files),
        "first": first,
        "again": again,
        "compiled": report["artefacts_compiled"],
        "eager": report["eager"],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
