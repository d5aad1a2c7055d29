# SPDX-License-Identifier: Apache-2.0
"""What browser tests share: a Chromium, ComfyUI's own front end, pages that notice errors of our modules, axe.

No test lives here. Without a Chromium, Playwright or the front end's package the tests are skipped with one reason.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import served

from nexfort_engine.cli.comfy_server import ComfyServer

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BADGE = ".nexfort-badge"
TAB = ".nexfort-cache"
REPORT = "dialog.nexfort-report"
OURS = "/extensions/nexfort/"
SERIOUS = ("serious", "critical")
MOST_SHIFT = 0.1  # of what is on screen: what the web's guidelines call good
# Every shift of an element of ours, from the moment the page is there, that no click or key called for, scored as the
# web's guidelines score it (https://web.dev/articles/cls) but over our elements alone: ComfyUI's own panels move while
# it loads, with and without us, and take our button in its sidebar along.
WATCH_SHIFTS = """() => {
  window.shifts = []
  const ours = (node) => (node?.closest ? node : node?.parentElement)?.closest('[class*="nexfort"]')
  const area = (rect) => rect.width * rect.height
  const score = ({ previousRect: from, currentRect: to }) => {
    const wide = Math.max(0, Math.min(from.right, to.right) - Math.max(from.left, to.left))
    const high = Math.max(0, Math.min(from.bottom, to.bottom) - Math.max(from.top, to.top))
    const distance = Math.max(Math.abs(from.left - to.left), Math.abs(from.top - to.top))
    const touched = (area(from) + area(to) - wide * high) / (innerWidth * innerHeight)
    return touched * (distance / Math.max(innerWidth, innerHeight))
  }
  new PerformanceObserver((list) => {
    for (const { startTime, hadRecentInput, sources } of list.getEntries()) {
      const moved = sources.filter(({ node }) => ours(node))
      if (hadRecentInput || !moved.length) continue
      const total = moved.reduce((sum, source) => sum + score(source), 0)
      window.shifts.push([startTime, total, moved.map(({ node }) => ours(node).className)])
    }
  }).observe({ type: 'layout-shift' })
}"""
REFUSED = 409  # the status of a refusal that a test asks for
# Large enough that the tab, the panel and a whole node are on screen at once.
VIEWPORT = {"width": 1400, "height": 900}
SMALL = {"width": 1024, "height": 768}
# A user who has seen ComfyUI before, with everything the tests change as it is at first: settings stay on the server.
SETTINGS = {
    "Comfy.TutorialCompleted": True,
    "Comfy.ColorPalette": "dark",
    "Comfy.Locale": "en",
    "Comfy.VueNodes.Enabled": False,
    "Nexfort.Nodes.DefaultMode": "O2",
    "Nexfort.Nodes.ShowBadges": True,
    "Nexfort.Nodes.TellEager": True,
    "Nexfort.Nodes.Verify": False,
    "Nexfort.Cache.Limit": 0,
}
# Every text that any badge ever shows, from before the workflow is loaded.
RECORD = """() => {
  window.said = []
  const look = () => document.querySelectorAll('.nexfort-badge').forEach((badge) => {
    if (badge.textContent !== window.said.at(-1)) window.said.push(badge.textContent)
  })
  new MutationObserver(look).observe(document.body, { childList: true, subtree: true, characterData: true })
}"""
# Where the tiny workflow, as the front end arranges it, leaves room for a double click.
EMPTY_PLACE = (850, 640)
# Where on the screen the first input or output of a node is, and whether nothing lies over it.
SLOT = """([kind, input]) => {
  const { graph, canvas } = window.app
  const node = graph.nodes.find((one) => one.comfyClass === kind)
  const { left, top } = canvas.canvas.getBoundingClientRect()
  const [inside, below] = canvas.ds.convertOffsetToCanvas(node.getConnectionPos(input, 0))
  const [x, y] = [left + inside, top + below]
  const hit = document.elementFromPoint(x, y)
  const slot = hit?.closest('[data-node-id]')
  return { x, y, free: hit === canvas.canvas || slot?.dataset.nodeId === String(node.id) }
}"""
LINKED = """([source, target]) => {
  const { graph } = window.app
  const node = graph.nodes.find((one) => one.comfyClass === target)
  return node.getInputNode(0)?.comfyClass === source
}"""
# What lies beyond an edge of the window, or holds more than it shows and has no bar to scroll by.
CUT_OFF = """selector => [...document.querySelectorAll(`${selector}, ${selector} *`)].filter((one) => {
  const { left, right, width } = one.getBoundingClientRect()
  const hidden = one.scrollWidth > one.clientWidth + 1 && getComputedStyle(one).overflowX !== 'auto'
  const block = one.clientWidth > 0 && getComputedStyle(one).textOverflow !== 'ellipsis'
  return width > 0 && (left < -1 || right > innerWidth + 1 || (block && hidden))
}).map((one) => `${one.tagName} ${one.className}: ${one.textContent.slice(0, 60)}`)"""
READY = "() => window.app?.extensionManager"
AS_AT_FIRST = """async (settings) => {
  const { setting } = window.app.extensionManager
  for (const [id, value] of Object.entries(settings)) if (setting.get(id) !== value) await setting.set(id, value)
}"""


def front_end_or_skip() -> Path:
    """ComfyUI's front end, as `NEXFORT_TEST_FRONT_END` or its package holds it; skips where anything is missing."""
    pytest.importorskip("playwright.sync_api", reason="no browser: Playwright is missing; pip install playwright")
    if chromium() is None:
        pytest.skip("no browser: no Chromium was found; install one, or name it in NEXFORT_TEST_CHROMIUM")
    if chosen := os.environ.get("NEXFORT_TEST_FRONT_END"):
        static = Path(chosen) / "comfyui_frontend_package" / "static"
        assert static.is_dir(), f"NEXFORT_TEST_FRONT_END names {chosen}, where no comfyui_frontend_package lies"
        return static
    found = importlib.util.find_spec("comfyui_frontend_package")
    if found is None or not found.submodule_search_locations:
        pytest.skip("no browser: comfyui_frontend_package is missing; pip install it as ComfyUI's requirements do")
    return Path(found.submodule_search_locations[0]) / "static"


