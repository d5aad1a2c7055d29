# SPDX-License-Identifier: Apache-2.0
"""Compile nodes in the front end: they are found by a search, and take the place of other packs' compile nodes.

Which old nodes are told to ComfyUI as replaceable is tested in nodes/test_replacements.py.
"""

from __future__ import annotations

import json
import re
from typing import Any

import browser
import pytest
import served

pytestmark = [pytest.mark.comfy, pytest.mark.slow]

BADGE = browser.BADGE
MODES_OF = """() => window.app.graph.nodes.filter((node) => node.comfyClass === 'NexfortCompileModel')
  .map((node) => node.widgets.find((widget) => widget.name === 'mode').value)"""
# The compile node as it is queued and as it is saved.
SAVED = """async () => {
  const { output, workflow } = await window.app.graphToPrompt()
  const ours = (node) => (node.class_type ?? node.type) === 'NexfortCompileModel'
  return [Object.values(output).find(ours), workflow.nodes.find(ours)]
}"""


@pytest.fixture
def page(kept: Any) -> Any:
    browser.begin_anew(kept)
    return kept


# ---- search ------------------------------------------------------------------------------------------------


def test_search_adds_the_node_as_the_settings_say(page: Any) -> None:
    browser.set_value(page, "Nexfort.Nodes.DefaultMode", "max-autotune")
    page.evaluate("() => window.app.graph.clear()")
    browser.search_and_place(page, "accelerate", "Compile Model", (700, 300))  # an alias
    assert page.evaluate(MODES_OF) == ["max-autotune"]
    badge = page.locator(BADGE)
    badge.wait_for()
    assert badge.inner_text() == "not run yet"
    browser.set_value(page, "Nexfort.Nodes.ShowBadges", False)
    badge.wait_for(state="hidden")
    browser.set_value(page, "Nexfort.Nodes.ShowBadges", True)
    badge.wait_for(state="visible")
    browser.load(page, served.tiny_workflow("flux_compile_model"))
    assert page.evaluate(MODES_OF) == ["O2"], "a node that brings its own mode keeps it"
    prompt, saved = page.evaluate(SAVED)
    assert set(prompt["inputs"]) == {
        *("model", "mode", "dynamic", "memory_format", "options", "enabled", "verify", "wait")
    }
    assert len(saved["widgets_values"]) == 7, "the badge is saved in no workflow"


SHOWN_MODE = """() => {
  const node = window.app.graph.nodes.find((one) => one.comfyClass === 'NexfortCompileModel')
  const widget = node.widgets.find((one) => one.name === 'mode')
  return [widget.value, widget.options.getOptionLabel(widget.value)]
}"""
WORDS = ("compile", "faster", "speed", "optimize", "performance", "inductor", "torch compile", "onediff")


def test_the_node_comes_first_for_what_people_look_for(page: Any) -> None:
    page.evaluate("() => window.app.graph.clear()")
    box = page.get_by_role("combobox", name="Add a node...")
    for _ in range(10):
        page.mouse.dblclick(*browser.EMPTY_PLACE, delay=60)
        if box.count():
            break
        page.wait_for_timeout(500)
    late = {}
    for word in WORDS:
        box.fill(word)
        page.wait_for_timeout(700)
        first = page.get_by_role("option").first.inner_text().splitlines()[0]
        if not first.startswith("Compile Model (Nexfort"):
            late[word] = first
    assert late == {}
    box.fill("speed")
    page.wait_for_timeout(700)
    browser.shoot(page, "search")
    page.get_by_role("option").first.click()
    page.wait_for_function("() => window.app.graph.nodes.length === 1")
    assert page.evaluate("() => window.app.graph.nodes[0].title") == "Nexfort Compile Model"


