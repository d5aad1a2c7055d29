# SPDX-License-Identifier: Apache-2.0
"""The front end as a person meets it: a real ComfyUI server, its own front end, a headless Chromium that clicks.

What the routes answer is tested in test_server.py; here is only what is seen and done in the browser.
"""

from __future__ import annotations

import json
import re
import shutil
import uuid
from pathlib import Path
from typing import Any

import browser
import pytest
import served
from browser_pages import front_end_server, page_of

from nexfort_engine.cli.comfy_server import ComfyServer

pytestmark = [pytest.mark.comfy, pytest.mark.slow]

BADGE = browser.BADGE
TAB = browser.TAB
REPORT = browser.REPORT
WAITING, COMPILED, WARM = "not run yet", "compiled", "ready from cache"


@pytest.fixture
def page(kept: Any) -> Any:
    browser.begin_anew(kept)
    return kept


# ---- the badge and the report ------------------------------------------------------------------------------


@pytest.mark.large  # below it does so in the first minute
def test_the_badge_goes_through_its_states(page: Any) -> None:
    said = browser.run_and_watch(page)
    assert said[0] == WAITING
    assert any(text.startswith("compiling 0 of ") for text in said), said
    assert browser.state_in(said[-1]) == COMPILED
    browser.shoot(page, "badge")
    browser.reload(page)
    page.locator(BADGE, has_text=COMPILED).wait_for()


@pytest.mark.parametrize("vue", [pytest.param(False, marks=pytest.mark.large), True], ids=["canvas", "vue_nodes"])
def test_the_first_minute(chromium: Any, server: ComfyServer, vue: bool) -> None:
    browser.forget(server)
    with page_of(chromium, server, Comfy_VueNodes_Enabled=vue) as page:
        page.evaluate(browser.RECORD)
        browser.load(page, served.tiny_workflow("flux_plain", seed=31))
        browser.search_and_place(page, "nexfort", "Compile Model (Nexfort", (930, 520))
        page.locator(BADGE, has_text=WAITING).wait_for()
        browser.connect(page, "UNETLoader", "NexfortCompileModel")
        browser.connect(page, "NexfortCompileModel", "KSampler")
        browser.queue(page)
        said = page.evaluate("() => window.said")
        assert (said[0], browser.state_in(said[-1])) == (WAITING, COMPILED) and "compiled just now" in said[-1], said
        assert any(text.startswith("compiling ") for text in said), said
        page.locator(BADGE).click()
        page.locator(REPORT).locator("summary", has_text="Details").click()
        assert f"Compiled\n{server.get('/nexfort/cache')['count']} in " in page.locator(REPORT).inner_text()


# Take from the front end some of what it offers to extensions, before ours is set up.
LACKING = "app.extensionManager.registerSidebarTab = app.extensionManager.dialog.confirm = undefined"


def test_a_front_end_that_lacks_something_is_told_of_and_the_rest_works(chromium: Any, filled: ComfyServer) -> None:
    filled.post("/settings", browser.SETTINGS)
    context = chromium.new_context(locale="en-US")
    try:
        page, lines = context.new_page(), []
        page.on("console", lambda line: lines.append(line.text) if line.text.startswith("Nexfort: ") else None)
        ours = (served.ROOT / "web" / "nexfort.js").read_text(encoding="utf-8")
        script = {"body": f"{ours}\n{LACKING}", "content_type": "text/javascript"}
        page.route(f"**{browser.OURS}nexfort.js", lambda route: route.fulfill(**script))
        page.goto(filled.url)
        page.wait_for_function(browser.READY)
        assert browser.run_and_watch(page, seed=14)[0] == WAITING
        browser.run_command(page, "Nexfort.ClearCache")  # the browser asks, and Playwright says no
        page.locator(BADGE).click()
        page.locator(REPORT).wait_for()
        assert browser.tab_button(page).count() == 0 < filled.get("/nexfort/cache")["count"]
        lacks = "Nexfort: this front end lacks extensionManager."
        tab, confirm = "there is no tab of the compile cache", "the browser asks instead"
        assert lines == [f"{lacks}registerSidebarTab: {tab}", f"{lacks}dialog.confirm: {confirm}"]
    finally:
        context.close()