def front_end() -> Path | None:
    """The same, or None where anything is missing: for a server that serves other tests as well."""
    try:
        return front_end_or_skip()
    except pytest.skip.Exception:
        return None


def chromium() -> str | None:
    """The Chromium that `NEXFORT_TEST_CHROMIUM` names, or the system's."""
    return os.environ.get("NEXFORT_TEST_CHROMIUM") or next(filter(None, map(shutil.which, CHROMIUMS)), None)


@contextmanager
def running() -> Iterator[Any]:
    """A headless Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=chromium(), args=arguments)
        try:
            yield browser
        finally:
            browser.close()


class Faults:
    """Errors that our modules caused on a page: those that name one of our files, and none of the host's own."""

    def __init__(self, page: Any) -> None:
        self.found: list[str] = []
        page.on("console", self._on_console)
        page.on("pageerror", self._on_error)
        page.on("response", self._on_response)

    def _on_console(self, message: Any) -> None:
        place = message.location.get("url", "")
        about_us = OURS in place or "nexfort" in message.text.lower() or "/nexfort/" in place
        if message.type in ("error", "warning") and about_us and str(REFUSED) not in message.text:
            self.found.append(f"console {message.type}: {message.text}")

    def _on_error(self, error: Any) -> None:
        if OURS in (error.stack or ""):
            self.found.append(f"uncaught: {error.stack}")

    def _on_response(self, answer: Any) -> None:
        if "/nexfort/" in answer.url and answer.status >= 400 and answer.status != REFUSED:
            self.found.append(f"{answer.status} {answer.url}")


