# SPDX-License-Identifier: Apache-2.0
"""What ComfyUI offers of ours beside nodes: templates with their pictures, and a subgraph that loads and compiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import browser
import numpy
import pytest
import served
import workflow_blueprint
import workflow_pictures
import workflow_templates

from nexfort_engine.cli.comfy_server import ComfyServer

pytestmark = [pytest.mark.comfy, pytest.mark.slow]

TITLES = [one.title for one in workflow_templates.TEMPLATES]
LEAST_SCALE = 0.7
# How large the canvas shows a workflow, and where its note is in the window.
VIEW = """() => {
  const { canvas, graph } = window.app
  const note = graph.nodes.find((node) => node.type === 'MarkdownNote')
  const { left, top } = canvas.canvas.getBoundingClientRect()
  const [x, y] = canvas.ds.convertOffsetToCanvas(note.pos)
  return { scale: canvas.ds.scale, x: left + x, y: top + y, nodes: graph.nodes.length }
}"""
# Whether a card's picture is there; the card itself may be drawn anew meanwhile.
PICTURED = """([card, side]) => [...document.querySelectorAll(`[data-testid="${card}"] img`)]
  .some((picture) => picture.complete && picture.naturalWidth === side)"""
# The subgraph takes the place of the loaders and of the compile node in the workflow that is open, with these files.
TAKE_PLACE = """(files) => {
  const { graph } = window.app
  const whole = graph.nodes.find((one) => one.isSubgraphNode?.())
  for (const widget of whole.widgets) if (widget.name in files) widget.value = files[widget.name]
  for (const [kind, slot] of [['NexfortCompileModel', 0], ['VAELoader', 2]]) {
    const old = graph.nodes.find((one) => one.comfyClass === kind)
    for (const id of [...old.outputs[0].links]) {
      const { target_id: target, target_slot: place } = graph.links.get(id)
      whole.connect(slot, graph.getNodeById(target), place)
    }
    graph.remove(old)
  }
  graph.remove(graph.nodes.find((one) => one.comfyClass === 'UNETLoader'))
  return graph.nodes.map((one) => one.comfyClass ?? one.type)
}"""
# The kinds of the nodes behind the outputs of the subgraph in what would be queued.
QUEUED = """async () => {
  const { output } = await window.app.graphToPrompt()
  return Object.values(output).map((node) => node.class_type).sort()
}"""


@pytest.fixture
def page(kept: Any) -> Any:
    browser.begin_anew(kept)
    return kept


@pytest.mark.parametrize(
    "title", [one if one in TITLES[:1] else pytest.param(one, marks=pytest.mark.large) for one in TITLES]
)
def test_a_template_is_found_by_its_title_and_opens_so_that_it_can_be_read(page: Any, title: str) -> None:
    page.evaluate("() => window.app.graph.clear()")
    browser.search_templates(page, title)
    card = page.get_by_test_id(f"template-workflow-{title}")
    card.scroll_into_view_if_needed()
    assert title in card.inner_text()
    page.wait_for_function(PICTURED, arg=[f"template-workflow-{title}", workflow_pictures.SIDE])
    card.click()
    page.get_by_role("dialog").wait_for(state="detached")
    page.wait_for_function("() => window.app.graph.nodes.some((node) => node.comfyClass === 'NexfortCompileModel')")
    page.locator(browser.BADGE).first.wait_for()
    page.wait_for_timeout(700)  # the front end moves the view once more
    view = page.evaluate(VIEW)
    browser.shoot(page, f"template {title}")
    assert view["scale"] >= LEAST_SCALE, view
    wide, high = browser.VIEWPORT["width"], browser.VIEWPORT["height"]
    assert 0 < view["x"] < wide / 3 and 0 < view["y"] < high / 3, "the note is at the top left"


def test_each_template_is_offered_once_and_nothing_else(page: Any, server: ComfyServer) -> None:
    listed = [names for names in server.get("/workflow_templates").values() if TITLES[0] in names]
    assert [sorted(names) for names in listed] == [sorted(TITLES)]


def test_the_subgraph_is_offered_in_the_search_and_holds_the_compile_node(page: Any) -> None:
    page.evaluate("() => window.app.graph.clear()")
    browser.search_and_place(page, "load and compile", workflow_blueprint.NAME, (700, 300))
    page.wait_for_function("() => window.app.graph.nodes.some((node) => node.isSubgraphNode?.())")
    browser.shoot(page, "blueprint")
    assert page.evaluate("() => window.app.graph.nodes[0].outputs.map((one) => one.type)") == ["MODEL", "CLIP", "VAE"]
    shown = page.evaluate("() => window.app.graph.nodes[0].widgets.map((one) => [one.name, one.value])")
    assert [name for name, _ in shown] == [name for _, name in workflow_blueprint.SHOWN]
    assert dict(shown)["unet_name"] == "z_image_turbo_bf16.safetensors" and dict(shown)["mode"] == "O2"
    assert page.evaluate(QUEUED) == ["CLIPLoader", "NexfortCompileModel", "UNETLoader", "VAELoader"]
    page.evaluate(
        "() => { const [node] = window.app.graph.nodes; window.app.canvas.openSubgraph(node.subgraph, node) }"
    )
    page.locator(browser.BADGE, has_text="not run yet").wait_for()
    browser.shoot(page, "blueprint_inside")


def test_the_subgraph_runs_to_the_picture_of_its_nodes(page: Any, filled: ComfyServer, base: Path) -> None:
    workflow = served.tiny_workflow("flux_compile_model", seed=80)
    wanted = served.images(base, filled.run(workflow, timeout=300))
    filled.run(served.tiny_workflow("flux_compile_model", seed=81), timeout=300)  # ComfyUI keeps an equal prompt's
    files = {name: node["inputs"][name] for node in workflow.values() for name in ("unet_name", "vae_name")
             if name in node["inputs"]}  # fmt: skip
    browser.load(page, workflow)
    browser.search_and_place(page, "load and compile", workflow_blueprint.NAME, browser.EMPTY_PLACE)
    page.wait_for_function("() => window.app.graph.nodes.some((node) => node.isSubgraphNode?.())")
    left = page.evaluate(TAKE_PLACE, files)
    assert len(left) == len(workflow) - 2 and not {"UNETLoader", "VAELoader", "NexfortCompileModel"} & set(left), left
    browser.queue(page)
    (run,) = filled.get("/history?max_items=1").values()
    ran = {node["class_type"]: number for number, node in run["prompt"][2].items()}
    states = {node["id"]: node["state"] for node in filled.get("/nexfort/nodes")["nodes"]}
    assert ":" in ran["NexfortCompileModel"] and states[ran["NexfortCompileModel"]] in ("compiled", "warm"), states
    found = served.images(base, run)
    assert wanted and len(found) == len(wanted)
    for image, expected in zip(found, wanted, strict=True):
        assert numpy.array_equal(image, expected)