TELL = """(told) => {
  const { id } = window.app.graph.nodes.find((one) => one.comfyClass === (told.class ?? 'NexfortCompileModel'))
  window.app.rootGraph.id = 'told' // no other test runs it; newer front ends (1.58) keep their own, which is new too
  const workflow = window.app.rootGraph.id
  const node = { id: String(id), class: 'NexfortCompileModel', workflow, eager: 0, ...told }
  window.comfyAPI.api.api.dispatchCustomEvent('nexfort.status', { nodes: [node] })
}"""


def test_a_badge_says_of_a_short_time_that_it_is_left_and_of_a_slow_step_what_to_try(page: Any) -> None:
    browser.load(page, served.tiny_workflow("flux_compile_model"))
    badge = page.locator(BADGE)
    for left, said in ((2, "compiling 1 of 3, about 2 sec left"), (0, "compiling 1 of 3, about 1 sec left")):
        page.evaluate(TELL, {"state": "compiling", "done": 1, "total": 3, "seconds_left": left})
        badge.filter(has_text=said).wait_for()
    page.evaluate(TELL, {"state": "compiling", "done": 1, "total": 3, "seconds_left": None})
    page.wait_for_function("() => document.querySelector('.nexfort-state').textContent === 'compiling 1 of 3'")
    for told in ({"slower": True}, {"speed": {"ratio": 0.5, "reason": "it is cold"}}):
        page.evaluate(TELL, {"state": "compiled", **told})
        page.locator(f"{BADGE}[data-state=eager][title*='Try another mode']").wait_for()
        page.evaluate(TELL, {"state": "compiled"})
        page.locator(f"{BADGE}[data-state=compiled]:not([title*='Try another mode'])").wait_for()


def test_a_badge_says_when_it_was_compiled_and_promises_a_comparison_of_models_alone(page: Any) -> None:
    made = served.tiny_workflow("flux_compile_model")
    (loader,) = [key for key, node in made.items() if node["class_type"] == "VAELoader"]
    browser.load(page, {**made, "900": {"class_type": "NexfortCompileVAE", "inputs": {"vae": [loader, 0]}}})
    known = {"ratio": None, "reason": "", "seconds": 0.412}
    for kind, speed, said, how in (
        ("NexfortCompileModel", {"speed": known}, "compiled, not measured yet", "bypassed"),
        ("NexfortCompileVAE", {}, "compiled", "To compare, verify the next step."),
        ("NexfortCompileVAE", {"speed": known}, "compiled, 0.412 sec a call", "To compare, verify the next step."),
        ("NexfortCompileVAE", {"speed": {"ratio": 1.5, "reason": ""}}, "1.5× faster, compiled", None),
    ):
        for when, fresh in ((said, {}), (said.replace("compiled", "compiled just now"), {"fresh": True})):
            page.evaluate(TELL, {"class": kind, "state": "compiled", **speed, **fresh})
            badge = page.locator(BADGE).get_by_text(re.compile(f"^{re.escape(when)}$")).locator("..")
            badge.wait_for()
            title = badge.get_attribute("title")
            assert how in title if how else "To compare" not in title


def test_the_badge_opens_the_report(page: Any, filled: ComfyServer) -> None:
    browser.run_and_watch(page, seed=4)
    page.locator(BADGE).focus()
    page.keyboard.press("Enter")
    report = page.locator(REPORT)
    report.wait_for()
    (told,) = [engine["report"] for engine in filled.get("/nexfort/report")["engines"] if engine["nodes"]]
    assert told["artefacts_compiled"] > 0
    assert report.locator(".nexfort-headline").inner_text().startswith("Not measured yet")
    assert report.get_by_role("heading", name="tiny_flux_unet").count() == 1, "the file, and no class of Python's"
    report.locator("summary", has_text="Details").click()
    shown = report.inner_text()
    assert "Model\nFlux" in shown
    assert f"{len(told['regions'])} of {len({row['kind'] for row in told['regions']})} kinds" in shown
    assert f"Compiled\n{told['artefacts_compiled']} in {told['seconds_cold']:.1f} s" in shown
    assert all(f"{row['region']}: {row['reason']}" in shown for row in (*told["eager"], *told["variants"]))
    report.locator("summary", has_text="Artefacts").click()
    assert report.locator("tbody tr").count() == len(told["artefacts"])
    browser.in_both_themes(page, REPORT, "report")
    page.keyboard.press("Escape")
    report.wait_for(state="detached")
    assert page.evaluate("() => document.activeElement.matches('.nexfort-badge')"), "the keyboard is where it was"