def open_page(context: Any, server: ComfyServer, **settings: object) -> tuple[Any, Faults]:
    """A page with the front end loaded, the user's settings as in SETTINGS but for those given with _ for the dots."""
    server.post("/settings", {**SETTINGS, **{name.replace("_", "."): value for name, value in settings.items()}})
    page = context.new_page()
    page.set_default_timeout(60_000)  # a busy machine takes seconds to open a dialog
    faults = Faults(page)
    page.goto(server.url)
    ready(page)
    page.evaluate(WATCH_SHIFTS)
    return page, faults


def ready(page: Any) -> None:
    """Wait until the front end and our extension in it are there."""
    page.wait_for_function(READY, timeout=60_000)  # most of it on a machine with other work
    tab_button(page).wait_for()


def tab_button(page: Any) -> Any:
    """The button in the sidebar that opens the tab of the cache, and closes it."""
    return page.get_by_role("button", name="Nexfort", exact=True)


def menu(page: Any) -> Any:
    """What opens ComfyUI's menu: a button, and in older front ends an element without a role."""
    return page.get_by_role("button", name="Menu", exact=True).or_(page.locator(".comfy-menu-button-wrapper"))


def wait_for_message(page: Any, words: str) -> None:
    """Wait for a message of the front end, which newer ones hold a second time for screen readers."""
    page.get_by_text(words).first.wait_for()


def begin_anew(page: Any) -> None:
    """An empty canvas and the settings of SETTINGS on a page that another test has used, with nothing open over it."""
    page.unroute_all()
    page.keyboard.press("Escape")
    if page.locator(TAB).is_visible():
        tab_button(page).click()
    page.evaluate(AS_AT_FIRST, SETTINGS)
    page.evaluate("() => window.app.graph.clear()")
    settle(page)


def reload(page: Any) -> None:
    """Load the page anew; the front end opens what was open, as the workflow that it was."""
    page.wait_for_timeout(1500)  # the front end keeps a draft of what is open after a while
    page.reload()
    ready(page)


def shifted(page: Any) -> tuple[float, list[str]]:
    """How far our panels have moved by themselves at worst, and which: the cumulative layout shift (CLS) of web.dev.

    The largest sum of a run of shifts that are less than a second apart and five seconds long at most.
    """
    worst: tuple[float, list[str]] = (0.0, [])
    began = last = -math.inf
    total, moved = 0.0, []
    for at, value, sources in page.evaluate("() => window.shifts ?? []"):
        if at - last >= 1000 or at - began >= 5000:
            began, total, moved = at, 0.0, []
        last, total, moved = at, total + value, [*moved, *sources]
        worst = max(worst, (total, moved))
    return worst


def load(page: Any, workflow: dict[str, Any]) -> None:
    """Load an API workflow, as dropping its file onto the canvas does."""
    page.evaluate("workflow => window.app.loadApiJson(workflow, 'tiny.json')", workflow)
    page.wait_for_function("count => window.app.graph.nodes.length === count", arg=len(workflow))


def as_saved(page: Any, workflow: dict[str, Any]) -> dict[str, Any]:
    """An API workflow as the canvas saves it, with nodes at their places."""
    load(page, workflow)
    page.wait_for_timeout(300)  # the front end takes note of the workflow as it was loaded
    return dict(page.evaluate("() => JSON.parse(JSON.stringify(window.app.graph.serialize()))"))


def open_in_tab(page: Any, saved: dict[str, Any], name: str) -> None:
    """Open a saved workflow in a new tab, as its file would be."""
    page.evaluate("([saved, name]) => window.app.loadGraphData(saved, true, true, name)", [saved, name])
    shown_in_tab(page, name)


def go_to_tab(page: Any, name: str, *, badges: bool = True) -> None:
    """Click a tab of the bar above, and wait until its workflow is there. badges: whether it shows any at once."""
    page.locator(".workflow-tab").get_by_text(name, exact=True).click()
    shown_in_tab(page, name, badges=badges)


