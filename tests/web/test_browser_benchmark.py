# SPDX-License-Identifier: Apache-2.0
"""The benchmark as a person meets it: its question, its runs, what it says of them, and what stops it."""

from __future__ import annotations

import functools
import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import browser
import pytest
import served
from browser_pages import front_end_server, page_of

from nexfort_engine.cache import benchmark_record, speed_record
from nexfort_engine.cli import comfy_server
from nexfort_engine.cli.comfy_server import ComfyServer

pytestmark = [pytest.mark.comfy, pytest.mark.slow]

BADGE, REPORT = browser.BADGE, browser.REPORT
DIALOG = ".nexfort-benchmark"
CHART = f"{DIALOG} .nexfort-chart"
NO_ID = "00000000-0000-0000-0000-000000000000"  # of workflows from files of the API, which many have
STEPS = 8
WAYS = [True, False, False, True, False, True]  # whether the nodes are switched on, run by run
RUN, BYPASSED = 0, 4  # modes of the front end's nodes
SET_MODE = """mode => { window.app.graph.nodes.find((one) => one.comfyClass === 'NexfortCompileModel').mode = mode }"""
JUDGEMENTS = ("faster", "slower", "alike")


def workflow(seed: int, steps: int = STEPS) -> dict[str, Any]:
    """The tiny workflow with so many steps."""
    made = served.tiny_workflow("flux_compile_model", seed=seed)
    for node in made.values():
        if node["class_type"] == "KSampler":
            node["inputs"]["steps"] = steps
    return made


def open_with(page: Any, seed: int, steps: int = STEPS) -> None:
    """Open the workflow; its one picture is what the decoder gives."""
    browser.load(page, workflow(seed, steps))
    page.locator(BADGE).wait_for()


def with_savers(made: dict[str, Any]) -> dict[str, Any]:
    """The same with nodes that save its picture as a video and an animation, one behind the other, and its latent."""
    (save,) = [node for node in made.values() if node["class_type"] == "SaveImage"]
    picture = save["inputs"]["images"]
    latent = made[picture[0]]["inputs"]["samples"]
    return {
        **made,
        "video": {"class_type": "CreateVideo", "inputs": {"images": picture, "fps": 8.0}},
        "video file": {
            "class_type": "SaveVideo",
            "inputs": {"video": ["video", 0], "filename_prefix": "video", "format": "auto", "codec": "auto"},
        },
        "animation": {
            "class_type": "SaveAnimatedPNG",
            "inputs": {"images": picture, "filename_prefix": "one", "fps": 6.0, "compress_level": 4},
        },
        "behind it": {"class_type": "ImageInvert", "inputs": {"image": ["animation", 0]}},
        "inverted": {"class_type": "SaveImage", "inputs": {"images": ["behind it", 0], "filename_prefix": "two"}},
        "latent": {"class_type": "SaveLatent", "inputs": {"samples": latent, "filename_prefix": "latent"}},
        "shown": {"class_type": "PreviewAny", "inputs": {"source": ["video file", 0]}},
    }


def start(page: Any, answer: str = "Confirm") -> str:
    """Ask for a benchmark and answer its question, which comes back."""
    browser.run_command(page, "Nexfort.Benchmark")
    question = page.get_by_role("dialog").filter(has_text="The workflow runs 6 times")
    question.wait_for()
    said = str(question.inner_text())
    question.get_by_role("button", name=answer).click()
    return said


def runs_since(server: ComfyServer, before: dict[str, Any]) -> list[dict[str, Any]]:
    """The prompts that ran since, the first one first."""
    runs = [run for key, run in server.get("/history").items() if key not in before]
    return sorted(runs, key=lambda run: run["prompt"][0])


def wait_until_it_runs(server: ComfyServer, runs: bool = True) -> None:
    """Until a prompt runs, or none does any more."""
    for _ in range(300):
        if bool(server.get("/queue")["queue_running"]) == runs:
            return
        time.sleep(0.2)
    raise AssertionError("the queue stays as it is")


