# SPDX-License-Identifier: Apache-2.0
"""The plugin in a real ComfyUI server, with tiny but loadable checkpoint files: what a user would see.

The engine is tested in its own rooms; here its promises go through loaders, sampler, VAE and a restart.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import served
import workflow_templates

from nexfort_engine.cli.comfy_server import ComfyError, ComfyServer

pytestmark = pytest.mark.comfy

NODES = {
    "NexfortCompileModel": "Compile Model (Nexfort: speed, torch compile)",
    "NexfortCompileVAE": "Nexfort Compile VAE",
    "NexfortCompileControlNet": "Nexfort Compile ControlNet",
    "NexfortCacheManager": "Nexfort Cache Manager",
}
MODES = ["O2", "max-autotune", "max-optimize:max-autotune", "jit:disable-runtime-fusion"]
FLAVOURS = ("compile_model", "compile_model_vae", "compile_model_lora")
RUNNABLE = [f"{family}_{flavour}" for family in ("sd15", "pixart", "flux", "wan") for flavour in FLAVOURS]
# Of the other families one each: their flavours differ from it in nodes that the ones above run. The first three find
# the artefacts of networks above. A ControlNet runs in test_server_controlnet.py, what is never tiny in
# test_server_large.py.
RUNNABLE += ["flux_schnell_compile_model", "flux_kontext_compile_model", "wan22_compile_model_lora"]
RUNNABLE += ["hunyuan_video_compile_model", "ltxv_compile_model"]
# Each of the loaders, each kind of node in between, an image and a video; the others run by `make test-large`.
SHORT = ("flux_compile_model_vae", "wan_compile_model_lora")
STEPS = 8  # as many as a measurement wants
SAMPLED = re.compile(
    rf".*Nexfort: {STEPS} steps of [\d.]+ m?s, (not measured yet|[\d.]+x); 0 compiled, [1-9]\d* loaded"
)
# Compiled in contracts.py already, and compiling takes long.
PLAIN = ["sd35_plain"]


@pytest.fixture(scope="module")
def comfyui() -> Path:
    """The ComfyUI of this machine."""
    return served.comfyui_or_skip()


@pytest.fixture(scope="module")
def base(request: pytest.FixtureRequest, comfyui: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base directory with every tiny file that the workflows of this run load."""
    here = [item for item in request.session.items if item.path == request.path]
    asked = {item.callspec.params.get("name") for item in here if hasattr(item, "callspec")}
    workflows = [name for name in RUNNABLE + PLAIN if name in asked.union(SHORT)]
    names = dict.fromkeys(name for workflow in workflows for name in served.tiny_for(workflow)["files"])
    found = served.base_folder(tmp_path_factory.mktemp("base"), comfyui, *names)
    served.picture(found)
    return found


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artefact cache of this module's servers."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def server(comfyui: Path, base: Path, cache: Path) -> Iterator[ComfyServer]:
    """A server that remembers only the last prompt's results, so that a repeated seed is sampled again."""
    with served.server(comfyui, base, cache, "--cache-classic") as running:
        yield running


@pytest.fixture(scope="module")
def restarted(server: ComfyServer, comfyui: Path, base: Path, cache: Path) -> Iterator[ComfyServer]:
    """A second server, which finds what the first one has compiled until then."""
    with served.server(comfyui, base, cache, "--cache-classic") as running:
        yield running


def total(server: ComfyServer, key: str) -> int:
    """One count of the report, over all live engines."""
    return sum(engine["report"][key] for engine in server.get("/nexfort/report")["engines"])


def each(server: ComfyServer, key: str) -> set[tuple[str, int]]:
    """(name, that count) of every live engine; those of models that were let go are gone."""
    engines = server.get("/nexfort/report")["engines"]
    return {(engine["name"], engine["report"][key]) for engine in engines}


# ---- what the server shows -------------------------------------------------------------------------------


def test_the_plugin_loads_without_a_complaint(server: ComfyServer) -> None:
    about_us = [line for line in server.log.splitlines() if "nexfort" in line.lower()]
    assert not [line for line in about_us if "IMPORT FAILED" in line or "WARNING" in line or "ERROR" in line]