def test_modes_have_names_and_the_menu_says_nexfort_once(page: Any) -> None:
    browser.load(page, served.tiny_workflow("flux_compile_model"))
    page.locator(BADGE).wait_for()
    assert page.evaluate(SHOWN_MODE) == ["O2", "Balanced (O2)"]
    prompt, _ = page.evaluate(SAVED)
    assert prompt["inputs"]["mode"] == "O2", "the value is that of the API"
    browser.shoot(page, "mode_canvas")
    browser.set_value(page, "Comfy.VueNodes.Enabled", True)
    page.get_by_text("Balanced (O2)").first.wait_for()
    browser.shoot(page, "mode_vue")
    browser.menu(page).click()
    page.get_by_role("menuitem", name="Extensions").first.hover()
    page.get_by_role("menuitem", name="Nexfort", exact=True).hover()
    page.get_by_role("menuitem", name="Show the report", exact=True).click()
    page.locator(browser.REPORT).wait_for()


def test_the_setting_for_new_nodes_calls_modes_so_too(page: Any) -> None:
    browser.run_command(page, "Comfy.ShowSettingsDialog")
    dialog = page.get_by_role("dialog").first
    dialog.get_by_text("Nexfort", exact=True).first.click()
    dialog.get_by_role("combobox").filter(has_text="Balanced (O2)").click()
    names = page.get_by_role("option").all_inner_texts()
    assert [name for name in names if name.endswith("(O3)")] == ["fp8: fastest, changes the picture a little (O3)"]
    page.get_by_role("option", name="Quick (jit)").click()
    setting = "window.app.extensionManager.setting.get('Nexfort.Nodes.DefaultMode')"
    page.wait_for_function(f"() => {setting} === 'jit:disable-runtime-fusion'")
    dialog.get_by_role("button", name=re.compile("close", re.IGNORECASE)).first.click()
    dialog.wait_for(state="detached")


# Brings the compile node into the middle; its fields with where each is in the window, on the canvas.
FIELDS = """() => {
  const { canvas, graph } = window.app
  const node = graph.nodes.find((one) => one.comfyClass === 'NexfortCompileModel')
  canvas.ds.scale = 1
  canvas.ds.offset = [420 - node.pos[0], 220 - node.pos[1]]
  canvas.draw(true, true)
  const { left, top } = canvas.canvas.getBoundingClientRect()
  return node.widgets.filter((one) => one.name !== 'nexfort_status')
    .map((one) => ({ name: one.name, x: left + 420 + 60, y: top + 220 + one.y + 10, title: one.element?.title ?? '' }))
}"""
NAMES = ["mode", "dynamic", "memory_format", "options", "enabled", "verify", "wait"]


@pytest.mark.parametrize("vue", [False, pytest.param(True, marks=pytest.mark.large)], ids=["canvas", "vue_nodes"])
def test_every_field_has_a_tooltip(page: Any, vue: bool) -> None:
    tooltips = json.loads((served.ROOT / "locales" / "en" / "nodeDefs.json").read_text(encoding="utf-8"))
    wanted = {name: one["tooltip"].split(".")[0] for name, one in tooltips["NexfortCompileModel"]["inputs"].items()}
    browser.set_value(page, "Comfy.VueNodes.Enabled", vue)
    browser.set_value(page, "Comfy.Node.AlwaysShowAdvancedWidgets", True)
    browser.load(page, served.tiny_workflow("flux_compile_model"))
    badge = page.locator(BADGE)
    badge.wait_for()
    fields = page.evaluate(FIELDS)
    assert [field["name"] for field in fields] == NAMES
    browser.settle(page)
    for field in fields:
        if field["name"] == "options" and not vue:
            assert field["title"].startswith(wanted["options"])
            continue
        if vue:
            page.locator("[data-node-id]").filter(has=badge).get_by_text(field["name"], exact=True).first.hover(
                force=True
            )
            shown = page.get_by_role("tooltip").or_(page.locator(".p-tooltip"))
        else:
            page.mouse.move(field["x"], field["y"])
            shown = page.locator(".node-tooltip")
        shown.filter(has_text=wanted[field["name"]]).first.wait_for()
        page.mouse.move(5, 5)
    browser.set_value(page, "Comfy.Node.AlwaysShowAdvancedWidgets", False)