def set_seed(page: Any, seed: int) -> None:
    """Give the sampler another seed, as its widget does."""
    page.evaluate(
        "seed => { const node = window.app.graph.nodes.find((one) => one.comfyClass === 'KSampler');"
        "node.widgets.find((one) => one.name === 'seed').value = seed }",
        seed,
    )


def shown_in_tab(page: Any, name: str, *, badges: bool = True) -> None:
    """Wait until a tab's workflow is there, and its badges had the time to see it."""
    tab = "window.app.extensionManager.workflow.activeWorkflow"
    page.wait_for_function(f"name => {tab}?.filename === name && {tab}.changeTracker", arg=name)
    if badges:
        page.locator(BADGE).first.wait_for(state="attached")
    page.wait_for_timeout(400)


def search_templates(page: Any, words: str) -> None:
    """Open the template browser and look for a workflow in it."""
    from playwright.sync_api import TimeoutError as TooLate

    box = page.get_by_role("dialog").get_by_role("textbox").first
    for _ in range(3):
        page.evaluate("() => window.app.extensionManager.command.execute('Comfy.BrowseTemplates')")
        try:
            box.fill(words, timeout=20_000)
            return
        except TooLate:  # what the front end still loads closes what was opened, or keeps it from being shown
            page.keyboard.press("Escape")
            box.wait_for(state="detached")
    raise AssertionError("the template browser does not show its search")


def search_and_place(page: Any, words: str, name: str, at: tuple[int, int]) -> None:
    """Open the search by a double click, choose a node, carry it to `at` and drop it there."""
    from playwright.sync_api import TimeoutError as TooLate

    before = page.evaluate("() => window.app.graph.nodes.length")
    box = page.get_by_role("combobox", name="Add a node...")
    option = page.get_by_role("option").filter(has_text=name).first
    # On a busy machine two clicks may come too far apart to be a double one, and what the front end still loads closes
    # the search: somebody who sees no search clicks again.
    for attempt in range(10):
        page.mouse.dblclick(*EMPTY_PLACE, delay=60 if attempt % 2 == 0 else 0)
        try:
            box.fill(words, timeout=2000)
            option.click(timeout=4000)
            break
        except TooLate:
            page.keyboard.press("Escape")
            box.wait_for(state="detached")
    else:
        raise AssertionError("a double click opens no search")
    page.wait_for_function("count => window.app.graph.nodes.length === count", arg=before + 1)
    settle(page)
    page.mouse.move(*at, steps=8)
    page.mouse.click(*at)  # the search leaves the node at the pointer, to be dropped
    settle(page)


def connect(page: Any, source: str, target: str) -> None:
    """Drag a link by the mouse from the first output of the node of class `source` to the first input of `target`."""
    start, end = (page.evaluate(SLOT, given) for given in ([source, False], [target, True]))
    assert start["free"] and end["free"], f"something lies over a slot: {start}, {end}"
    page.mouse.move(start["x"], start["y"])
    settle(page)
    page.mouse.down()
    page.mouse.move(end["x"], end["y"], steps=12)
    settle(page)
    page.mouse.up()
    page.wait_for_function(LINKED, arg=[source, target])