@pytest.mark.parametrize("name", NODES)
def test_object_info_shows_the_node(server: ComfyServer, name: str) -> None:
    shown = server.get(f"/object_info/{name}")[name]
    assert shown["display_name"] == NODES[name]
    assert shown["description"]
    inputs = {**shown["input"].get("required", {}), **shown["input"].get("optional", {})}
    assert all(len(options) > 1 and options[1].get("tooltip") for options in inputs.values()), inputs


@pytest.mark.parametrize("name", ["NexfortCompileModel", "NexfortCompileVAE", "NexfortCompileControlNet"])
def test_object_info_shows_the_dropdowns(server: ComfyServer, name: str) -> None:
    shown = server.get(f"/object_info/{name}")[name]["input"]
    assert list(shown["required"])[1:] == ["mode", "dynamic", "memory_format"]
    assert shown["required"]["mode"][1]["options"] == MODES + (["O3"] if name != "NexfortCompileVAE" else [])
    assert shown["required"]["mode"][1]["default"] == "O2"
    assert shown["required"]["dynamic"][1]["default"] is True
    assert shown["required"]["memory_format"][1]["options"] == ["channels_last", "contiguous_format"]
    assert list(shown["optional"]) == ["options", "enabled", "verify", "wait"]
    assert all(options[1]["advanced"] for options in shown["optional"].values())


def test_the_cache_manager_is_an_output_without_widgets(server: ComfyServer) -> None:
    shown = server.get("/object_info/NexfortCacheManager")["NexfortCacheManager"]
    assert shown["output_node"] is True
    assert shown["input"].get("required", {}) == {}
    assert list(shown["input"]["optional"]) == ["after"]


@pytest.mark.parametrize("name", NODES)
def test_each_node_has_a_help_page_where_the_front_end_looks(server: ComfyServer, name: str) -> None:
    pack = server.get(f"/object_info/{name}")[name]["python_module"].split(".", 1)[1]
    page = server.get_bytes(f"/extensions/{pack}/docs/{name}.md").decode()
    shown = server.get(f"/object_info/{name}")[name]
    assert shown["display_name"] in page
    pictures = re.findall(r"!\[.+\]\((images/[a-z_0-9]+\.png)\)", page)
    assert pictures and all(server.get_bytes(f"/extensions/{pack}/docs/{picture}") for picture in pictures)
    for kind in ("required", "optional"):
        for key in shown["input"].get(kind, {}):
            assert f"**{key}**" in page, key


def test_the_workflows_are_in_the_template_browser(server: ComfyServer) -> None:
    listed = server.get("/workflow_templates")
    (names,) = [found for found in listed.values() if "Z-Image-Turbo" in found]
    assert sorted(names) == sorted(one.title for one in workflow_templates.TEMPLATES)


# ---- loader, compile, sampler, VAE, save -----------------------------------------------------------------


@pytest.mark.large  # nothing of it is compiled
@pytest.mark.parametrize("name", PLAIN)
def test_the_plain_workflow_gives_an_image(server: ComfyServer, base: Path, name: str) -> None:
    history = server.run(served.tiny_workflow(name), timeout=120)
    assert numpy.isfinite(served.latent(base, history)).all()
    (image,) = served.images(base, history)
    assert image.std() > 5


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.large) for name in RUNNABLE]
)
def test_the_shipped_workflow_gives_the_eager_image(server: ComfyServer, base: Path, name: str) -> None:
    served.compiled_equals_eager(server, base, name)


def test_a_second_prompt_compiles_nothing(server: ComfyServer, base: Path) -> None:
    server.run(served.tiny_workflow("flux_compile_model"), timeout=300)
    assert server.get("/nexfort/report")["engines"], "no engine is alive after a compiled prompt"
    compiled, ran = each(server, "artefacts_compiled"), each(server, "calls")
    sizes = [(64, 64, 1), (128, 64, 2), (96, 160, 3)]
    for tokens, (width, height, batch) in zip((7, 33, 50), sizes, strict=True):
        workflow = served.tiny_workflow("flux_compile_model", seed=tokens, tokens=tokens)
        server.run(served.resize(workflow, width, height, batch), timeout=300)
    assert each(server, "calls") - ran
    assert each(server, "artefacts_compiled") <= compiled, (
        "an engine compiled something; one of an earlier prompt may be gone by now"
    )


