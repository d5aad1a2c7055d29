# SPDX-License-Identifier: Apache-2.0
"""How much faster it is, and which state it is in, as a person sees it: each is reached by doing what leads to it."""

from __future__ import annotations

import contextlib
import copy
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser
import pytest
import served
from browser_pages import front_end_server, page_of
from large_rows import few
from refusing import small_disk

from nexfort_engine import __version__
from nexfort_engine.cache import speed_record
from nexfort_engine.cli.comfy_server import ComfyServer

pytestmark = [pytest.mark.comfy, pytest.mark.slow]

BADGE, REPORT = browser.BADGE, browser.REPORT
HEADLINE = ".nexfort-headline"
STEPS = 8
RUN, BYPASSED = 0, 4  # modes of the front end's nodes
SET_MODE = """mode => { window.app.graph.nodes.find((one) => one.comfyClass === 'NexfortCompileModel').mode = mode }"""
WORDS = {"faster": "× faster, ", "alike": "about as fast: ", "slower": "slower here: "}


@pytest.fixture(scope="module")
def base(comfyui: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of this file alone, as are its cache and server: nothing was measured there."""
    return served.base_folder(tmp_path_factory.mktemp("base"), comfyui, "flux_unet", "taesd_flux")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def server(comfyui: Path, base: Path, cache: Path) -> Iterator[ComfyServer]:
    with front_end_server(comfyui, base, cache, "--cache-classic") as running:
        yield running


@pytest.fixture
def page(kept: Any) -> Any:
    browser.begin_anew(kept)
    return kept


def behind(kind: str, **inputs: Any) -> dict[str, Any]:
    """That workflow with a node of this kind before ours."""
    made = workflow()
    (ours,) = [node for node in made.values() if node["class_type"] == "NexfortCompileModel"]
    made["forward"] = {"class_type": kind, "inputs": {**inputs, "model": ours["inputs"]["model"]}}
    ours["inputs"]["model"] = ["forward", 0]
    return made


def workflow() -> dict[str, Any]:
    """The tiny workflow with as many steps as a measurement wants."""
    made = served.tiny_workflow("flux_compile_model", seed=300)
    for node in made.values():
        if node["class_type"] == "KSampler":
            node["inputs"]["steps"] = STEPS
    return made


def run(page: Any, seed: int, mode: int = RUN) -> str:
    """Run the workflow that is open with another seed; what the badge says then."""
    page.evaluate(SET_MODE, mode)
    browser.set_seed(page, seed)
    browser.queue(page)
    return str(page.locator(BADGE).inner_text())


def speed(server: ComfyServer) -> dict[str, Any]:
    """The last row on speed of the one engine that a node of a workflow made."""
    (report,) = [engine["report"] for engine in server.get("/nexfort/report")["engines"] if engine["nodes"]]
    return dict(report["speed"][-1])


def run_without_until_timed(page: Any, server: ComfyServer, seed: int) -> None:
    """Bypassed prompts until one was timed: steps beside which something is compiled or stored do not count."""
    for again in range(4):
        assert run(page, seed + 1000 * again, BYPASSED) == "bypassed"
        if speed(server)["eager"] is not None:
            return
    reports = [engine["report"] for engine in server.get("/nexfort/report")["engines"]]
    raise AssertionError([(report["speed"], report["notes"], report["eager"]) for report in reports])


def verdict(row: dict[str, Any]) -> str:
    """What a row comes to: these networks are so small that any of it may be."""
    ratio = row["eager"] / row["compiled"]
    return "faster" if ratio > 1.03 else "slower" if ratio < 0.97 else "alike"


@pytest.mark.parametrize("restarted", few([False, True], [False]))  # what is kept on disk is read without a browser
def test_speed_is_shown_after_a_bypassed_run_and_kept(
    chromium: Any, server: ComfyServer, comfyui: Path, base: Path, cache: Path, restarted: bool
) -> None:
    browser.forget(server)
    shutil.rmtree(cache / speed_record.FOLDER, ignore_errors=True)
    with page_of(chromium, server) as page:
        browser.load(page, workflow())
        page.locator(BADGE).wait_for()
        assert run(page, 301) == "compiled just now, not measured yet"
        page.evaluate(SET_MODE, BYPASSED)
        page.locator(BADGE, has_text="bypassed").wait_for()
        run_without_until_timed(page, server, 302)
        said = run(page, 303)
        row = speed(server)
        assert row["source"] == "bypassed" and WORDS[verdict(row)] in said
        assert said.endswith(", compiled"), "in an earlier prompt"
        browser.in_both_themes(page, BADGE, "speed_badge")
        browser.reload(page)
        page.locator(BADGE, has_text=WORDS[verdict(row)]).wait_for()
        page.locator(BADGE).click()
        headline = page.locator(REPORT).locator(HEADLINE)
        assert headline.get_attribute("data-verdict") == verdict(row) and "(bypassed, " in headline.inner_text()
        assert page.locator(".nexfort-picture").count() == 2, "pictures that were not bypassed"
        browser.in_both_themes(page, REPORT, "speed")
    if not restarted:
        return
    with front_end_server(comfyui, base, cache) as again, page_of(chromium, again) as page:
        browser.load(page, workflow())
        page.locator(BADGE).wait_for()
        said = run(page, 304)
        kept = speed(again)
        assert kept["eager"] == row["eager"] and kept["pictures"] == row["pictures"] + 1
        assert WORDS[verdict(kept)] in said and said.endswith("ready from cache")


@pytest.mark.large  # the verdict and its words are tested without a browser
@pytest.mark.parametrize(
    ("slow", "told", "states"),
    [("compiled", "slower", {"eager"}), ("uncompiled", "faster", {"compiled", "warm"})],
)
def test_the_badge_is_amber_where_steps_are_slower(
    page: Any, server: ComfyServer, slow: str, told: str, states: set[str]
) -> None:
    browser.load(page, behind("TestSlow", slow=slow))
    page.locator(BADGE).wait_for()
    run(page, 371)
    run_without_until_timed(page, server, 372)
    said = run(page, 373)
    assert WORDS[told] in said, said
    assert page.locator(BADGE).get_attribute("data-state") in states
    page.locator(BADGE).click()
    report = page.locator(REPORT)
    assert report.locator(HEADLINE).get_attribute("data-verdict") == told
    assert ("Try another mode" in report.inner_text()) == (told == "slower")
    if told == "slower":
        reason = speed(server)["reason"]
        assert reason and reason in report.inner_text() and reason in page.locator(BADGE).get_attribute("title")


def test_steps_of_another_size_are_not_compared(page: Any, server: ComfyServer) -> None:
    made = workflow()
    browser.load(page, made)
    page.locator(BADGE).wait_for()
    run(page, 311)
    run(page, 312, BYPASSED)
    browser.load(page, served.resize(copy.deepcopy(made), 48, 80))
    page.locator(BADGE).wait_for()
    assert run(page, 313).endswith("not measured yet")
    page.locator(BADGE).click()
    assert page.locator(REPORT).locator(HEADLINE).inner_text().startswith("Not measured yet")


@pytest.mark.large  # the first minute has the count
def test_a_compile_is_counted_with_a_bar_on_the_node(page: Any, server: ComfyServer) -> None:
    browser.forget(server)
    page.evaluate(
        "() => { window.bars = new Set(); new MutationObserver(() => document.querySelectorAll('.nexfort-badge')"
        ".forEach((one) => window.bars.add(one.style.getPropertyValue('--nexfort-done'))))"
        ".observe(document.body, { childList: true, subtree: true }) }"
    )
    said = browser.run_and_watch(page, seed=321)
    compiling = [text for text in said if text.startswith("compiling ")]
    assert compiling and compiling[0].startswith("compiling 0 of ")
    assert {"0%", "50%"} <= set(page.evaluate("() => [...window.bars]")), "one of two blocks done is half of a bar"


def test_a_block_that_another_pack_changes_is_told_of(page: Any, server: ComfyServer) -> None:
    browser.load(page, behind("TestBlockForward"))
    page.locator(BADGE).wait_for()
    said = run(page, 341)
    assert said.endswith(", 1 block uncompiled"), said
    page.locator(BADGE).click()
    page.locator(REPORT).get_by_text("double_blocks.0: ").wait_for()


def test_a_model_that_cannot_be_compiled_says_why(page: Any, server: ComfyServer) -> None:
    browser.forget(server)
    browser.load(page, behind("TestModelForward"))
    page.locator(BADGE).wait_for()
    assert run(page, 345) == "runs uncompiled"
    page.locator(BADGE).click()
    page.locator(REPORT).get_by_text("other code stands in the place of its own").wait_for()
    page.keyboard.press("Escape")
    browser.forget(server)  # the forward stays as long as the model


FORM = "https://github.com/nexfort/nexfort/issues/new?template=problem.yml&report="


def longer(route: Any) -> None:
    """What the server tells for help, longer than an address may be."""
    answer = route.fetch()
    told = answer.json()
    route.fulfill(response=answer, json={**told, "markdown": told["markdown"] + "x" * 10_000 + "end"})


@pytest.mark.large  # the report's text is another test's, without a browser
def test_the_report_is_copied_and_goes_into_a_form(chromium: Any, server: ComfyServer) -> None:
    with page_of(chromium, server) as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.evaluate("() => { window.opened = []; window.open = (address) => window.opened.push(address) }")
        browser.run_and_watch(page, seed=351)
        page.locator(BADGE).click()
        report = page.locator(REPORT)
        report.get_by_role("button", name="Copy report").click()
        report.get_by_role("status").filter(has_text="Copied.").wait_for()
        copied = page.evaluate("() => navigator.clipboard.readText()")
        for word in ("## Nexfort", "Nexfort O2: ", "commit: ", "torch:", "comfyui:", f"nexfort: {__version__}"):
            assert word in copied, word
        assert str(server.comfyui) not in copied and str(server.base_dir) not in copied and "/home/" not in copied
        report.get_by_role("button", name="Report a problem").click()
        report.get_by_role("button", name="Help: ").click()
        page.wait_for_function("() => window.opened.length === 2")
        form, help_page = page.evaluate("() => window.opened")
        assert form.startswith(f"{FORM}%23%23+Nexfort")
        assert help_page.endswith("docs/troubleshooting.md")
        page.route("**/nexfort/help", longer)
        report.get_by_role("button", name="Report a problem").click()
        page.wait_for_function("() => window.opened.length === 3")
        assert page.evaluate("() => window.opened[2]").startswith(f"{FORM}%28The+report+was+too+long")
        copied = page.evaluate("() => navigator.clipboard.readText()")
        assert copied.startswith("## Nexfort") and copied.endswith("end")


@pytest.mark.large  # test_server_background.py has the pictures of such a server
def test_the_first_picture_does_not_wait_and_the_badge_says_why(
    chromium: Any, comfyui: Path, base: Path, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    with (
        front_end_server(comfyui, base, tmp_path, waits=False) as running,
        page_of(chromium, running) as page,
    ):
        page.evaluate(browser.RECORD)
        browser.load(page, workflow())
        page.locator(BADGE).wait_for()
        said = run(page, 361)
        assert "in the background" in said, said
        page.locator(BADGE, has_text="compiled just now").wait_for(timeout=300_000)
        assert any("compiling 0 of " in text for text in page.evaluate("() => window.said"))
        run(page, 362)
        row = speed(running)
        assert row["steps"] > 0 and row["source"] in ("", "first"), "steps beside the compiler are no measurement"


@contextlib.contextmanager
def folder_that(kind: str, tmp_path: Path) -> Iterator[Path]:
    """A directory for the cache that cannot be written, really."""
    if kind == "no folder":
        blocked = tmp_path / "blocked"
        blocked.write_text("no folder", encoding="utf-8")
        yield blocked
        return
    with small_disk(tmp_path / "disk", "size=96k" if kind == "full" else "size=4m") as disk:
        if kind == "read-only":
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True, timeout=60)
        yield disk


@pytest.fixture
def unsaving(
    request: pytest.FixtureRequest, comfyui: Path, base: Path, tmp_path: Path
) -> Iterator[tuple[ComfyServer, str]]:
    """A server that cannot keep what it compiles, and the system's word for why."""
    kind, why = request.param
    tmp_path.chmod(0o700)
    with folder_that(kind, tmp_path) as folder, front_end_server(comfyui, base, folder) as running:
        yield running, why


@pytest.mark.large  # test_browser_pictures.py goes through all states
def test_a_server_that_is_switched_off_says_so(chromium: Any, comfyui: Path, base: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    made = front_end_server(comfyui, base, tmp_path)
    made.env["NEXFORT_DISABLE"] = "1"
    with made as running, page_of(chromium, running) as page:
        said = browser.run_and_watch(page, seed=331)
        assert said[0] == "not run yet" and said[-1].endswith("off (NEXFORT_DISABLE)"), said


@pytest.mark.parametrize(
    "unsaving",
    few(
        {
            "full": (("full", "No space left on device"),),
            "read-only": (("read-only", "Read-only file system"),),
            "no folder": (("no folder", "expected a directory"),),
        },
        [],  # what the server says of it is asked for without a browser
    ),
    indirect=True,
)
def test_a_server_that_cannot_save_says_so(chromium: Any, unsaving: tuple[ComfyServer, str]) -> None:
    running, why = unsaving
    where = str(running.cache_dir)
    with page_of(chromium, running) as page:
        said = browser.run_and_watch(page, seed=331)
        assert said[0] == "not run yet" and said[-1].endswith("cannot be saved"), said
        browser.wait_for_message(page, "Nexfort cannot save what is compiled")
        message = page.get_by_role("alert").filter(has_text="Nexfort cannot save").last.inner_text()
        assert where in message and why in message
        page.locator(BADGE).click()
        banner = page.locator(REPORT).locator(".nexfort-banner")
        assert where in banner.inner_text() and why in banner.inner_text()
        assert "Make room or give access" in banner.inner_text()
        browser.in_both_themes(page, REPORT, "unsaved")
        page.keyboard.press("Escape")
        browser.tab_button(page).click()
        banner = page.locator(browser.TAB).locator(".nexfort-banner")
        banner.wait_for()
        assert where in banner.inner_text()
        browser.in_both_themes(page, browser.TAB, "cache_unsaved")
