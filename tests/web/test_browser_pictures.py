# SPDX-License-Identifier: Apache-2.0
"""Pictures of the face for the docs, each of a state that was really reached, and the moving one for the first page.

`NEXFORT_TEST_SHOTS=web/docs/images make test-large ARGS=tests/web/test_browser_pictures.py` makes them anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

import browser
import face_pictures
import pytest
import served
from browser_pages import front_end_server, page_of
from face_pictures import Movie, Sheets
from PIL import Image

from nexfort_engine.cli.comfy_server import ComfyServer

pytestmark = [pytest.mark.comfy, pytest.mark.slow, pytest.mark.large]

BADGE = browser.BADGE
RUN, BYPASSED = 0, 4  # modes of the front end's nodes
SET_MODE = """mode => { window.app.graph.nodes.find((one) => one.comfyClass === 'NexfortCompileModel').mode = mode }"""
SET_ENABLED = """yes => { window.app.graph.nodes.find((one) => one.comfyClass === 'NexfortCompileModel')
  .widgets.find((one) => one.name === 'enabled').value = yes }"""
QUEUE = """() => { const { api } = window.comfyAPI.api; window.finished = false
  api.addEventListener('execution_success', () => { window.finished = true }, { once: true }) }"""
# The server's event on the state of a node, for the compile node that is open.
TELL = """state => {
  const { graph } = window.app
  const node = graph.nodes.find((one) => one.comfyClass === 'NexfortCompileModel')
  const nodes = [{ ...state, id: String(node.id), workflow: null, class: node.comfyClass }]
  window.comfyAPI.api.api.dispatchCustomEvent('nexfort.status', { nodes })
}"""
STEPS = 12
MOVED = "sd15_compile_model"  # what the moving picture is of
SIDE = 512  # large enough that a step is work, and not only overhead


def workflow(name: str = "flux_compile_model") -> dict[str, Any]:
    made = served.tiny_workflow(name, seed=900)
    for node in made.values():
        if node["class_type"] == "KSampler":
            node["inputs"]["steps"] = STEPS
    return served.resize(made, SIDE, SIDE) if name == MOVED else made


def begin(page: Any, seed: int) -> None:
    """Click Run, and come back at once."""
    browser.set_seed(page, seed)
    page.evaluate(QUEUE)
    page.get_by_test_id("queue-button").click()


def finish(page: Any) -> None:
    page.wait_for_function("() => window.finished", timeout=600_000)
    page.wait_for_timeout(300)


def run(page: Any, seed: int, mode: int = RUN) -> None:
    page.evaluate(SET_MODE, mode)
    begin(page, seed)
    finish(page)


def open_workflow(page: Any, made: dict[str, Any]) -> None:
    browser.load(page, made)
    page.locator(BADGE).wait_for()


def started(comfyui: Path, base: Path, cache: Path, *, waits: bool = True, **variables: str) -> ComfyServer:
    cache.mkdir(mode=0o700, exist_ok=True)
    made = front_end_server(comfyui, base, cache, "--cache-classic", waits=waits)
    made.env.update(variables)
    return made


def test_each_state_has_its_pictures(chromium: Any, comfyui: Path, base: Path, tmp_path: Path) -> None:
    sheets = Sheets()
    with started(comfyui, base, tmp_path / "cache") as server, page_of(chromium, server) as page:
        open_workflow(page, workflow())
        sheets.add(page, "waiting")
        begin(page, 901)
        page.locator(BADGE, has_text="compiling 0 of ").wait_for()
        sheets.add(page, "compiling", still=lambda said: said.startswith("compiling "))
        finish(page)
        sheets.add(page, "compiled")
        page.evaluate(SET_MODE, BYPASSED)
        page.locator(BADGE, has_text="bypassed").wait_for()
        sheets.add(page, "bypassed")
        run(page, 902, BYPASSED)
        run(page, 903)
        sheets.add(page, "measured")
        page.evaluate(SET_ENABLED, False)
        run(page, 904)
        sheets.add(page, "off")
        made = workflow()
        (ours,) = [node for node in made.values() if node["class_type"] == "NexfortCompileModel"]
        made["forward"] = {"class_type": "TestBlockForward", "inputs": {"model": ours["inputs"]["model"]}}
        ours["inputs"]["model"] = ["forward", 0]
        open_workflow(page, made)
        run(page, 905)
        sheets.add(page, "some uncompiled")
    with started(comfyui, base, tmp_path / "cache") as server, page_of(chromium, server) as page:
        open_workflow(page, workflow())
        run(page, 906)
        sheets.add(page, "ready")
    with started(comfyui, base, tmp_path / "other", NEXFORT_DISABLE="1") as server, page_of(chromium, server) as page:
        open_workflow(page, workflow())
        run(page, 907)
        sheets.add(page, "disabled")
    blocked = tmp_path / "blocked"
    blocked.write_text("no folder", encoding="utf-8")
    with front_end_server(comfyui, base, blocked) as server, page_of(chromium, server) as page:
        open_workflow(page, workflow())
        run(page, 908)
        sheets.add(page, "unsaved")
    sheets.keep()
    ends = {
        **{"waiting": "not run yet", "compiled": "not measured yet", "bypassed": "bypassed", "off": "switched off"},
        **{
            "some uncompiled": ", 1 block uncompiled",
            "disabled": "off (NEXFORT_DISABLE)",
            "unsaved": "cannot be saved",
        },
    }
    assert {state: sheets.said[state].endswith(end) for state, end in ends.items()} == dict.fromkeys(ends, True)
    assert sheets.said["compiling"].startswith("compiling 0 of ") and "×" in sheets.said["measured"]
    assert "ready from cache" in sheets.said["ready"]
    assert all(len(rows) == len(sheets.said) == 10 for rows in sheets.rows.values())


def test_the_moving_picture(chromium: Any, comfyui: Path, tmp_path: Path) -> None:
    """Of a run on this machine, or of one that tools/record_states.py recorded on another (NEXFORT_TEST_STATES)."""
    recorded = os.environ.get("NEXFORT_TEST_STATES")
    base = served.base_folder(tmp_path / "base", comfyui, *served.tiny_for(MOVED)["files"])
    with started(comfyui, base, tmp_path / "cache", waits=False) as server, contextlib.ExitStack() as stack:
        if not recorded:
            learn(server)
        page = stack.enter_context(page_of(chromium, server))
        page.emulate_media(reduced_motion="reduce")  # a dot that pulses would make every frame another one
        movie, ratio = (
            replayed(page, json.loads(Path(recorded).read_text(encoding="utf-8"))) if recorded else live(page, server)
        )
        said = page.locator(BADGE).inner_text()
    assert any(f"{ratio:.{digits}f}×" in said for digits in (1, 2)), said
    file = Path(os.environ.get("NEXFORT_TEST_SHOTS", str(tmp_path))) / "badge.webp"
    assert movie.write(file) <= face_pictures.MOST_BYTES
    with Image.open(file) as kept:
        assert 5 <= kept.n_frames <= len(movie.frames), "frames that are alike are one"


def learn(server: ComfyServer) -> None:
    """A first compile, by which the next one tells its time."""
    server.run(workflow(MOVED), timeout=600)
    deadline = time.monotonic() + 600
    while any(node["state"] == "background" for node in server.get("/nexfort/nodes")["nodes"]):
        assert time.monotonic() < deadline
        time.sleep(1)
    browser.forget(server)


def live(page: Any, server: ComfyServer) -> tuple[Movie, float]:
    """Frames of a workflow that runs now, and how much faster it is."""
    open_workflow(page, workflow(MOVED))
    movie = Movie(page)
    movie.look()
    for seed, mode, state in ((911, RUN, "compiled just now"), (912, BYPASSED, "bypassed"), (913, RUN, "×")):
        page.evaluate(SET_MODE, mode)
        begin(page, seed)
        movie.watch(state)
    (report,) = [engine["report"] for engine in server.get("/nexfort/report")["engines"] if engine["nodes"]]
    row = report["speed"][-1]
    return movie, row["eager"] / row["compiled"]


def replayed(page: Any, told: dict[str, Any]) -> tuple[Movie, float]:
    """Frames of what was recorded: the server's events come as they came then."""
    open_workflow(page, workflow())
    movie = Movie(page)
    movie.look()
    for number, states in enumerate(told["runs"]):
        page.evaluate(SET_MODE, BYPASSED if number == 1 else RUN)
        began = time.monotonic()
        for at, state in states if number != 1 else ():
            while time.monotonic() - began < at:
                time.sleep(0.05)
            page.evaluate(TELL, state)
            movie.look()
        page.wait_for_timeout(1000)
        movie.look()
    return movie, told["speed"]["eager"] / told["speed"]["compiled"]