def test_the_same_seed_gives_the_same_bits(server: ComfyServer, base: Path) -> None:
    first = served.latent(base, server.run(served.tiny_workflow("flux_compile_model"), timeout=300))
    server.run(served.tiny_workflow("flux_compile_model", seed=4), timeout=300)
    again = served.latent(base, server.run(served.tiny_workflow("flux_compile_model"), timeout=300))
    assert numpy.array_equal(first, again)


def last_said(server: ComfyServer) -> str:
    """The log's last line of ours, once it is there: it comes by another way than the prompt's end."""
    for _ in range(100):
        said = [line for line in server.log.splitlines() if "Nexfort: " in line]
        if said and " loaded" in said[-1]:
            break
        time.sleep(0.1)
    return said[-1] if said else ""


def test_a_restart_starts_warm(server: ComfyServer, base: Path, request: pytest.FixtureRequest) -> None:
    workflow = served.tiny_workflow("sd15_compile_model_vae")
    for node in workflow.values():
        node["inputs"] |= {"steps": STEPS} if "steps" in node["inputs"] else {}
    before = server.run(workflow, timeout=300)
    restarted = request.getfixturevalue("restarted")
    after = restarted.run(workflow, timeout=300)
    assert SAMPLED.fullmatch(last_said(restarted)), "the log's last line says how fast it was, and what was loaded"
    assert total(restarted, "artefacts_compiled") == 0
    assert total(restarted, "artefacts_loaded") > 0
    assert numpy.array_equal(served.latent(base, after), served.latent(base, before))
    for image, expected in zip(served.images(base, after), served.images(base, before), strict=True):
        assert numpy.array_equal(image, expected)


def test_tiled_decoding_runs_compiled(server: ComfyServer, base: Path) -> None:
    def tiled(compiled: bool) -> dict[str, Any]:
        workflow = served.resize(served.tiny_workflow("sd15_compile_model_vae", compiled=compiled), 128, 96)
        for node in workflow.values():
            if node["class_type"] == "VAEDecode":
                tiles = {"tile_size": 64, "overlap": 16, "temporal_size": 64, "temporal_overlap": 8}
                node |= {"class_type": "VAEDecodeTiled", "inputs": {**node["inputs"], **tiles}}
        return workflow

    eager = served.images(base, server.run(tiled(False), timeout=300))
    ours = served.images(base, server.run(tiled(True), timeout=300))
    assert abs(ours[0] - eager[0]).max() <= 1


# ---- old workflows ---------------------------------------------------------------------------------------

# Compile nodes of packs that are not installed, with the inputs that such a workflow has.
KJ = {"backend": "inductor", "fullgraph": False, "mode": "default", "dynamic": False, "double_blocks": True}
ONEDIFF = {
    "nexfort": ("OneDiffNexfortBooster", {"fullgraph": False, "dynamic": True, "mode": "max-optimize:max-autotune"}),
    "booster": ("OneDiffModelBooster", {"torchcompile_booster": ["nexfort", 0]}),
}
OLD = {
    "flux_compile_model": {"NexfortCompileModel": ("TorchCompileModelFluxAdvancedV2", KJ)},
    "sd15_compile_model_vae": {
        "NexfortCompileModel": ("ModelSpeedup", {"inplace": True, "custom_booster": ["booster", 0]}),
        "NexfortCompileVAE": ("VaeSpeedup", {"inplace": True}),
    },
}


