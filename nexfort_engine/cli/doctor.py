# SPDX-License-Identifier: Apache-2.0
"""What a bug report needs: versions, device, compilers, ComfyUI, the cache, settings, and whether it compiles.

It changes nothing, but that the self-check compiles one small block. A fact that cannot be had is told with
the reason.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from ..cache.key import cpu_facts, package_version
from ..cache.paths import base_root, chosen_root, default_limit, default_root, size_text
from ..cache.store import Store
from ..hosts.comfy_install import base_around, comfyui_cache, comfyui_version, find_comfyui, plugin_root

COMPILERS = ("g++", "gcc", "clang++", "clang", "cl")
# Settings of others that change what is compiled or where it is kept.
FOREIGN_SETTINGS = (
    "COMFYUI_PATH", "CC", "CXX", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE", "OMP_NUM_THREADS",
)  # fmt: skip


def collect(check: bool = True) -> dict[str, Any]:
    """All facts, JSON-able; `check` runs the self-check too, which compiles a small block."""
    facts = {
        "nexfort": package_version("nexfort"),
        "python": f"{platform.python_implementation()} {platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "cpu": cpu_facts()[0],
        "bytecode": _told(_bytecode),
        "torch": _told(_torch),
        "triton": package_version("triton"),
        "diffusers": package_version("diffusers"),
        "compilers": _compilers(),
        "comfyui": _told(_comfyui),
        "kitchen": _told(_kitchen),
        "plugin": str(plugin_root()) if plugin_root() else None,
        "cache": _told(_cache),
        "settings": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith("NEXFORT_") or name in FOREIGN_SETTINGS
        },
    }
    facts["card_figures"] = _told(lambda: _card_figures(facts["torch"]))
    if check:
        facts["torch_names"] = _told(_torch_names)
        facts["self_check"] = _self_check(facts["torch"])
    return facts


def _told(fact: Callable[[], Any]) -> Any:
    """A fact, or why it cannot be had: a doctor that falls ill is of no use in a bug report."""
    try:
        return fact()
    except Exception as error:
        return {"problem": f"{type(error).__name__}: {error}"}


def _bytecode() -> str:
    """Whether torch is read as bytecode. From source a process that compiles takes 11 s to start and not 4."""
    import torch

    if os.path.exists(importlib.util.cache_from_source(torch.__file__)):
        return "kept"
    why = ", and Python is told to write none (PYTHONDONTWRITEBYTECODE)" if sys.dont_write_bytecode else ""
    packages = os.path.dirname(os.path.dirname(torch.__file__))
    return f"none{why}: each process reads torch from source; {sys.executable} -m compileall -q {packages} ends that"


def _torch_names() -> Any:
    """The private names of torch that the engine uses and that this torch does not have."""
    from ..system import torch_private

    lost = torch_private.missing()
    return {"missing": lost} if lost else f"all {len(torch_private.KNOWN_IN)} are there"


def _torch() -> dict[str, Any]:
    import torch

    devices = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            devices.append(
                {
                    "device": f"cuda:{index}",
                    "name": properties.name,
                    "capability": f"{properties.major}.{properties.minor}",
                    "memory": properties.total_memory,
                }
            )
    if torch.xpu.is_available():
        devices += [{"device": "xpu", "name": torch.xpu.get_device_name(i)} for i in range(torch.xpu.device_count())]
    if torch.backends.mps.is_available():
        devices.append({"device": "mps", "name": platform.processor()})
    return {
        "version": str(torch.__version__),
        "git": torch.version.git_version,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "driver": _driver(),
        "threads": torch.get_num_threads(),
        "devices": devices,
    }


def _driver() -> str | None:
    """The NVIDIA driver's version; torch does not tell it."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return None
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False).stdout.strip()
    return answer.splitlines()[0] if answer else None


def _compilers() -> dict[str, str]:
    """Compilers on the search path and the first line of their version."""
    found = {}
    for name in COMPILERS:
        if (path := shutil.which(name)) is not None:
            arguments = [path] if name == "cl" else [path, "--version"]
            found[name] = _told(lambda: _first_line(arguments))  # noqa: B023  called at once
    return found