def test_a_workflow_without_a_compile_node_is_told_so(page: Any) -> None:
    """Where nothing is alive; what other workflows compiled is shown otherwise."""
    page.route("**/nexfort/report", lambda route: route.fulfill(json={"engines": [], "benchmarks": [], "lost": ""}))
    page.route("**/nexfort/verify", lambda route: route.fulfill(json={"nodes": []}))
    no_node, no_run = "The workflow has no Nexfort compile node.", "Nothing to report yet"
    for made, said in ((None, no_node), ("flux_compile_model", no_run)):
        if made:
            browser.load(page, served.tiny_workflow(made, seed=13))
        browser.run_command(page, "Nexfort.ShowReport")
        report = page.locator(REPORT)
        report.get_by_text(said).wait_for()
        report.get_by_role("button", name="Verify the next step").click()
        wanted = "Nothing compiled is alive yet" if made else said
        report.get_by_role("status").filter(has_text=wanted).wait_for()
        page.keyboard.press("Escape")
        report.wait_for(state="detached")


def test_the_report_asks_for_a_verified_step_and_shows_it(page: Any, filled: ComfyServer) -> None:
    browser.run_and_watch(page, seed=11)
    page.locator(BADGE).click()
    report = page.locator(REPORT)
    report.get_by_role("button", name="Verify the next step").click()
    report.get_by_role("status").filter(has_text="will be compared").wait_for()
    page.keyboard.press("Escape")
    browser.run_and_watch(page, seed=12)
    page.locator(BADGE).click()
    verified = report.locator(".nexfort-verified")
    verified.wait_for()
    (told,) = [engine["report"] for engine in filled.get("/nexfort/report")["engines"] if engine["nodes"]]
    (found,) = told["verifications"]
    assert f"A step takes {found['compiled_ms']:.1f} ms compiled and {found['eager_ms']:.1f} ms uncompiled" in (
        verified.inner_text()
    )
    verified.locator("details summary").click()
    assert verified.locator("tbody tr").count() == len(found["regions"]) > 2
    ratios = [float(text.rstrip("×")) for text in verified.locator("tbody tr td:nth-child(4)").all_inner_texts()]
    assert ratios == [pytest.approx(row["eager_ms"] / row["compiled_ms"], abs=0.006) for row in found["regions"]]
    assert verified.locator("tbody tr td:last-child").all_inner_texts() == ["✓ equal"] * len(found["regions"])
    said = verified.locator(".nexfort-headline").inner_text()
    shown = re.fullmatch(r"Same picture: relative difference ([\d.]+) %, limit ([\d.]+) %", said)
    assert shown is not None and float(shown[1]) < float(shown[2]), said
    browser.in_both_themes(page, REPORT, "verified")


def test_vue_nodes_show_the_badge_too(page: Any, filled: ComfyServer) -> None:
    browser.set_value(page, "Comfy.VueNodes.Enabled", True)
    browser.set_value(page, "Nexfort.Cache.Limit", 2)
    with page.expect_request("**/nexfort/cache/prune") as pruned:
        said = browser.run_and_watch(page, seed=5)
    assert json.loads(pruned.value.post_data) == {"max_bytes": 2 << 30}, "the limit holds after each run"
    assert browser.state_in(said[-1]) == COMPILED
    browser.shoot(page, "vue_nodes")
    page.locator(f"[data-node-id] {BADGE}").click()
    report = page.locator(REPORT)
    report.get_by_role("button", name="Close").click()
    report.wait_for(state="detached")


# ---- several workflows -------------------------------------------------------------------------------------

SUBGRAPH = """() => {
  const { graph } = window.app
  graph.convertToSubgraph(new Set([graph.nodes.find((one) => one.comfyClass === 'NexfortCompileModel')]))
  return JSON.parse(JSON.stringify(graph.serialize())) // as its file holds it
}"""
ENTER = """() => {
  const { canvas, rootGraph } = window.app
  const around = rootGraph.nodes.find((one) => one.isSubgraphNode())
  canvas.openSubgraph(around.subgraph, around)
}"""


def renumbered(workflow: dict[str, Any], number: str) -> dict[str, Any]:
    """The workflow with its compile node under another id: no prompt of another test has that."""
    (old,) = [one for one, node in workflow.items() if node["class_type"] == "NexfortCompileModel"]
    made = json.loads(json.dumps(workflow).replace(f'["{old}", 0]', f'["{number}", 0]'))
    made[number] = made.pop(old)
    return dict(made)