OPTIONS = """() => window.app.graph.nodes.find((one) => one.comfyClass === 'NexfortCompileModel')
  .widgets.find((one) => one.name === 'options').value"""


@pytest.mark.parametrize("vue", [False, pytest.param(True, marks=pytest.mark.large)], ids=["canvas", "vue_nodes"])
def test_the_options_field_completes_words_and_says_what_is_wrong(page: Any, vue: bool) -> None:
    browser.set_value(page, "Comfy.VueNodes.Enabled", vue)
    browser.set_value(page, "Comfy.Node.AlwaysShowAdvancedWidgets", True)
    browser.load(page, served.tiny_workflow("flux_compile_model"))
    badge = page.locator(BADGE)
    badge.wait_for()
    page.evaluate(FIELDS)
    browser.settle(page)
    node = page.locator("[data-node-id]").filter(has=badge) if vue else page
    field = (node.get_by_role("textbox") if vue else page.get_by_placeholder("options")).locator("visible=true").first
    field.wait_for()
    if not vue:
        assert field.bounding_box()["height"] < 40, "one line while it is empty"
    field.click()
    field.press_sequentially("max-aut", delay=30)
    words = page.get_by_role("listbox", name="Words that fit")
    words.get_by_role("option", name="max-autotune").wait_for()
    panel = page.locator(".nexfort-words")
    assert "did you mean 'max-autotune'?" in panel.get_by_role("status").inner_text()
    browser.in_both_themes(page, ".nexfort-words", f"options_{'vue' if vue else 'canvas'}")
    field.press("Tab")
    assert page.evaluate(OPTIONS) == "max-autotune"
    words.wait_for(state="detached")
    field.press_sequentially(":cuda", delay=30)
    words.get_by_role("option", name="cudagraphs").first.click()
    page.wait_for_timeout(500)
    assert page.evaluate(OPTIONS) == "max-autotune:cudagraphs" and not panel.count(), "a good text needs no words"
    browser.set_value(page, "Comfy.Node.AlwaysShowAdvancedWidgets", False)


# ---- other packs' compile nodes ----------------------------------------------------------------------------

# What the sampler's model comes from, and what that takes it from, in the prompt that would be queued.
COMPILED_BY = """async () => {
  const { output } = await window.app.graphToPrompt()
  const sampler = Object.values(output).find((node) => node.class_type === 'KSampler')
  const node = output[sampler.inputs.model[0]]
  return [node.class_type, output[node.inputs.model[0]].class_type, Object.keys(output).length]
}"""
REPLACE = "() => { window.app.extensionManager.command.execute('Nexfort.ReplaceNodes') }"


def load_old(page: Any, kind: str, **inputs: Any) -> None:
    """Load the tiny workflow with another compile node."""
    workflow = served.tiny_workflow("flux_compile_model")
    for node in workflow.values():
        if node["class_type"] == "NexfortCompileModel":
            inputs["model"] = node["inputs"]["model"]
            node |= {"class_type": kind, "inputs": inputs, "_meta": {"title": kind}}
    page.evaluate("workflow => window.app.loadApiJson(workflow, 'old.json')", workflow)
    page.wait_for_function("() => window.app.graph.nodes.some((node) => node.comfyClass === 'KSampler')")


