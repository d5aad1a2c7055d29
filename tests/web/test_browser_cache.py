# SPDX-License-Identifier: Apache-2.0
"""The tab of the cache by model: names of files, what is removed and kept, and a cache of many models."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import browser
import browser_pages
import pytest

from nexfort_engine.cache import model_names
from nexfort_engine.cache.store import Store
from nexfort_engine.cli.comfy_server import ComfyServer

pytestmark = [pytest.mark.comfy, pytest.mark.slow]

TAB, BADGE = browser.TAB, browser.BADGE
MODELS, BLOCKS = 200, 2
SHARED = 60  # the model whose blocks three files have


@pytest.mark.large  # those of test_browser_pictures.py are as narrow
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
    held, filled_part = sum(entry["size"] for entry in entries), page.locator(f"{TAB} .nexfort-filled")
    for limit, shown in ((2, "2.0 GiB"), (1024, "8.0 GiB"), (0, "8.0 GiB")):  # GiB; the server's own holds as well
        browser.set_value(page, "Nexfort.Cache.Limit", limit)
        page.locator(f"{TAB} .nexfort-total", has_text=f" of {shown}").wait_for()
        width = float(filled_part.evaluate("one => one.style.width").rstrip("%"))
        assert width == pytest.approx(100 * held / (min(limit or 8, 8) << 30), rel=1e-3)
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


@pytest.fixture(scope="module")
def stocked(server: ComfyServer) -> Iterator[list[str]]:
    """Artefacts of many models in the server's store, each as large as its number; one key for each model."""
    server.post("/nexfort/cache/clear", {"confirm": True})
    store = Store(server.cache_dir)
    for model, block in itertools.product(range(MODELS), range(BLOCKS)):
        info = {"region": f"blocks.{block}", "family": "Flux", "kind": "Block", "model": key(model), "mode": "O2"}
        with store.stage() as staged:
            (staged / "payload" / "code").write_bytes(b"x" * 100 * (model + 1))
            store.commit(f"{model:08x}{block:08x}", staged, {"info": info})
    for model in range(MODELS):
        model_names.note(store.root, [key(model)], f"model{model}.safetensors")
    for file in ("krea.safetensors", "dev.safetensors"):
        model_names.note(store.root, [key(SHARED)], file)
    yield [key(model) for model in range(MODELS)]
    server.post("/nexfort/cache/clear", {"confirm": True})


def key(model: int) -> str:
    return f"{model:032x}"


def blocks_of(server: ComfyServer, model: int) -> list[dict[str, Any]]:
    return [row for row in server.get("/nexfort/cache")["entries"] if row["model"] == key(model)]


@pytest.mark.large  # two hundred of them; another test lists a few
def test_many_models_are_listed_searched_and_sorted(page: Any, server: ComfyServer, stocked: list[str]) -> None:
    assert len(server.get("/nexfort/cache")["entries"]) == MODELS * BLOCKS
    browser.tab_button(page).click()
    models = page.locator(f"{TAB} .nexfort-model")
    models.first.wait_for()
    assert models.count() == MODELS + 2, "three files share one model's blocks"
    page.locator(TAB).get_by_label("Sort by").select_option("Size")
    assert "model199" in models.first.inner_text() and f"{BLOCKS} blocks" in models.first.inner_text()
    page.locator(TAB).get_by_role("searchbox").fill("model17")
    wanted = [number for number in range(MODELS) if str(number).startswith("17")]
    assert models.count() == len(wanted)
    with page.expect_response("**/nexfort/cache/pin"):
        models.first.locator(".nexfort-head .nexfort-icon").first.click()
    page.wait_for_function("() => document.querySelector('.nexfort-cache .nexfort-head [data-pinned=true]')")
    assert [row["pinned"] for row in blocks_of(server, max(wanted))] == [True] * BLOCKS
    models.nth(1).locator(".nexfort-head .nexfort-icon").last.click()
    page.get_by_role("dialog").get_by_role("button", name="Confirm").click()
    page.wait_for_function(
        "left => document.querySelectorAll('.nexfort-cache .nexfort-model').length === left", arg=len(wanted) - 1
    )
    left = server.get("/nexfort/cache")["entries"]
    assert len(left) == (MODELS - 1) * BLOCKS and not blocks_of(server, sorted(wanted)[-2])


@pytest.mark.large  # what is shared is the server's to say, and tested there
def test_each_file_has_a_row_and_says_with_whom_it_shares(page: Any, server: ComfyServer, stocked: list[str]) -> None:
    browser.tab_button(page).click()
    models = page.locator(f"{TAB} .nexfort-model").filter(has_text="shares its blocks with ")
    models.first.wait_for()
    names = sorted(one.split()[-1] for one in models.locator(".nexfort-toggle").all_inner_texts())
    assert names == ["dev", "krea", f"model{SHARED}"]
    dev = models.filter(has=page.locator(".nexfort-toggle", has_text="dev"))
    assert f"{BLOCKS} blocks" in dev.inner_text() and "shares its blocks with krea" in dev.inner_text()
    dev.locator(".nexfort-head .nexfort-icon").last.click()
    dialog = page.get_by_role("dialog")
    assert "krea" in dialog.inner_text() and "the same blocks" in dialog.inner_text()
    dialog.get_by_role("button", name="Cancel").click()
    assert len(blocks_of(server, SHARED)) == BLOCKS