def said(page: Any) -> list[str]:
    """The states that the badges that are shown tell."""
    return list(map(browser.state_in, page.locator(f"{BADGE}:visible").all_inner_texts()))


@pytest.mark.large  # two workflows at once; the badge of one has tests of its own
def test_a_badge_tells_of_its_own_workflow(chromium: Any, filled: ComfyServer) -> None:
    with page_of(chromium, filled, Comfy_VueNodes_Enabled=True) as page:
        prompt = renumbered(served.tiny_workflow("flux_compile_model", seed=40), "701")
        saved = browser.as_saved(page, prompt)
        first, second, twice, third = (str(uuid.uuid4()) for _ in range(4))
        browser.open_in_tab(page, {**saved, "id": first}, "first")
        browser.open_in_tab(page, {**saved, "id": second}, "second")
        browser.queue(page)
        assert said(page) == [COMPILED]
        browser.go_to_tab(page, "first")
        assert said(page) == [WAITING], "the node of the other workflow ran, and not this one"
        page.locator(BADGE).click()
        page.locator(REPORT).get_by_text("Nothing to report yet").wait_for()
        page.keyboard.press("Escape")
        browser.go_to_tab(page, "second")
        assert said(page) == [COMPILED]
        browser.go_to_tab(page, "first")
        browser.set_seed(page, 50)
        browser.queue(page)  # ComfyUI keeps the output of the compile node, which does not run again
        assert said(page) == [COMPILED]
        for name in ("a", "b"):
            browser.open_in_tab(page, {**saved, "id": twice}, name)
        browser.set_seed(page, 60)
        browser.queue(page)
        browser.go_to_tab(page, "a")
        assert said(page) == [WAITING], "the same file, opened once more"
        browser.go_to_tab(page, "b")
        assert said(page) == [COMPILED]
        browser.reload(page)
        browser.shown_in_tab(page, "b")
        assert said(page) == [COMPILED]
        browser.open_in_tab(page, {**saved, "id": third}, "third")
        assert said(page) == [WAITING]
        filled.run(prompt, timeout=300)  # over the API, without a workflow
        page.locator(BADGE, has_text=COMPILED).wait_for()


@pytest.mark.large  # above are tabs that the same badge tells apart
@pytest.mark.parametrize("vue", [False, True], ids=["canvas", "vue_nodes"])
def test_a_badge_in_a_subgraph_tells_of_its_own_workflow(chromium: Any, filled: ComfyServer, vue: bool) -> None:
    with page_of(chromium, filled, Comfy_VueNodes_Enabled=vue) as page:
        browser.load(page, renumbered(served.tiny_workflow("flux_compile_model", seed=70 + vue), "703"))
        saved = page.evaluate(SUBGRAPH)
        load = "([saved, name]) => window.app.loadGraphData(saved, true, true, name)"
        page.evaluate(load, [{**saved, "id": str(uuid.uuid4())}, "ran"])
        browser.queue(page)
        page.evaluate(ENTER)
        page.locator(BADGE, has_text=COMPILED).wait_for()
        page.evaluate(load, [{**saved, "id": str(uuid.uuid4())}, "new"])
        page.evaluate(ENTER)
        page.locator(BADGE).wait_for()
        assert said(page) == [WAITING]
        browser.go_to_tab(page, "ran", badges=False)
        page.evaluate(ENTER)
        page.locator(BADGE, has_text=COMPILED).wait_for()


# ---- languages ---------------------------------------------------------------------------------------------


@pytest.mark.large  # which texts there are is in test_locales.py
def test_it_speaks_the_language_of_the_user(chromium: Any, filled: ComfyServer) -> None:
    with page_of(chromium, filled, Comfy_Locale="fr") as page:
        browser.load(page, served.tiny_workflow("flux_compile_model", seed=6))
        page.locator(BADGE).wait_for()
        assert page.locator(BADGE).get_attribute("title").endswith("Ouvrir le rapport")
        assert browser.open_tab(page).get_by_role("heading").inner_text() == "Cache de compilation"
        browser.menu(page).click()
        page.get_by_role("menuitem", name="Extensions").first.hover()
        page.get_by_role("menuitem", name="Nexfort", exact=True).hover()
        page.get_by_role("menuitem", name="Afficher le rapport").click()
        page.locator(REPORT).get_by_role("heading", name="Rapport Nexfort").wait_for()


