# SPDX-License-Identifier: Apache-2.0
"""Records when each block of real compiles was done: `python tools/record_compiles.py comfy_flux O2 [TIMES]`.

The network is one of tests/support/backbones.py. Each compile is a process of its own with empty caches, on this
machine's CPU. What the engine remembers of it is added to tests/reporting/recorded_compiles.json, on which
tests/reporting/test_estimate.py tries the estimates. It needs what the tests need, ComfyUI among it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORDED = ROOT / "tests" / "reporting" / "recorded_compiles.json"
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "support")]


def compile_once(network: str, mode: str) -> None:
    """One step of a network that compiles all of it, in this process."""
    import conftest
    import torch
    from backbones import BACKBONES, make

    import nexfort_engine
    from nexfort_engine.hosts.comfy_install import find_comfyui

    found = find_comfyui()
    if BACKBONES[network].host == "comfy":
        if found is None:
            raise SystemExit("found no ComfyUI: set COMFYUI_PATH to its root")
        conftest.import_comfyui(found[0])
    tiny = make(network)
    args, kwargs = tiny.make_inputs()
    with torch.inference_mode():
        nexfort_engine.compile(tiny.module, options={"mode": mode})(*args, **kwargs)


def recorded(network: str, mode: str) -> list[float]:
    """The moments of one compile in a process of its own."""
    from nexfort_engine.cache import compile_times

    with tempfile.TemporaryDirectory() as folder:
        places = {"NEXFORT_CACHE_DIR": f"{folder}/nexfort", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        Path(places["NEXFORT_CACHE_DIR"]).mkdir(mode=0o700)
        command = [sys.executable, __file__, "--once", network, mode]
        subprocess.run(command, env={**os.environ, **places}, check=True)
        compiles = compile_times.read(Path(places["NEXFORT_CACHE_DIR"])).values()
        return max((ends for some in compiles for ends in some), key=len)


def main(arguments: list[str]) -> None:
    """Record so many compiles of one network, or make one in this process."""
    if arguments[:1] == ["--once"]:
        compile_once(*arguments[1:])
        return
    network, mode = arguments[:2]
    for _ in range(int(arguments[2]) if len(arguments) > 2 else 1):
        ends = recorded(network, mode)
        kept = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}
        kept.setdefault(f"{network} {mode}", []).append(ends)
        lines = (f" {json.dumps(name)}: {json.dumps(compiles)}" for name, compiles in sorted(kept.items()))
        RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        print(f"{network} {mode}: {len(ends)} blocks in {ends[-1]:.1f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