def test_an_installed_compile_node_is_replaced_when_asked(page: Any) -> None:
    load_old(page, "TorchCompileModel", backend="inductor")
    page.wait_for_timeout(500)  # the front end takes note of the workflow as it was loaded
    before = page.evaluate(COMPILED_BY)
    assert before[0] == "TorchCompileModel", "nothing is replaced behind the user's back"
    after = ["NexfortCompileModel", *before[1:]]
    for answer, wanted in (("Cancel", before), ("Confirm", after)):
        page.evaluate(REPLACE)
        dialog = page.get_by_role("dialog")
        assert "TorchCompileModel" in dialog.inner_text()
        dialog.get_by_role("button", name=answer).click()
        dialog.wait_for(state="detached")
        page.wait_for_timeout(300)
        assert page.evaluate(COMPILED_BY) == wanted, answer
    page.locator(BADGE).wait_for()
    page.evaluate(REPLACE)
    browser.wait_for_message(page, "holds no compile node")
    undo(page)
    assert page.evaluate(COMPILED_BY) == before
    page.evaluate(
        "() => { const graph = window.app.graph;"
        "graph.convertToSubgraph(new Set([graph.nodes.find((node) => node.type === 'TorchCompileModel')])) }"
    )
    page.evaluate(REPLACE)
    page.get_by_role("dialog").get_by_role("button", name="Confirm").click()
    browser.wait_for_message(page, "1 node replaced")
    assert page.evaluate(COMPILED_BY) == after, "in a subgraph, whose inputs and outputs it is linked to"


def undo(page: Any) -> None:
    """Undo until the other node is there again."""
    page.evaluate("() => window.app.extensionManager.command.execute('Comfy.Undo')")
    page.wait_for_function("() => window.app.graph.nodes.some((node) => node.type === 'TorchCompileModel')")


@pytest.mark.parametrize("vue", [False, pytest.param(True, marks=pytest.mark.large)], ids=["canvas", "vue_nodes"])
def test_a_missing_compile_node_is_offered_a_replacement(page: Any, vue: bool) -> None:
    browser.set_value(page, "Comfy.VueNodes.Enabled", vue)
    page.evaluate("workflow => window.app.loadGraphData(workflow)", with_onediff())
    page.wait_for_function("() => window.app.graph.nodes.some((node) => node.comfyClass === 'KSampler')")
    page.evaluate(REPLACE)
    browser.wait_for_message(page, "holds no compile node")  # what is missing is ComfyUI's to offer
    page.get_by_role("button", name="View details").click()
    page.get_by_role("button", name="Replace All").click()
    page.wait_for_function("() => window.app.graph.nodes.some((node) => node.type === 'NexfortCompileModel')")
    assert page.evaluate(COMPILED_BY)[:2] == ["NexfortCompileModel", "UNETLoader"]
    assert page.evaluate(MODES_OF) == ["O2", "O2"], "what stands for the booster is connected to nothing"
    page.locator(f"{BADGE}:visible").nth(1).wait_for()
    if not vue:  # there the text box is among the advanced inputs, which are folded away
        page.get_by_placeholder("options").locator("visible=true").nth(1).wait_for()
    prompt, saved = page.evaluate(SAVED)
    assert set(prompt["inputs"]) == {
        *("model", "mode", "dynamic", "memory_format", "options", "enabled", "verify", "wait")
    }
    assert saved["inputs"][0]["link"] is not None


def with_onediff() -> dict[str, Any]:
    """The shipped Flux workflow as it was saved with OneDiff's nodes."""
    canvas = json.loads((served.ROOT / "workflows" / "canvas" / "flux_compile_model.json").read_text(encoding="utf-8"))
    (speedup,) = [node for node in canvas["nodes"] if node["type"] == "NexfortCompileModel"]
    number, link = canvas["last_node_id"] + 1, canvas["last_link_id"] + 1
    hook = {"name": "custom_booster", "type": "CUSTOM_BOOSTER"}
    booster = {**speedup, "id": number, "type": "OneDiffModelBooster", "pos": [0, 900], "inputs": []}
    booster |= {"outputs": [{**hook, "links": [link]}], "widgets_values": [], "properties": {}}
    speedup |= {"type": "ModelSpeedup", "widgets_values": [True], "properties": {}}
    speedup["inputs"] = [speedup["inputs"][0], {**hook, "link": link}]
    canvas["nodes"].append(booster)
    canvas["links"].append([link, number, 0, speedup["id"], 1, "CUSTOM_BOOSTER"])
    return {**canvas, "last_node_id": number, "last_link_id": link}