# ---- the tab of the cache ----------------------------------------------------------------------------------


def test_the_tab_lists_the_cache(page: Any, filled: ComfyServer) -> None:
    shown = {"path": "/home/you/ComfyUI/user/__cache/nexfort", "problem": None}  # the docs have its picture
    page.route("**/nexfort/cache/place", lambda route: route.fulfill(json=shown))
    tab = browser.open_tab(page)
    entries = filled.get("/nexfort/cache")["entries"]
    sizes = {entry["id"]: entry["size"] for entry in entries}
    assert set(browser.rows_of(tab)) == set(sizes) and len(sizes) > 1
    tab.get_by_label("Sort by").select_option("Size")
    assert [sizes[one] for one in browser.rows_of(tab)] == sorted(sizes.values(), reverse=True)
    tab.get_by_role("button", name="Reverse the order").click()
    assert [sizes[one] for one in browser.rows_of(tab)] == sorted(sizes.values())
    browser.in_both_themes(page, TAB, "cache")
    tab.get_by_role("searchbox").fill(entries[0]["region"])
    wanted = {entry["id"] for entry in entries if entries[0]["region"] in entry["region"]}
    assert set(browser.rows_of(tab)) == wanted != set(sizes)
    with page.expect_download() as exported:
        tab.get_by_role("button", name="Export list").click()
    lines = Path(exported.value.path()).read_text(encoding="utf-8").splitlines()
    assert {line.split(",")[0].strip('"') for line in lines[1:]} == wanted
    page.route("**/nexfort/cache", lambda route: route.fulfill(body=json.dumps({"error": "Locked."}), status=409))
    with page.expect_response("**/nexfort/cache"):
        tab.get_by_role("button", name="Refresh").click()
    browser.wait_for_message(page, "Locked.")
    assert set(browser.rows_of(tab)) == wanted, "a refusal takes nothing away"


@pytest.mark.large  # test_browser_speed.py has a restart, and what the badge says after it
def test_after_a_restart(
    chromium: Any, filled: ComfyServer, comfyui: Path, base: Path, cache: Path, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    with front_end_server(comfyui, base, tmp_path) as server:
        fill = lambda: shutil.copytree(cache / "entries", tmp_path / "entries", dirs_exist_ok=True)  # noqa: E731
        fill()
        with page_of(chromium, server) as page:
            what_is_pinned_stays_and_the_rest_goes(page, server)
            fill()
            said = browser.run_and_watch(page)
            assert (said[0], browser.state_in(said[-1])) == (WAITING, WARM)
            assert not [text for text in said if "compiling" in text]


def what_is_pinned_stays_and_the_rest_goes(page: Any, server: ComfyServer) -> None:
    """Pin one by the keyboard, delete one, prune the rest, then clear: not after Cancel, but after Confirm."""
    tab = browser.open_tab(page)
    ids = browser.rows_of(tab)
    pin, delete = f"[data-key='pin-{ids[0]}']", f"[data-key='delete-{ids[1]}']"
    tab.locator(pin).focus()
    page.keyboard.press("Enter")
    tab.locator(f"{pin}[data-pinned=true]").wait_for()
    assert page.evaluate("() => document.activeElement.dataset.key") == f"pin-{ids[0]}", "the keyboard stays there"
    tab.locator(delete).click()
    tab.locator(f"[data-id='{ids[1]}']").wait_for(state="detached")
    assert len(browser.rows_of(tab)) == len(ids) - 1
    tab.get_by_role("spinbutton").fill("0")
    tab.get_by_role("button", name="Prune").click()
    tab.locator(f"[data-id='{ids[2]}']").wait_for(state="detached")
    assert [entry["id"] for entry in server.get("/nexfort/cache")["entries"]] == [ids[0]]
    tab.locator(pin).click()
    tab.locator(f"{pin}[data-pinned=false]").wait_for()
    for answer, left in (("Cancel", 1), ("Confirm", 0)):
        tab.get_by_role("button", name="Clear", exact=True).click()
        page.get_by_role("dialog").get_by_role("button", name=answer).click()
        page.get_by_role("dialog").wait_for(state="detached")
        page.wait_for_timeout(300)
        assert server.get("/nexfort/cache")["count"] == left, answer
    tab.get_by_text("The compile cache is empty").wait_for()
    browser.tab_button(page).click()