def settle(page: Any) -> None:
    """Let the front end draw twice: where things are is known only then."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def forget(server: ComfyServer) -> None:
    """Have the server compile again what it compiled before: nothing stays in its memory or in its cache."""
    # ComfyUI looks for garbage once a request, and what is answered meanwhile holds on to what it tells of. The next
    # request is not made before the last one is done with: it would free what is compiled later.
    for wait in range(150):
        if wait % 25 == 0:
            server.post("/free", {"unload_models": True, "free_memory": True})
        time.sleep(0.2)
        if not server.get("/nexfort/report")["engines"]:
            break
    else:
        raise AssertionError("an engine outlives its model")
    server.post("/nexfort/cache/clear", {"confirm": True})


def set_value(page: Any, setting: str, value: object) -> None:
    """Change one setting, as the dialog of settings does."""
    page.evaluate("([id, value]) => window.app.extensionManager.setting.set(id, value)", [setting, value])


def serious(page: Any, selector: str) -> list[str]:
    """What axe finds serious or worse inside `selector`, one line each."""
    axe = importlib.util.find_spec("axe_playwright_python")
    if axe is None or not axe.submodule_search_locations:
        pytest.skip("no browser: axe is missing; pip install axe-playwright-python")
    page.evaluate((Path(axe.submodule_search_locations[0]) / "axe.min.js").read_text(encoding="utf-8"))
    result = page.evaluate("selector => axe.run(selector)", selector)
    assert result["passes"], f"axe looked at nothing in {selector}"
    return [
        f"{one['id']}: {node['html'][:120]} {node['failureSummary']}"
        for one in result["violations"]
        if one["impact"] in SERIOUS
        for node in one["nodes"]
    ]


def shoot(shown: Any, name: str) -> None:
    """Keep a picture of a panel where NEXFORT_TEST_SHOTS names a directory; web/docs/images has those of the docs."""
    if shots := os.environ.get("NEXFORT_TEST_SHOTS"):
        shown.screenshot(path=Path(shots) / f"{name}.png")


def in_both_themes(page: Any, selector: str, name: str) -> None:
    """A picture of a panel in the dark and in the light theme, where axe finds nothing serious."""
    for theme in ("light", "dark"):
        set_value(page, "Comfy.ColorPalette", theme)
        shoot(page.locator(selector), f"{name}_{theme}")
        assert serious(page, selector) == [], theme


def cut_off(page: Any, selector: str) -> list[str]:
    """The parts of a panel that are wider than it shows, or that reach beyond the window."""
    return list(page.evaluate(CUT_OFF, selector))


def state_in(said: str) -> str:
    """What a badge says, without when it was compiled and how fast it is: earlier prompts of the server decide that."""
    return re.sub(r"^[^,]*\d×(?: faster)?, |(?: just now)?(?:, not measured yet)?$", "", said)


def run_and_watch(page: Any, seed: int = 3) -> list[str]:
    """Load the tiny workflow, click Run, and give every text its badge showed until the run was over."""
    page.evaluate(RECORD)
    load(page, served.tiny_workflow("flux_compile_model", seed=seed))
    page.locator(BADGE).wait_for()
    queue(page)
    return list(page.evaluate("() => window.said"))


def queue(page: Any) -> None:
    """Click Run, and wait for the end of the run."""
    page.evaluate(
        "() => { const { api } = window.comfyAPI.api; window.finished = '';"
        "const ends = ({ type, detail }) => { window.finished = detail.exception_message ?? type };"
        "for (const one of ['execution_success', 'execution_error']) api.addEventListener(one, ends, { once: true }) }"
    )
    page.get_by_test_id("queue-button").click()
    page.wait_for_function("() => window.finished", timeout=600_000)  # most of it on a machine with other work
    assert page.evaluate("() => window.finished") == "execution_success"
    page.wait_for_timeout(300)  # the last event and the end of the run come by different ways


def run_command(page: Any, name: str) -> None:
    """Run one of the commands, as the menu and the search for commands do."""
    page.evaluate("name => { void window.app.extensionManager.command.execute(name) }", name)


def open_tab(page: Any) -> Any:
    """The tab of the cache, opened by its button, with the blocks of each model."""
    tab_button(page).click()
    page.locator(f"{TAB} .nexfort-model").first.wait_for()
    closed = page.locator(f"{TAB} .nexfort-toggle[aria-expanded=false]")
    while closed.count():
        closed.first.click()
    return page.locator(TAB)


def rows_of(tab: Any) -> list[str]:
    """The ids of the rows that are shown, in order."""
    return list(tab.locator("tbody tr").evaluate_all("rows => rows.map((row) => row.dataset.id)"))
