# SPDX-License-Identifier: Apache-2.0
"""Records what the badge says while a workflow really runs: `python tools/record_states.py NAME FILE`.

NAME is a workflow of workflows/api that has a row in tests/support/served.py, whose files are made with random weights.
It runs compiled, uncompiled and compiled again, after a first compile that teaches how long one takes. The file is for
`NEXFORT_TEST_STATES`: with it tests/web/test_browser_pictures.py draws the moving picture of a machine without a
browser.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "support")]
LOOK_EVERY = 0.2  # seconds


def workflow(name: str, side: int, steps: int, seed: int, *, compiled: bool = True) -> dict[str, Any]:
    """The workflow at a size, with so many steps."""
    import served

    made = served.resize(served.tiny_workflow(name, compiled=compiled, seed=seed), side, side)
    for node in made.values():
        if node["class_type"] == "KSampler":
            node["inputs"]["steps"] = steps
    return made


def watched(server: Any, prompt: dict[str, Any]) -> list[list[Any]]:
    """Each state of the compile node while a prompt runs, with the seconds since its beginning."""
    began, found, ended = time.monotonic(), list[list[Any]](), threading.Event()

    def look() -> None:
        nodes = server.get("/nexfort/nodes")["nodes"]
        if nodes and (not found or nodes[-1] != found[-1][1]):
            found.append([round(time.monotonic() - began, 2), nodes[-1]])

    def watch() -> None:
        while not ended.wait(LOOK_EVERY):
            look()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        server.run(prompt, timeout=1800)
    finally:
        ended.set()
        thread.join()
    look()
    return found


def main() -> None:
    """Record one workflow."""
    import browser
    import served

    from nexfort_engine.cli.comfy_server import ComfyServer

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("name")
    parser.add_argument("file", type=Path)
    parser.add_argument("--side", type=int, default=1024, help="pixels (default: 1024)")
    parser.add_argument("--steps", type=int, default=20, help="of the sampler (default: 20)")
    options = parser.parse_args()
    comfyui = served.comfyui_or_skip()
    with tempfile.TemporaryDirectory() as folder:
        base = served.base_folder(Path(folder) / "base", comfyui, *served.tiny_for(options.name)["files"])
        served.picture(base)
        cache = Path(folder) / "cache"
        cache.mkdir(mode=0o700)
        arguments = ["--cache-classic", "--disable-api-nodes"]
        made = ComfyServer(
            comfyui, plugin=ROOT, base_dir=base, cache_dir=cache, extra_args=arguments, env={"NEXFORT_WAIT": "1"}
        )
        with made as server:
            size = (options.name, options.side, options.steps)
            server.run(workflow(*size, 1), timeout=1800)
            browser.forget(server)
            runs = [watched(server, workflow(*size, seed, compiled=seed != 3)) for seed in (2, 3, 4)]
            row = [engine["report"] for engine in server.get("/nexfort/report")["engines"]][-1]["speed"][-1]
    told = {"workflow": options.name, "side": options.side, "steps": options.steps, "speed": row, "runs": runs}
    options.file.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(f"{options.file}: {row['eager'] / row['compiled']:.2f}x on {row['device']}")


if __name__ == "__main__":
    main()
