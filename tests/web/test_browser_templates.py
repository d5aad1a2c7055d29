# SPDX-License-Identifier: Apache-2.0
"""What ComfyUI offers of ours beside nodes: templates with their pictures, and a subgraph that loads and compiles."""

from __future__ import annotations

from typing import Any

import browser
import pytest
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