def inputs_of(runs: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    nodes = [node for run in runs for node in run["prompt"][2].values()]
    return [node["inputs"] for node in nodes if node["class_type"] == kind]


WITH_PREVIEWS = "async prompt => (await import('/extensions/nexfort/previews.js')).withPreviews(prompt)"


def test_what_would_save_is_previewed(page: Any) -> None:
    made = with_savers(workflow(10))
    kept = json.loads(json.dumps(made))
    found = page.evaluate(WITH_PREVIEWS, made)
    assert made == kept and not [node for node in found.values() if node["class_type"].startswith("Save")]
    (decoder,) = [key for key, node in made.items() if node["class_type"] == "VAEDecode"]
    (sampler,) = [key for key, node in made.items() if node["class_type"] == "KSampler"]
    pictures = sorted(node["inputs"]["images"] for node in found.values() if node["class_type"] == "PreviewImage")
    assert pictures == sorted([[decoder, 0], ["behind it", 0]]), "one for what is saved twice, one behind a saver"
    assert found["behind it"]["inputs"]["image"] == [decoder, 0], "what a saver handed on"
    texts = [node["inputs"]["source"] for node in found.values() if node["class_type"] == "PreviewAny"]
    assert texts == [[sampler, 0]], "the latent; a video is shown by its images"


def test_a_sampler_stays_and_what_needs_a_saver_s_own_result_goes(page: Any) -> None:
    """Nodes of other packs, which are known by what the server tells of them alone."""
    page.evaluate(
        "() => Object.entries({ All: ['LATENT', 'IMAGE'], Combine: ['FILES'] }).forEach(([name, output]) => {"
        "const kind = class extends window.LiteGraph.LGraphNode {}; kind.nodeData = { output_node: true, output };"
        "window.LiteGraph.registered_node_types[name] = kind })"
    )
    sampler = {"class_type": "All", "inputs": {"model": ["m", 0], "seed": 5, "save_prefix": "x"}}
    made = {
        "m": {"class_type": "UNETLoader", "inputs": {}},
        "1": sampler,
        "2": {"class_type": "Combine", "inputs": {"images": ["1", 1], "filename_prefix": "x"}},
        "3": {"class_type": "SomethingWithFiles", "inputs": {"files": ["2", 0]}},
    }
    try:
        found = page.evaluate(WITH_PREVIEWS, made)
    finally:
        page.evaluate("() => ['All', 'Combine'].forEach((one) => delete window.LiteGraph.registered_node_types[one])")
    assert found.pop("1") == sampler and found.pop("m") == made["m"]
    assert list(found.values()) == [{"class_type": "PreviewImage", "inputs": {"images": ["1", 1]}}]


def saved(server: ComfyServer) -> list[str]:
    """The files of the user's output folder."""
    assert server.base_dir is not None
    return sorted(str(path) for path in (server.base_dir / "output").rglob("*") if path.is_file())


def test_it_asks_runs_both_ways_shows_and_keeps_what_came_of_it(page: Any, filled: ComfyServer) -> None:
    filled.post("/history", {"clear": True})  # or what a run takes would be known
    page.evaluate("() => window.app.graph.clear()")
    browser.run_command(page, "Nexfort.Benchmark")
    browser.wait_for_message(page, "The workflow has no Nexfort compile node")
    browser.load(page, with_savers(workflow(20)))
    page.locator(BADGE).wait_for()
    page.evaluate(SET_MODE, BYPASSED)
    browser.run_command(page, "Nexfort.Benchmark")
    browser.wait_for_message(page, "The compile node is bypassed or muted.")
    page.evaluate(SET_MODE, RUN)
    assert "is not known" in start(page, "Cancel")
    before_any = saved(filled)
    browser.queue(page)
    files = saved(filled)
    assert {path.rsplit(".", 1)[1] for path in {*files} - {*before_any}} == {"png", "mp4", "latent"}, "it saves"
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    before = filled.get("/history")
    assert re.search(r"That takes about \d+ (sec|min)", start(page))
    chart = page.locator(CHART)
    chart.wait_for(timeout=180_000)

    runs = runs_since(filled, before)
    assert [inputs["enabled"] for inputs in inputs_of(runs, "NexfortCompileModel")] == WAYS
    seeds = [inputs["seed"] for inputs in inputs_of(runs, "KSampler")]
    assert seeds[2] == seeds[3] != seeds[4] == seeds[5] and len(set(seeds)) == 4, "pairs show the same picture"
    assert saved(filled) == files, "pictures and videos of a benchmark are previews"
    assert all(run["status"]["completed"] for run in runs)

    (result,) = filled.get("/nexfort/report")["benchmarks"]
    assert [compiled for compiled, _ in result["runs"]] == [False, True, False, True] and result["steps"] == STEPS
    said = chart.inner_text()
    assert chart.locator(".nexfort-headline").get_attribute("data-verdict") in JUDGEMENTS
    assert f"O2 · 96×64 · steps a run: {STEPS} · cpu" in said and said.count("; spread ") == 2
    assert chart.locator("img").count() == 2
    widths = chart.locator("img").evaluate_all("images => images.map((one) => one.naturalWidth)")
    assert widths == [96, 96]
    slider = chart.get_by_role("slider", name="How much of the uncompiled picture is shown")
    slider.focus()
    page.keyboard.press("Home")
    cut = "() => document.querySelector('.nexfort-compare').style.getPropertyValue('--nexfort-cut')"
    assert page.evaluate(cut) == "100%"
    page.keyboard.press("End")
    assert page.evaluate(cut) == "0%"
    slider.fill("50")
    chart.get_by_role("button", name="Copy result").click()
    chart.get_by_role("status").filter(has_text="Copied.").wait_for()
    copied = page.evaluate("() => navigator.clipboard.readText()")
    assert copied.startswith("Nexfort benchmark: ") and copied.count("| compiled |") == 2
    browser.in_both_themes(page, DIALOG, "benchmark")
    page.keyboard.press("Escape")
    page.locator(DIALOG).wait_for(state="detached")
    browser.reload(page)
    page.locator(BADGE).click()
    kept = page.locator(REPORT).locator(".nexfort-kept")
    kept.wait_for()
    assert f"O2 · 96×64 · steps a run: {STEPS}" in kept.inner_text()


def test_how_long_it_takes_is_known_by_the_nodes_that_ran_under_another_id(page: Any, filled: ComfyServer) -> None:
    filled.post("/history", {"clear": True})
    browser.load(page, workflow(25, steps=2))
    page.locator(BADGE).wait_for()
    browser.queue(page)
    page.evaluate("() => { window.app.rootGraph.id = crypto.randomUUID() }")  # as when its tab is opened again
    assert re.search(r"That takes about \d+ (sec|min)", start(page, "Cancel"))
    made = workflow(25, steps=2)
    browser.load(page, {**made, "901": {"class_type": "PreviewAny", "inputs": {"source": "another workflow"}}})
    page.evaluate("(id) => { window.app.rootGraph.id = id }", NO_ID)
    assert "is not known" in start(page, "Cancel")


@pytest.mark.large  # what is judged is the server's to say, and tested there
def test_few_steps_are_not_judged(page: Any, filled: ComfyServer) -> None:
    open_with(page, 30, steps=3)
    start(page)
    chart = page.locator(CHART)
    chart.wait_for(timeout=180_000)
    headline = chart.locator(".nexfort-headline")
    assert headline.inner_text().startswith("Too few steps to judge by: 3.")
    assert headline.get_attribute("data-verdict") == "few" and "×" not in headline.inner_text()
    browser.in_both_themes(page, DIALOG, "benchmark_few")


@pytest.mark.large  # one more way in which it does not begin
def test_two_tabs_do_not_run_one_at_once(page: Any, filled: ComfyServer) -> None:
    open_with(page, 40, steps=2000)
    start(page)
    wait_until_it_runs(filled)
    other = page.context.new_page()
    other.goto(filled.url)
    browser.ready(other)
    open_with(other, 41)
    browser.run_command(other, "Nexfort.Benchmark")
    browser.wait_for_message(other, "A benchmark is running in another tab.")
    assert not other.locator(DIALOG).count()
    other.close()
    page.keyboard.press("Escape")
    page.locator(DIALOG).wait_for(state="detached")
    wait_until_it_runs(filled, False)
    page.wait_for_function("() => localStorage.getItem('Nexfort.Benchmark.Heard') === null")


@pytest.mark.large  # one more way to end a benchmark
def test_what_is_closed_before_its_prompt_is_queued_takes_the_prompt_back(page: Any, filled: ComfyServer) -> None:
    open_with(page, 45, steps=2000)
    held: list[Any] = []
    page.route(
        "**/api/prompt", lambda route: held.append(route) if route.request.method == "POST" else route.continue_()
    )
    with page.expect_request("**/api/prompt"):
        start(page)
    page.keyboard.press("Escape")
    page.locator(DIALOG).wait_for(state="detached")
    with page.expect_response("**/api/interrupt"):
        held[0].continue_()
    wait_until_it_runs(filled, False)
    time.sleep(1)  # it may have been about to run
    wait_until_it_runs(filled, False)
    page.wait_for_function("() => localStorage.getItem('Nexfort.Benchmark.Heard') === null")


@pytest.mark.large  # about words
def test_a_prompt_that_the_server_refuses_is_told(page: Any, filled: ComfyServer) -> None:
    open_with(page, 50)
    page.evaluate(
        "() => { window.app.graph.nodes.find((one) => one.comfyClass === 'NexfortCompileModel')"
        ".widgets.find((one) => one.name === 'options').value = 'max-auto' }"
    )
    start(page)
    said = page.locator(DIALOG).get_by_role("status").filter(has_text="The benchmark ended: ")
    said.filter(has_text="NexfortCompileModel: options - ").filter(has_text="did you mean 'max-autotune'?").wait_for()


@pytest.mark.large  # a prompt that the server refuses is told in the same way
def test_a_server_that_restarts_in_the_middle_is_told(
    chromium: Any,
    filled: ComfyServer,
    comfyui: Path,
    base: Path,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tmp_path.chmod(0o700)
    shutil.copytree(cache / "entries", tmp_path / "entries")
    server = functools.partial(front_end_server, comfyui, base, tmp_path, "--cache-classic")
    with server() as first, page_of(chromium, first) as page:
        open_with(page, 60, steps=2000)
        before = page.evaluate("() => JSON.stringify(window.app.graph.serialize().nodes.map((one) => one.type))")
        start(page)
        wait_until_it_runs(first)
        port = first.port
        monkeypatch.setattr(comfy_server, "_free_port", lambda: port)
        first.stop()
        said = page.locator(DIALOG).get_by_role("status")
        said.filter(has_text="The server does not answer.").wait_for()
        with server():
            said.filter(has_text="The server was restarted in the middle, after 0 of 6 runs.").wait_for()
            after = page.evaluate("() => JSON.stringify(window.app.graph.serialize().nodes.map((one) => one.type))")
            assert after == before, "the workflow is as it was"


@pytest.mark.large  # a prompt that the server refuses is told in the same way
def test_a_server_that_restarts_while_it_compiles_is_told(page: Any, filled: ComfyServer) -> None:
    open_with(page, 65, steps=2)
    compiling = {"id": "0", "class": "NexfortCompileModel", "workflow": None, "state": "background", "eager": 0}
    page.route("**/nexfort/nodes", lambda route: route.fulfill(json={"nodes": [compiling]}))
    start(page)
    wait_until_it_runs(filled)
    wait_until_it_runs(filled, False)
    said = page.locator(DIALOG).get_by_role("status")
    page.wait_for_timeout(1500)
    assert said.inner_text().startswith("Run 1 of 6"), "it waits"
    page.route("**/api/history/*", lambda route: route.fulfill(json={}))
    page.evaluate("() => window.comfyAPI.api.api.dispatchCustomEvent('reconnecting')")
    said.filter(has_text="The server does not answer.").wait_for()
    page.unroute("**/nexfort/nodes")
    said.filter(has_text="The server was restarted in the middle, after 1 of 6 runs.").wait_for()


@pytest.mark.large  # the server's tests damage it as well
def test_a_damaged_file_of_results_is_told_and_made_anew(page: Any, filled: ComfyServer, cache: Path) -> None:
    folder = cache / speed_record.FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / benchmark_record.FILE).write_text("{")
    (folder / benchmark_record.FILE).chmod(0o600)
    browser.run_and_watch(page, seed=70)
    page.locator(BADGE).click()
    page.locator(REPORT).get_by_text("Earlier benchmarks cannot be read: benchmarks.json is damaged.").wait_for()
    result = {"workflow": None, "mode": "O2", "size": "8×8", "steps": 8, "runs": [[True, 1.0], [False, 2.0]]}
    answer = served.request(
        filled, "/nexfort/benchmark", json.dumps(result).encode(), method="POST",
        headers={"Content-Type": "application/json"},
    )  # fmt: skip
    assert answer[0] == 200 and answer[1]["kept"] and filled.get("/nexfort/report")["lost"] == ""


@pytest.mark.large  # only its beginning differs from the first of this file
def test_it_waits_for_what_is_compiled_in_the_background(
    chromium: Any, comfyui: Path, base: Path, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    with (
        front_end_server(comfyui, base, tmp_path, waits=False) as running,
        page_of(chromium, running) as page,
    ):
        open_with(page, 80)
        start(page)
        page.locator(CHART).wait_for(timeout=300_000)
        runs = runs_since(running, {})
        ways = [inputs["enabled"] for inputs in inputs_of(runs, "NexfortCompileModel")]
        assert ways == [True, False, True, False, True, False, True]
        (report,) = [engine["report"] for engine in running.get("/nexfort/report")["engines"] if engine["nodes"]]
        row = report["speed"][-1]
        assert row["source"] == "bypassed" and row["compiled"] and row["eager"], "the server measured it as well"
        page.keyboard.press("Escape")
        page.locator(BADGE, has_text="×").first.wait_for()
