# SPDX-License-Identifier: Apache-2.0
"""Each panel at both widths and in both themes: nothing is cut off, axe finds nothing serious, the docs have pictures.

`NEXFORT_TEST_SHOTS=web/docs/images make test-large ARGS=tests/web/test_browser_panels.py` makes them anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser
import face_pictures
import pytest
import served
from browser_pages import front_end_server, page_of

from nexfort_engine.cli.comfy_server import ComfyServer

pytestmark = [pytest.mark.comfy, pytest.mark.slow, pytest.mark.large]

BADGE, REPORT, TAB = browser.BADGE, browser.REPORT, browser.TAB
BENCHMARK = ".nexfort-benchmark"
RUN, BYPASSED = 0, 4  # modes of the front end's nodes
SET_MODE = """mode => { window.app.graph.nodes.find((one) => one.comfyClass === 'NexfortCompileModel').mode = mode }"""
STEPS = 6  # from five on a benchmark judges
SIDE = 128
SHOWN_PATH = {"path": "/home/you/ComfyUI/user/__cache/nexfort", "problem": None}
# Brings a node of this kind to where all of it is seen, and gives its id.
SHOW_NODE = """kind => {
  const { canvas, graph } = window.app
  const node = graph.nodes.find((one) => one.comfyClass === kind)
  canvas.ds.scale = 1
  canvas.ds.offset = [420 - node.pos[0], 220 - node.pos[1]]
  canvas.setDirty(true, true)
  return String(node.id)
}"""
# Whether a panel ends in the window, or something that holds it has a bar to scroll by.
SCROLLS = """selector => {
  const panel = document.querySelector(selector)
  if (panel.getBoundingClientRect().bottom <= innerHeight + 1) return true
  for (let one = panel.parentElement; one; one = one.parentElement) {
    if (['auto', 'scroll'].includes(getComputedStyle(one).overflowY) && one.scrollHeight > one.clientHeight) return true
  }
  return false
}"""
NODES = {"NexfortCompileModel": "node", "NexfortCompileVAE": "node_vae", "NexfortCompileControlNet": "node_controlnet"}


@pytest.fixture(scope="module")
def server(comfyui: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    """One whose cache and record of speeds are empty at first, with files for all three networks."""
    folder = tmp_path_factory.mktemp("panels")
    files = ("sd15_full_checkpoint", "sd15_controlnet")
    base, cache = served.base_folder(folder / "base", comfyui, *files), folder / "cache"
    cache.mkdir(mode=0o700)
    with front_end_server(comfyui, base, cache, "--cache-classic") as running:
        yield running


def workflow() -> dict[str, Any]:
    """A workflow whose steps take a while, with a VAE and a control net that have compile nodes too."""
    made = served.resize(served.tiny_workflow("sd15_compile_model", seed=900), SIDE, SIDE)
    for node in made.values():
        if node["class_type"] == "KSampler":
            node["inputs"]["steps"] = STEPS
    (decode,) = [node for node in made.values() if node["class_type"] == "VAEDecode"]
    made["vae"] = {"class_type": "NexfortCompileVAE", "inputs": {"vae": decode["inputs"]["vae"]}}
    decode["inputs"]["vae"] = ["vae", 0]
    net = served.tiny_workflow("sd15_compile_model_controlnet")
    (loader,) = [node for node in net.values() if node["class_type"] == "ControlNetLoader"]
    made["net loader"] = loader
    made["net"] = {"class_type": "NexfortCompileControlNet", "inputs": {"control_net": ["net loader", 0]}}
    return made


def run(page: Any, seed: int, mode: int = RUN) -> None:
    page.evaluate(SET_MODE, mode)
    browser.set_seed(page, seed)
    browser.queue(page)


def bottom(shown: Any) -> float:
    """How far down on the page something ends."""
    box = shown.bounding_box()
    return float(box["y"] + box["height"])


def open_report(page: Any) -> Any:
    page.locator(BADGE).first.click()
    report = page.locator(REPORT)
    report.locator("section").first.wait_for()
    return report


def test_each_node_has_a_picture_with_what_its_line_says(chromium: Any, server: ComfyServer) -> None:
    with page_of(chromium, server, face_pictures.WIDE, Comfy_VueNodes_Enabled=True) as page:
        browser.load(page, workflow())
        page.locator(BADGE).first.wait_for()
        run(page, 911)
        for kind, name in NODES.items():
            number = page.evaluate(SHOW_NODE, kind)
            node = page.locator(f"[data-node-id='{number}']")
            badge = node.locator(BADGE)
            badge.wait_for()
            page.wait_for_timeout(400)  # Vue nodes are laid out after the canvas was drawn
            said = badge.inner_text()
            assert (said == "not run yet") == (kind == "NexfortCompileControlNet"), said
            assert browser.serious(page, f"[data-node-id='{number}'] {BADGE}") == []
            browser.shoot(node, name)


def test_each_panel_at_both_widths(chromium: Any, server: ComfyServer) -> None:
    with page_of(chromium, server, face_pictures.WIDE) as page:
        page.route("**/nexfort/cache/place", lambda route: route.fulfill(json=SHOWN_PATH))
        browser.load(page, workflow())
        page.locator(BADGE).first.wait_for()
        for seed, mode in ((901, RUN), (902, BYPASSED), (903, RUN), (904, RUN)):
            run(page, seed, mode)
        report = open_report(page)
        assert report.locator(".nexfort-picture").count() >= 3
        face_pictures.panel(page, REPORT, "report")
        report.get_by_role("button", name="Verify the next step").click()
        report.get_by_role("status").filter(has_text="will be compared").wait_for()
        page.keyboard.press("Escape")
        run(page, 905)
        open_report(page).locator(".nexfort-verified").wait_for()
        face_pictures.panel(page, REPORT, "verified")
        page.keyboard.press("Escape")
        browser.run_command(page, "Nexfort.Benchmark")
        page.get_by_role("dialog").get_by_role("button", name="Confirm").click()
        page.locator(f"{BENCHMARK} .nexfort-chart").wait_for(timeout=600_000)
        page.set_viewport_size(browser.SMALL)
        slider, dialog = page.locator(f"{BENCHMARK} .nexfort-slider"), page.locator(BENCHMARK)
        assert bottom(slider) < bottom(dialog), "the slider is seen with the pictures above it"
        face_pictures.panel(page, BENCHMARK, "benchmark")
        page.keyboard.press("Escape")
        browser.tab_button(page).click()
        models = page.locator(f"{TAB} .nexfort-toggle")
        models.first.wait_for()
        names = sorted(one.split(maxsplit=1)[1] for one in models.all_inner_texts())
        assert names == ["tiny_sd15_full_checkpoint", "tiny_sd15_full_checkpoint · VAE"]
        models.first.click()
        models.last.click()
        assert page.evaluate(SCROLLS, TAB), "what does not fit is reached by a bar"
        models.last.click()
        face_pictures.panel(page, TAB, "cache")
