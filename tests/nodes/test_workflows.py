# SPDX-License-Identifier: Apache-2.0
"""The example workflows: both formats agree, the canvas gets sound graphs, and a real server accepts them."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
import served
import workflow_source

from nexfort_engine.headless import ComfyServer

NAMES = sorted(workflow_source.build_all())
WIDGET_TYPES = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", "COMFY_DYNAMICCOMBO_V3"}
FAMILIES = ("sd15", "sdxl", "pixart", "flux", "wan")


def read(path: str) -> dict[str, Any]:
    """A workflow file, by its path below `workflows/`."""
    return dict(json.loads((workflow_source.WORKFLOWS / path).read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    """A real server with no model files at all."""
    comfyui = served.comfyui_or_skip()
    folder = tmp_path_factory.mktemp("workflows")
    with served.server(comfyui, served.base_folder(folder, comfyui), folder / "cache") as running:
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
            if len(definition) > 1 and definition[1].get("control_after_generate"):
                assert next(values) in ("fixed", "increment", "decrement", "randomize")
        assert not list(values), f"{node['type']} has more values than widgets"
        for socket in node["inputs"]:
            inputs[socket["name"]] = sources[socket["link"]]
        found[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    return found


def post(server: ComfyServer, workflow: dict[str, Any]) -> dict[str, Any]:
    """The server's answer to a workflow that lacks its model files."""
    data = json.dumps({"prompt": workflow}).encode()
    asked = urllib.request.Request(server.url + "/prompt", data=data, headers={"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(asked, timeout=30)
    assert refused.value.code == 400
    return dict(json.loads(refused.value.read()))


# ---- without a server --------------------------------------------------------------------------------------


def test_every_family_comes_in_every_flavour() -> None:
    assert {f"{family}_{flavour}" for family in FAMILIES for flavour in workflow_source.FLAVOURS} == set(NAMES)
    assert [path.stem for path in sorted(workflow_source.WORKFLOWS.glob("*.json"))] == NAMES
    assert [path.stem for path in sorted((workflow_source.WORKFLOWS / "api").glob("*.json"))] == NAMES


def test_the_files_are_what_their_source_gives() -> None:
    for path, text in workflow_source.files().items():
        assert path.read_text(encoding="utf-8") == text, "python tests/workflow_source.py --write"


@pytest.mark.parametrize("name", NAMES)
def test_the_canvas_gets_a_sound_graph(name: str) -> None:
    canvas = read(f"{name}.json")
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


@pytest.mark.parametrize("name", NAMES)
def test_no_two_nodes_overlap(name: str) -> None:
    for one, other in combinations(read(f"{name}.json")["nodes"], 2):
        apart = [
            a["pos"][axis] + a["size"][axis] <= b["pos"][axis]
            for axis in (0, 1)
            for a, b in ((one, other), (other, one))
        ]
        assert any(apart), (one["type"], other["type"])


@pytest.mark.parametrize("name", NAMES)
def test_the_note_names_every_file(name: str) -> None:
    canvas = read(f"{name}.json")
    (note,) = [node["widgets_values"][0] for node in canvas["nodes"] if node["type"] == "MarkdownNote"]
    wanted = [
        value
        for node in read(f"api/{name}.json").values()
        for key, value in node["inputs"].items()
        if key in served.FILE_INPUTS
    ]
    assert wanted and all(value in note for value in wanted)


@pytest.mark.parametrize("name", NAMES)
def test_the_compile_nodes_stand_where_their_name_says(name: str) -> None:
    nodes = read(f"api/{name}.json")
    kinds = [node["class_type"] for node in nodes.values()]
    assert kinds.count("NexfortCompileModel") == 1
    assert kinds.count("NexfortCompileVAE") == (1 if name.endswith("_vae") else 0)
    assert any("Lora" in kind for kind in kinds) == name.endswith("_lora")
    (sampler,) = [node for node in nodes.values() if node["class_type"] == "KSampler"]
    assert nodes[sampler["inputs"]["model"][0]]["class_type"] == "NexfortCompileModel"


# ---- on a real server --------------------------------------------------------------------------------------


@pytest.mark.comfy
@pytest.mark.parametrize("name", NAMES)
def test_both_formats_agree(object_info: dict[str, Any], name: str) -> None:
    api = read(f"api/{name}.json")
    for node in api.values():
        del node["_meta"]
    assert to_api(read(f"{name}.json"), object_info) == api


@pytest.mark.comfy
@pytest.mark.parametrize("name", NAMES)
def test_names_and_link_types_are_the_servers(object_info: dict[str, Any], name: str) -> None:
    workflow = read(f"api/{name}.json")
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
@pytest.mark.parametrize("name", NAMES)
def test_nothing_but_model_files_is_missing(server: ComfyServer, name: str) -> None:
    answer = post(server, read(f"api/{name}.json"))
    problems = [
        (one["type"], one["extra_info"]["input_name"])
        for node in answer["node_errors"].values()
        for one in node["errors"]
    ]
    assert problems
    assert {kind for kind, _ in problems} == {"value_not_in_list"}
    assert {key for _, key in problems} <= set(served.FILE_INPUTS)
