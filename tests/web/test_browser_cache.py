# SPDX-License-Identifier: Apache-2.0
"""The tab of the cache by model: names of files, what is removed and kept, and a cache of many models."""

from __future__ import annotations

import json
from typing import Any

import browser
import browser_pages
import pytest

from nexfort_engine.cli.comfy_server import ComfyServer

pytestmark = [pytest.mark.comfy, pytest.mark.slow]

TAB, BADGE = browser.TAB, browser.BADGE
MODELS, BLOCKS = 200, 14


def test_nothing_is_cut_off_in_a_small_window(chromium: Any, filled: ComfyServer) -> None:
    with browser_pages.page_of(chromium, filled, browser.SMALL) as page:
        browser.run_and_watch(page, seed=411)
        page.locator(BADGE).click()
        page.locator(browser.REPORT).locator("summary", has_text="Details").click()
        assert browser.cut_off(page, browser.REPORT) == []
        browser.in_both_themes(page, browser.REPORT, "report_1024")
        page.keyboard.press("Escape")
        browser.open_tab(page)
        assert browser.cut_off(page, TAB) == []
        browser.in_both_themes(page, TAB, "cache_1024")


def test_a_model_is_called_by_its_file(page: Any, filled: ComfyServer) -> None:
    said = browser.run_and_watch(page, seed=401)
    browser.tab_button(page).click()
    model = page.locator(f"{TAB} .nexfort-model")
    model.wait_for()
    entries = filled.get("/nexfort/cache")["entries"]
    assert model.locator(".nexfort-toggle").inner_text().split() == ["▸", "tiny_flux_unet"]
    told = model.locator(".nexfort-small").inner_text()
    assert told.startswith(f"O2 · {len(entries)} blocks · ") and told.endswith(" · used today")
    assert not page.locator(f"{TAB} tbody tr").count(), "blocks are one click deeper"
    assert page.locator(f"{TAB} .nexfort-overview").inner_text() == f"Nexfort Compile Model: {said[-1]}"
    assert " of 8.0 GiB" in page.locator(f"{TAB} .nexfort-total").inner_text()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator(TAB).get_by_role("button", name="Copy the path").click()
    browser.wait_for_message(page, "Copied.")
    path = page.evaluate("() => navigator.clipboard.readText()")
    assert path == str(filled.cache_dir) == page.locator(f"{TAB} .nexfort-path code").inner_text()
    browser.in_both_themes(page, TAB, "cache_models")
    model.locator(".nexfort-toggle").click()
    assert page.locator(f"{TAB} tbody tr").count() == len(entries)
    model.locator(".nexfort-head .nexfort-icon").first.click()
    page.wait_for_function("() => !document.querySelector('.nexfort-cache tbody [data-pinned=false]')")
    assert all(entry["pinned"] for entry in filled.get("/nexfort/cache")["entries"])
    page.locator(f"{TAB} .nexfort-size").fill("0")
    page.get_by_role("button", name="Prune").click()
    browser.wait_for_message(page, "Nothing removed: ")
    model.locator(".nexfort-head .nexfort-icon").first.click()
    page.wait_for_function("() => !document.querySelector('.nexfort-cache tbody [data-pinned=true]')")
    model.locator(".nexfort-head .nexfort-icon").last.click()
    page.get_by_role("dialog").get_by_role("button", name="Confirm").click()
    page.get_by_text("The compile cache is empty").wait_for()
    assert filled.get("/nexfort/cache")["count"] == 0


def entries() -> list[dict[str, Any]]:
    """Artefacts of many models, as the route tells them."""
    return [
        {
            **{"id": f"{model:04x}{block:020x}", "region": f"blocks.{block}", "family": "Flux", "kind": "Block"},
            **{"model": f"{model:032x}", "mode": "O2", "files": [f"model{model}.safetensors"], "shapes": []},
            **{"size": 1000 * (model + 1), "created": "2026-11-01T10:00:00Z", "state": "ready"},
            **{"last_used": f"2026-11-{model % 28 + 1:02d}T10:00:00Z", "pinned": False, "base": False},
        }
        for model in range(MODELS)
        for block in range(BLOCKS)
    ]


def test_many_models_are_listed_searched_and_sorted(page: Any, server: ComfyServer) -> None:
    rows = entries()
    told = {"count": len(rows), "size": sum(row["size"] for row in rows), "limit": 8 << 30, "entries": rows}
    page.route("**/nexfort/cache", lambda route: route.fulfill(json=told))
    browser.tab_button(page).click()
    models = page.locator(f"{TAB} .nexfort-model")
    models.first.wait_for()
    assert models.count() == MODELS
    page.locator(TAB).get_by_label("Sort by").select_option("Size")
    assert "model199" in models.first.inner_text() and "14 blocks" in models.first.inner_text()
    page.locator(TAB).get_by_role("searchbox").fill("model17")
    wanted = [number for number in range(MODELS) if str(number).startswith("17")]
    assert models.count() == len(wanted)
    # The server has none of these blocks and would refuse.
    page.route("**/nexfort/cache/pin", lambda route: route.fulfill(json={"ids": [], "pinned": True}))
    with page.expect_response("**/nexfort/cache/pin") as answered:
        models.first.locator(".nexfort-icon").first.click()
    body = json.loads(answered.value.request.post_data)
    assert body["pinned"] is True and len(body["ids"]) == BLOCKS


def test_each_file_has_a_row_and_says_with_whom_it_shares(page: Any, server: ComfyServer) -> None:
    files = ["dev.safetensors", "krea.safetensors"]
    rows = [{**row, "files": files} for row in entries()[:BLOCKS]]
    told = {"count": BLOCKS, "size": sum(row["size"] for row in rows), "limit": 8 << 30, "entries": rows}
    page.route("**/nexfort/cache", lambda route: route.fulfill(json=told))
    browser.tab_button(page).click()
    models = page.locator(f"{TAB} .nexfort-model")
    models.first.wait_for()
    assert [one.split()[-1] for one in models.locator(".nexfort-toggle").all_inner_texts()] == ["dev", "krea"]
    assert "14 blocks" in models.first.inner_text() and "shares its blocks with krea" in models.first.inner_text()
    models.first.locator(".nexfort-head .nexfort-icon").last.click()
    dialog = page.get_by_role("dialog")
    assert "krea uses the same blocks" in dialog.inner_text()
    dialog.get_by_role("button", name="Cancel").click()
