# SPDX-License-Identifier: Apache-2.0
"""How much later ComfyUI starts with this plugin: its import, its entry, its schemas, over what ComfyUI has anyway.

    python -m benchmarks.startup [--comfyui PATH] [--runs 7]

Prints one JSON object. Each run is a process of its own that first imports what ComfyUI has imported by the time it
loads packs (comfy_api, torch with it, aiohttp), and then does what ComfyUI does with a pack. Milliseconds, the median
and the largest; "first_ms" is a start for which Python has no bytecode of the plugin yet. "imported" is how many
modules came, "engine" how many of them are the engine's. The server itself and the front end's files are not in it.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from nexfort_engine.hosts.comfy_install import ComfyError, find_comfyui, is_comfyui

ROOT = Path(__file__).resolve().parent.parent
# What ComfyUI has by the time it loads packs, with a pretended server, and what it then does with a pack's module.
HOST = """
import asyncio, sys, types
import comfy_api.latest
from aiohttp import web
take = lambda *_: lambda handler: handler
sys.modules["server"] = types.SimpleNamespace(PromptServer=types.SimpleNamespace(instance=types.SimpleNamespace(
    routes=types.SimpleNamespace(get=take, post=take), node_replace_manager=types.SimpleNamespace(register=take))))

async def start(module):
    extension = await module.comfy_entrypoint()
    await extension.on_load()
    for node in await extension.get_node_list():
        node.GET_SCHEMA()
"""
ONE_START = f"""
import importlib.util, json, sys, time
plugin, comfyui, bytecode = sys.argv[1:4]
sys.path.insert(0, comfyui)
import comfy.cli_args
comfy.cli_args.args.cpu = True
{HOST}
sys.pycache_prefix = bytecode or None
before = set(sys.modules)
began = time.perf_counter()
name = plugin.replace(".", "_x_")
spec = importlib.util.spec_from_file_location(name, plugin + "/__init__.py")
module = importlib.util.module_from_spec(spec)
sys.modules[name] = module
spec.loader.exec_module(module)
asyncio.run(start(module))
seconds = time.perf_counter() - began
new = set(sys.modules) - before
engine = [one for one in new if one.startswith("nexfort_engine")]
print(json.dumps(dict(ms=1000 * seconds, imported=len(new), engine=len(engine))))
"""


def one_start(comfyui: Path, bytecode: str = "") -> dict[str, Any]:
    """One process, with a folder of its own for the plugin's bytecode or Python's usual places; what it measured.

    Raises RuntimeError with the end of its errors.
    """
    command = [sys.executable, "-I", "-c", ONE_START, str(ROOT), str(comfyui), bytecode]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the plugin did not start in the ComfyUI at {comfyui}: {done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--comfyui", type=Path, help="the root of a ComfyUI (default: the one that is found)")
    parser.add_argument("--runs", type=int, default=7, help="processes to measure (default: 7)")
    given = parser.parse_args()
    try:
        found = find_comfyui() if given.comfyui is None else (given.comfyui, "--comfyui")
    except ComfyError as error:
        parser.error(str(error))
    if found is None or not is_comfyui(found[0]):
        where = f" at {found[0]}" if found else ""
        parser.error(f"found no ComfyUI{where}; expected its root as --comfyui or in COMFYUI_PATH")
    comfyui = found[0]
    with tempfile.TemporaryDirectory() as empty:
        first = one_start(comfyui, empty)
    runs = [one_start(comfyui) for _ in range(max(1, given.runs))]
    times = [run["ms"] for run in runs]
    print(json.dumps({
        "first_ms": round(first["ms"], 1), "median_ms": round(statistics.median(times), 1),
        "largest_ms": round(max(times), 1), "runs": len(runs), "imported": runs[0]["imported"],
        "engine": runs[0]["engine"], "python": platform.python_version(), "machine": platform.machine(),
        "date": time.strftime("%Y-%m-%d"),
    }))  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