@pytest.mark.parametrize("name", OLD)
def test_an_old_workflow_runs_with_our_nodes(server: ComfyServer, base: Path, name: str) -> None:
    ours = served.tiny_workflow(name)
    wanted = served.latent(base, server.run(ours, timeout=300))
    compiled = total(server, "artefacts_compiled")
    old = json.loads(json.dumps(ours))
    for node in old.values():
        if node["class_type"] in OLD[name]:
            kind, inputs = OLD[name][node["class_type"]]
            link = {key: value for key, value in node["inputs"].items() if isinstance(value, list)}
            node |= {"class_type": kind, "inputs": {**link, **inputs}}
        node.setdefault("_meta", {"title": node["class_type"]})
    if "sd15" in name:
        for number, (kind, inputs) in ONEDIFF.items():
            old[number] = {"class_type": kind, "inputs": inputs, "_meta": {"title": kind}}
    server.run(served.tiny_workflow(name, seed=8), timeout=300)  # or the sampler's result would still be there
    before = each(server, "calls")
    history = server.run(old, timeout=300)
    ran = {node["class_type"] for node in history["prompt"][2].values()}
    assert set(OLD[name]) <= ran and not {kind for kind, _ in OLD[name].values()} & ran
    assert numpy.array_equal(served.latent(base, history), wanted)
    assert total(server, "artefacts_compiled") <= compiled, "the defaults are those of our own node"
    assert each(server, "calls") - before, "no engine was called"


