# SPDX-License-Identifier: Apache-2.0
"""The workflows: both formats agree, a real server takes them, the real front end loads and shows them.

They run to an image in test_server.py and test_server_large.py; that none is forgotten there is asked here.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from itertools import combinations, pairwise
from types import ModuleType
from typing import Any

import browser
import pytest
import served
import test_server
import test_server_large
import workflow_pictures
import workflow_source
import workflow_templates
from browser_pages import page_of
from PIL import Image
from workflow_families.family import FLAVOURS
from workflow_nodes import KINDS

from nexfort_engine.cli.comfy_server import ComfyServer

NAMES = sorted(workflow_source.build_all())
TITLES = {one.title: one for one in workflow_templates.TEMPLATES}
CANVASES = (*NAMES, *TITLES)  # in the canvas format
WIDGET_TYPES = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", "COMFY_DYNAMICCOMBO_V3", "FLOAT,INT"}
FAMILIES = {
    *("sd15", "sdxl", "sd35", "pixart", "flux", "flux_schnell", "flux_kontext", "qwen_image", "z_image"),
    *("wan", "wan22", "hunyuan_video", "ltxv"),
}
# Their names are in documentation and in what users keep.
LONG_THERE = {
    f"{family}_{flavour}"
    for family in ("sd15", "sdxl", "pixart", "flux", "wan")
    for flavour in ("compile_model", "compile_model_vae", "compile_model_lora")
}
# Where a model, a VAE or a control net is used, and not handed on.
USERS = {
    "model": ("KSampler", "KSamplerAdvanced", "SamplerCustom", "BasicGuider"),
    "vae": ("VAEDecode", "VAEDecodeTiled", "VAEEncode"),
    "control_net": ("ControlNetApplyAdvanced",),
}
COMPILERS = {
    "model": "NexfortCompileModel",
    "vae": "NexfortCompileVAE",
    "control_net": "NexfortCompileControlNet",
}


def read(name: str) -> dict[str, Any]:
    """A workflow in the canvas format, or a template by its title."""
    folder = workflow_source.SHOWN if name in TITLES else workflow_source.WORKFLOWS / "canvas"
    return dict(json.loads((folder / f"{name}.json").read_text(encoding="utf-8")))


def read_api(name: str) -> dict[str, Any]:
    """A workflow in the API format; a template has no such file."""
    if name in TITLES:
        return TITLES[name].graph().api()
    return dict(json.loads((workflow_source.WORKFLOWS / "api" / f"{name}.json").read_text(encoding="utf-8")))


def kinds_in(name: str) -> set[str]:
    """The node types of an API workflow."""
    return {node["class_type"] for node in read_api(name).values()}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    """A real server with an empty file for each that the workflows name: their lists are all that is looked at."""
    comfyui = served.comfyui_or_skip()
    folder = tmp_path_factory.mktemp("workflows")
    base = served.base_folder(folder, comfyui)
    served.picture(base)
    graphs = [*workflow_source.build_all().values(), *(one.graph() for one in TITLES.values())]
    served.name_only(base, graphs)
    root = browser.front_end()
    arguments = [] if root is None else ["--front-end-root", str(root)]
    with served.server(comfyui, base, folder / "cache", *arguments) as running:
        yield running


@pytest.fixture(scope="module")
def object_info(server: ComfyServer) -> dict[str, Any]:
    """What the server says of each node."""
    return dict(server.get("/object_info"))


def sockets_and_widgets(shown: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """Inputs of a node as the front end splits them: sockets by type, widgets by definition."""
    sockets, widgets = {}, {}
    for kind in ("required", "optional"):
        for name, definition in shown["input"].get(kind, {}).items():
            type_ = "COMBO" if isinstance(definition[0], list) else definition[0]
            if type_ in WIDGET_TYPES:
                widgets[name] = definition
            else:
                sockets[name] = type_
    return sockets, widgets


def to_api(canvas: dict[str, Any], object_info: dict[str, Any]) -> dict[str, Any]:
    """The canvas format as the front end would queue it: widget values by the order of the node's widgets."""
    sources = {link[0]: [str(link[1]), link[2]] for link in canvas["links"]}
    found = {}
    for node in canvas["nodes"]:
        if node["type"] == "MarkdownNote":
            continue
        _, widgets = sockets_and_widgets(object_info[node["type"]])
        values = iter(node["widgets_values"])
        inputs: dict[str, Any] = {}
        for name, definition in widgets.items():
            value = next(values, None)
            if value is None:
                break  # a widget that a newer server has behind the others
            inputs[name] = value
            options = definition[1] if len(definition) > 1 else {}
            if options.get("control_after_generate"):
                assert next(values) in ("fixed", "increment", "decrement", "randomize")
            if options.get("image_upload"):
                assert next(values) == "image"  # the button
        assert not list(values), f"{node['type']} has more values than widgets"
        for socket in node["inputs"]:
            inputs[socket["name"]] = sources[socket["link"]]
        found[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    return found


def run_to_an_image(modules: tuple[ModuleType, ...], kind: str) -> set[str]:
    """The workflows that tests named test_the_<kind>_workflow_gives_... run, as their parameters say."""
    found: set[str] = set()
    for module in modules:
        for name, function in vars(module).items():
            if not name.startswith(f"test_the_{kind}_workflow_gives_"):
                continue
            for mark in function.pytestmark:
                if mark.name == "parametrize":
                    names, values = mark.args
                    place = (names.split(",") if isinstance(names, str) else list(names)).index("name")
                    sets = [getattr(one, "values", one) for one in values]  # pytest.param has its values inside
                    found.update(one if isinstance(one, str) else one[place] for one in sets)
    return found


def without_titles(workflow: dict[str, Any]) -> dict[str, Any]:
    """The API format as the server reads it."""
    return {number: {key: node[key] for key in ("class_type", "inputs")} for number, node in workflow.items()}


def queue(server: ComfyServer, workflow: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The server's answer to a workflow. One that it takes ends at its first empty file, if it begins at all."""
    data = json.dumps({"prompt": workflow}).encode()
    asked = urllib.request.Request(server.url + "/prompt", data=data, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=30) as answer:
            found = answer.status, dict(json.loads(answer.read()))
    except urllib.error.HTTPError as refused:
        return refused.code, dict(json.loads(refused.read()))
    server.post("/queue", {"clear": True})
    return found


# ---- without a server --------------------------------------------------------------------------------------


def test_every_family_comes_plain_and_compiled_and_every_flavour_is_there() -> None:
    assert {name for name in NAMES if name.endswith("_plain")} == {f"{family}_plain" for family in FAMILIES}
    assert {name for name in NAMES if name.endswith("_compile_model")} == {f"{one}_compile_model" for one in FAMILIES}
    assert set(NAMES) > LONG_THERE
    assert {flavour for name in NAMES for flavour in FLAVOURS if name.endswith(f"_{flavour}")} == set(FLAVOURS)


def test_every_workflow_runs_to_an_image_in_some_test() -> None:
    modules = (test_server, test_server_large)
    there = {path.stem for path in served.API.glob("*.json")}
    plain = {name for name in there if not served.COMPILE_NODES & kinds_in(name)}
    assert run_to_an_image(modules, "plain") == plain
    assert run_to_an_image(modules, "shipped") == there - plain, "compiled against not compiled"


def test_the_files_are_what_their_source_gives() -> None:
    assert workflow_source.different() == [], "python tests/workflow_source.py --write"


def test_each_template_has_a_picture_of_its_own() -> None:
    paths = [workflow_source.SHOWN / f"{title}.jpg" for title in TITLES]
    pictures = [Image.open(path) for path in paths]
    assert not any(workflow_pictures.alike(one, other) for one, other in pairwise(pictures))
    assert all(path.stat().st_size < 16_000 for path in paths)


@pytest.mark.parametrize("name", CANVASES)
def test_the_canvas_gets_a_sound_graph(name: str) -> None:
    canvas = read(name)
    nodes = {node["id"]: node for node in canvas["nodes"]}
    assert canvas["version"] == 0.4
    assert len(nodes) == len(canvas["nodes"]) and canvas["last_node_id"] == max(nodes)
    assert len({link[0] for link in canvas["links"]}) == len(canvas["links"]) == canvas["last_link_id"]
    for number, source, out, target, into, type_ in canvas["links"]:
        assert number in nodes[source]["outputs"][out]["links"]
        assert nodes[source]["outputs"][out]["type"] == type_
        assert nodes[target]["inputs"][into]["link"] == number
        assert nodes[target]["inputs"][into]["type"] == type_
    linked = [socket["link"] for node in canvas["nodes"] for socket in node["inputs"]]
    assert sorted(linked) == sorted(link[0] for link in canvas["links"])


def size_of(node: dict[str, Any]) -> list[int]:
    """The size that a node has on the canvas below its title."""
    return [node["size"][0], 0] if node["flags"].get("collapsed") else list(node["size"])


@pytest.mark.parametrize("name", CANVASES)
def test_no_two_nodes_overlap_and_each_stands_in_one_frame(name: str) -> None:
    canvas = read(name)
    for one, other in combinations(canvas["nodes"], 2):
        apart = [
            a["pos"][axis] + size_of(a)[axis] <= b["pos"][axis]
            for axis in (0, 1)
            for a, b in ((one, other), (other, one))
        ]
        assert any(apart), (one["type"], other["type"])
    for node in canvas["nodes"]:
        around = [
            group["title"]
            for group in canvas["groups"]
            if all(
                group["bounding"][axis] < node["pos"][axis]
                and node["pos"][axis] + node["size"][axis] < group["bounding"][axis] + group["bounding"][axis + 2]
                for axis in (0, 1)
            )
        ]
        framed = node["type"] != "MarkdownNote" and name not in TITLES
        assert len(around) == framed, node["type"]
        assert node["title"]


@pytest.mark.parametrize("name", CANVASES)
def test_the_note_names_every_file(name: str) -> None:
    canvas = read(name)
    (note,) = [node["widgets_values"][0] for node in canvas["nodes"] if node["type"] == "MarkdownNote"]
    wanted = [
        value
        for node in read_api(name).values()
        for key, value in node["inputs"].items()
        if key in (*served.FILE_INPUTS, "image") and isinstance(value, str)
    ]
    assert wanted and all(value in note for value in wanted)


def test_a_template_has_its_note_first_and_a_compile_node_for_each_network() -> None:
    for title in TITLES:
        nodes = read(title)["nodes"]
        assert min(nodes, key=lambda node: (node["pos"][0], node["pos"][1]))["type"] == "MarkdownNote"
        loaders = [node for node in nodes if node["type"] in ("UNETLoader", "CheckpointLoaderSimple")]
        compiled = [node for node in nodes if node["type"] == "NexfortCompileModel"]
        assert len(compiled) == len(loaders) > 0, title
        assert not any(node["flags"] for node in compiled), "what says how fast it is is never folded"


@pytest.mark.parametrize("name", NAMES)
def test_the_compile_nodes_stand_where_their_name_says(name: str) -> None:
    nodes = read_api(name)
    kinds = [node["class_type"] for node in nodes.values()]
    wanted = {"model": not name.endswith("_plain"), "vae": name.endswith("_vae")}
    wanted["control_net"] = name.endswith("_controlnet")
    for slot, compiler in COMPILERS.items():
        users = [node for node in nodes.values() if node["class_type"] in USERS[slot]]
        sources = [nodes[user["inputs"][slot][0]]["class_type"] for user in users]
        assert {source == compiler for source in sources} == ({wanted[slot]} if users else set())
        assert (compiler in kinds) == wanted[slot]
    modes = [node["inputs"]["mode"] for node in nodes.values() if node["class_type"] == COMPILERS["model"]]
    assert set(modes) <= {"O3" if name.endswith("_low_precision") else "O2"}
    assert any("Lora" in kind for kind in kinds) == name.endswith("_lora")


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_plain_one_is_the_compiled_one_with_its_nodes_bypassed(family: str) -> None:
    plain, ours = (workflow_source.build_all()[f"{family}_{flavour}"] for flavour in ("plain", "compile_model"))
    dropped = {node["id"]: node["links"]["model"] for node in ours.nodes if node["kind"] == COMPILERS["model"]}
    left = [node for node in ours.nodes if node["id"] not in dropped]
    numbers = {node["id"]: number for number, node in enumerate(left, 1)}
    bypassed = []
    for node in left:
        outs = {name: dropped.get(out.node, out) for name, out in node["links"].items()}
        links = {name: (numbers[out.node], out.slot) for name, out in outs.items()}
        bypassed.append((node["kind"], node["widgets"] if "filename_prefix" not in node["widgets"] else {}, links))
    assert bypassed == [
        (
            node["kind"],
            node["widgets"] if "filename_prefix" not in node["widgets"] else {},
            {name: (out.node, out.slot) for name, out in node["links"].items()},
        )
        for node in plain.nodes
    ]


# ---- on a real server --------------------------------------------------------------------------------------


@pytest.mark.comfy
@pytest.mark.parametrize("name", CANVASES)
def test_both_formats_agree(object_info: dict[str, Any], name: str) -> None:
    assert to_api(read(name), object_info) == without_titles(read_api(name))


@pytest.mark.comfy
@pytest.mark.parametrize("name", CANVASES)
def test_names_and_link_types_are_the_servers(object_info: dict[str, Any], name: str) -> None:
    workflow = read_api(name)
    for node in workflow.values():
        shown = object_info[node["class_type"]]
        sockets, widgets = sockets_and_widgets(shown)
        assert set(node["inputs"]) <= set(sockets) | set(widgets)
        assert set(shown["input"].get("required", {})) <= set(node["inputs"])
        for key, value in node["inputs"].items():
            if key in sockets:
                source, slot = value
                assert object_info[workflow[source]["class_type"]]["output"][slot] == sockets[key]


@pytest.mark.comfy
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_table_of_nodes_is_the_servers(object_info: dict[str, Any], kind: str) -> None:
    shown, ours = object_info[kind], KINDS[kind]
    count = len(ours.outputs)  # a newer server may have more behind them
    assert list(ours.outputs) == list(shown["output"])[:count]
    assert list(ours.output_names) == list(shown["output_name"])[:count]
    sockets, _ = sockets_and_widgets(shown)
    assert [name for name in sockets if name in ours.sockets] == list(ours.sockets)


@pytest.mark.comfy
@pytest.mark.parametrize("name", CANVASES)
def test_the_server_takes_it(server: ComfyServer, name: str) -> None:
    status, answer = queue(server, read_api(name))
    assert (status, answer.get("node_errors")) == (200, {})


@pytest.mark.comfy
def test_the_server_refuses_one_whose_file_is_missing(server: ComfyServer) -> None:
    workflow = read_api("flux_plain")
    (loader,) = [number for number, node in workflow.items() if node["class_type"] == "UNETLoader"]
    workflow[loader]["inputs"]["unet_name"] = "not_there.safetensors"
    status, answer = queue(server, workflow)
    (error,) = answer["node_errors"][loader]["errors"]
    assert (status, error["type"], error["extra_info"]["input_name"]) == (400, "value_not_in_list", "unet_name")


# ---- in the real front end ---------------------------------------------------------------------------------

# Widgets of the video nodes that older servers lack; left out, they have their defaults.
NEWER_WIDGETS = ("bit_depth", "format.codec")
# Loads a workflow as its file does when it is opened, and gives what would be queued.
LOAD = """async ([name, workflow]) => {
  window.loading = name
  await window.app.loadGraphData(workflow)
  return (await window.app.graphToPrompt()).output
}"""
# Every dialog and every message about missing things that is shown from now on, with the workflow it was shown for.
WATCH = """() => {
  window.troubles = {}
  const look = () => document.querySelectorAll('[data-testid=error-overlay], [role=dialog]').forEach((shown) => {
    window.troubles[window.loading] = shown.innerText
  })
  new MutationObserver(look).observe(document.body, { childList: true, subtree: true })
}"""


@pytest.fixture(scope="module")
def page(server: ComfyServer) -> Iterator[Any]:
    """One page of the server for all tests: a browser is dear."""
    browser.front_end_or_skip()
    with browser.running() as chromium, page_of(chromium, server) as opened:
        yield opened


@pytest.mark.comfy
@pytest.mark.slow
def test_the_front_end_loads_each_without_a_complaint(page: Any) -> None:
    errors: list[str] = []
    page.on("console", lambda message: message.type == "error" and errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.evaluate(WATCH)
    different = []
    for name in CANVASES:
        queued, wanted = page.evaluate(LOAD, [name, read(name)]), read_api(name)
        for node in queued.values():
            node["inputs"] = {key: value for key, value in node["inputs"].items() if key not in NEWER_WIDGETS}
        if queued != wanted:
            different.append(name)
    page.wait_for_timeout(500)  # what is missing is told a moment later
    assert (different, errors, page.evaluate("() => window.troubles")) == ([], [], {})
    unknown = read("flux_plain")
    unknown["nodes"][0]["type"] = "NobodyHasThisNode"
    page.evaluate(LOAD, ["unknown", unknown])
    page.wait_for_function("() => window.troubles.unknown")