def _first_line(command: list[str]) -> str:
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    lines = (answer.stdout or answer.stderr).strip().splitlines()
    return lines[0] if lines else "no version told"


def _comfyui() -> dict[str, Any] | None:
    found = find_comfyui()
    if found is None:
        return None
    return {"path": str(found[0]), "found": found[1], "version": comfyui_version(found[0])}


def _kitchen() -> dict[str, Any] | None:
    """The back ends of comfy_kitchen, which computes layers of ComfyUI's quantised files, as far as they are used here.

    ComfyUI switches two of them off by rules of its own (0.33.0), which a process without ComfyUI does not see.
    """
    if importlib.util.find_spec("comfy_kitchen") is None:
        return None
    import torch

    importlib.import_module("comfy_kitchen")
    registry = importlib.import_module("comfy_kitchen.registry").registry
    found = {}
    for name, told in sorted(registry.list_backends().items()):
        if not told.get("available"):
            found[name] = f"not in use: {told.get('unavailable_reason') or 'it is not there'}"
        elif told.get("disabled"):
            found[name] = "not in use: it is switched off"
        else:
            found[name] = "in use"
    if (
        found.get("cuda") == "in use"
        and (version := torch.version.cuda) is not None
        and int(version.split(".")[0]) < 13
    ):
        found["cuda"] = (
            f"not in use: ComfyUI switches it off with a torch for CUDA {version}, it asks for 13.0 or newer"
        )
    if found.get("triton") == "in use":
        found["triton"] = "in use where ComfyUI is started with --enable-triton-backend"
    return {"version": package_version("comfy_kitchen"), "back_ends": found}


def _card_figures(torch_facts: Any) -> dict[str, str]:
    """Of each GPU, whether what decides about 8 bits on it was measured on such a one."""
    from ..quant.card_figures import stored
    from ..quant.cost_model import origin

    def told(name: str) -> str:
        own = stored(_store().root, name)
        return origin(name) if own is None else f"measured on this card by `nexfort tune`, {own.date}"

    cards = [one for one in torch_facts.get("devices", ()) if one["device"].startswith("cuda")]
    return {one["device"]: f"{one['name']}: {told(one['name'])}" for one in cards}


def _store() -> Store:
    around = None if chosen_root() else base_around()
    return Store(default_root() if around is None else comfyui_cache(around), base_root())


def _cache() -> dict[str, Any]:
    store = _store()
    rows = store.rows()
    return {
        "path": str(store.root),
        "writable": store.writable,
        "problem": store.problem,
        "base": None if store.base is None else str(store.base),
        "base_problem": store.base_problem,
        "entries": len(rows),
        "bytes": sum(row["size"] for row in rows),
        "limit": default_limit(),
    }


def _self_check(torch_facts: Any) -> dict[str, Any]:
    """Whether capture, lower, save, load and compare work here, for each kind of device."""
    name = f"{__name__.partition('.')[0]}.compilation.selfcheck"
    if importlib.util.find_spec(name) is None:
        return {}
    kinds = dict.fromkeys(one["device"].partition(":")[0] for one in torch_facts.get("devices", ()))
    results = {}
    for kind in (*kinds, "cpu"):
        result = _told(lambda: importlib.import_module(name).run(kind))  # noqa: B023
        results[kind] = result["problem"] if isinstance(result, dict) else result or "works"
    return results


def as_text(facts: dict[str, Any]) -> str:
    """The facts as lines that can be pasted into a bug report."""
    lines: list[str] = []
    for name, value in facts.items():
        lines += _lines(name.replace("_", "-"), value, "")
    return "\n".join(lines)


def _lines(name: str, value: Any, indent: str) -> list[str]:
    if isinstance(value, dict) and value:
        inner = [line for key, one in value.items() for line in _lines(key, one, indent + "  ")]
        return [f"{indent}{name}:", *inner]
    if isinstance(value, list) and value:
        return [f"{indent}{name}: " + "; ".join(_inline(one) for one in value)]
    if name in ("bytes", "limit", "memory"):
        value = size_text(value)
    return [f"{indent}{name}: {'none' if value in (None, [], {}) else value}"]


def _inline(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    return ", ".join(size_text(one) if name == "memory" else str(one) for name, one in value.items())