# ---- bad input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("{'mode': 'O2'}", "JSON"),
        ('{"mode": "O2"', "JSON"),
        ('{"mode": "max-autotunes"}', "'max-autotune'"),
        ('{"memoryformat": "channels_last"}', "'memory_format'"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(server: ComfyServer, options: str, says: str) -> None:
    workflow = served.tiny_workflow("flux_compile_model")
    (node,) = [one for one in workflow.values() if one["class_type"] == "NexfortCompileModel"]
    node["inputs"]["options"] = options
    with pytest.raises(ComfyError, match="options - ") as refused:
        server.queue(workflow)
    assert says in str(refused.value)


# ---- routes ----------------------------------------------------------------------------------------------


def assert_no_path(answer: Any, *places: Path) -> None:
    """No folder of this machine is told."""
    text = json.dumps(answer)
    assert not [place for place in places if str(place) in text]


def test_the_cache_manager_lists_what_the_route_lists(server: ComfyServer, base: Path, cache: Path) -> None:
    server.run(served.tiny_workflow("flux_compile_model", seed=9), timeout=300)
    listed = server.get("/nexfort/cache")
    assert listed["count"] == len(listed["entries"]) > 0
    assert listed["size"] == sum(entry["size"] for entry in listed["entries"])
    facts = {"id", "region", "family", "kind", "shapes", "size", "created", "last_used", "state", "pinned", "base"}
    assert set(listed["entries"][0]) == facts | {"model", "mode", "files", "node"} and listed["limit"] > listed["size"]
    assert {entry["mode"] for entry in listed["entries"]} == {"O2"}
    assert {entry["state"] for entry in listed["entries"]} == {"ready"}
    assert_no_path(listed, cache, base, served.ROOT)
    lister = {"1": {"class_type": "NexfortCacheManager", "inputs": {}}}
    for _ in range(2):  # unchanged inputs, and yet it runs each time
        (text,) = server.run(lister, timeout=60)["outputs"]["1"]["text"]
        assert text.startswith(f"{listed['count']} blocks")
        assert all(entry["region"] in text and entry["family"] in text for entry in listed["entries"])
        assert "?" not in text


def test_the_report_tells_no_path(server: ComfyServer, base: Path, cache: Path, comfyui: Path) -> None:
    server.run(served.tiny_workflow("flux_compile_model", seed=10), timeout=300)
    told = server.get("/nexfort/report")
    assert told["engines"]
    helped = server.get("/nexfort/help")
    assert "Nexfort O2: " in helped["markdown"] and "torch:" in helped["markdown"]
    assert_no_path(helped, cache, base, served.ROOT, comfyui, Path.home())
    assert all("cache_dir" not in engine["report"] for engine in told["engines"])
    assert told["cache"] == "chosen"
    assert_no_path(told, cache, base, comfyui, served.ROOT)
    assert_no_path(server.get("/nexfort/nodes"), cache, base, comfyui, served.ROOT)


def test_the_nodes_route_tells_what_became_of_the_node(server: ComfyServer) -> None:
    workflow = served.tiny_workflow("flux_compile_model", seed=11)
    (number,) = [one for one, node in workflow.items() if node["class_type"] == "NexfortCompileModel"]
    server.run(workflow, timeout=300)
    told = {node["id"]: node for node in server.get("/nexfort/nodes")["nodes"]}
    assert told[number]["class"] == "NexfortCompileModel"
    assert told[number]["state"] in ("compiled", "warm")
    place = {"id": number, "class": "NexfortCompileModel", "workflow": None}
    (mine,) = [engine for engine in server.get("/nexfort/report")["engines"] if place in engine["nodes"]]
    assert mine["report"]["calls"]
    server.run(served.tiny_workflow("flux_compile_model", seed=11, compiled=False), timeout=300)
    told = {node["id"]: node for node in server.get("/nexfort/nodes")["nodes"]}
    assert told[number]["state"] == "off"


def test_a_node_like_one_that_ran_is_told_of_too(server: ComfyServer) -> None:
    workflow = served.tiny_workflow("flux_compile_model", seed=12)
    server.run(workflow, timeout=300)
    (number,) = [one for one, node in workflow.items() if node["class_type"] == "NexfortCompileModel"]
    again = json.loads(json.dumps(workflow).replace(f'["{number}", 0]', '["another", 0]'))
    again["another"] = again.pop(number)
    server.run(again, timeout=300)
    told = {node["id"]: node["state"] for node in server.get("/nexfort/nodes")["nodes"]}
    assert told["another"] in ("compiled", "warm")


def ids_of(server: ComfyServer) -> list[str]:
    """All artefacts' ids."""
    return [entry["id"] for entry in server.get("/nexfort/cache")["entries"]]


def by_id(server: ComfyServer, ids: list[str]) -> dict[str, Any]:
    """Pins, prunes and clears single ones of these artefacts; what is left of them, unpinned."""
    first, second, third = ids[:3]
    assert server.post("/nexfort/cache/pin", {"ids": [first, second]}) == {"ids": [first, second], "pinned": True}
    states = {entry["id"]: entry["state"] for entry in server.get("/nexfort/cache")["entries"]}
    assert (states[first], states[second], states[third]) == ("pinned", "pinned", "ready")
    pruned = server.post("/nexfort/cache/prune", {"ids": [first, third]})
    assert (pruned["removed"], pruned["kept"], pruned["count"]) == (1, [first], len(ids) - 1)
    status, answer = served.request(server, "/nexfort/cache/clear", json.dumps({"ids": [first, third]}).encode())
    assert status == 404 and third in answer["error"], "one that is gone stops it before anything goes"
    cleared = server.post("/nexfort/cache/clear", {"ids": [first]})
    assert (cleared["removed"], cleared["count"]) == (1, len(ids) - 2)
    assert set(ids_of(server)) == set(ids) - {first, third}
    assert server.post("/nexfort/cache/clear", {"confirm": True})["count"] == 1, "the pinned one stays"
    assert server.post("/nexfort/cache/pin", {"ids": [second], "pinned": False})["pinned"] is False
    return dict(server.get("/nexfort/cache"))


def test_prune_and_clear(server: ComfyServer, base: Path, request: pytest.FixtureRequest) -> None:
    """The last test of this file: it leaves nothing in the cache."""
    server.run(served.tiny_workflow("flux_compile_model"), timeout=300)
    running = request.getfixturevalue("restarted")
    running.run(served.tiny_workflow("flux_compile_model"), timeout=300)
    assert total(running, "artefacts_loaded") > 0 and total(running, "artefacts_compiled") == 0
    full = running.get("/nexfort/cache")
    room = 4 * full["size"]  # the copies that both servers have loaded count as well
    kept = running.post("/nexfort/cache/prune", {"max_bytes": room})
    assert kept == {"removed": 0, "freed": 0, "count": full["count"], "size": full["size"]}
    left = by_id(running, [entry["id"] for entry in full["entries"]])
    gone = running.post("/nexfort/cache/clear", {"confirm": True})
    assert gone == {"removed": left["count"], "freed": left["size"], "count": 0, "size": 0}
    assert running.get("/nexfort/cache")["entries"] == []
    empty = running.post("/nexfort/cache/prune", {"max_bytes": 0})
    assert empty == {"removed": 0, "freed": 0, "count": 0, "size": 0}
    # What is compiled in this process goes on working.
    running.run(served.tiny_workflow("flux_compile_model", seed=5), timeout=300)
