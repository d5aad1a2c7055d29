# SPDX-License-Identifier: Apache-2.0
"""The subgraph that ComfyUI offers in its node search: `subgraphs/Load and compile.json`.

A loader for a diffusion model, a text encoder and a VAE with Nexfort Compile Model behind, as one node. ComfyUI reads
the folder `subgraphs/` of each pack for such files.
"""

from __future__ import annotations

import uuid
from typing import Any

from workflow_families import parts, z_image
from workflow_families.family import COMPILED
from workflow_graph import Graph
from workflow_layout import LEFT

NAME = "Load and compile"
ABOUT = (
    "Loads a diffusion model, its text encoder and its VAE, and compiles the model with Nexfort: faster steps, "
    "and the same picture."
)
# Widgets of the nodes inside that the node shows: by the number of the node, in this order.
SHOWN = ((1, "unet_name"), (4, "mode"), (2, "clip_name"), (2, "type"), (3, "vae_name"))
INPUTS, OUTPUTS = -10, -20  # the numbers of what stands for the node's own inputs and outputs


def build() -> dict[str, Any]:
    """The file."""
    graph = Graph("load_and_compile", compact=True)
    loaded = parts.split_files(graph, z_image.UNET, (z_image.TEXT,), "lumina2", z_image.IMAGE)
    outs = {"MODEL": parts.compile_model(graph, COMPILED, loaded.model), "CLIP": loaded.clip, "VAE": loaded.vae}
    canvas = graph.ui()
    nodes = {node["id"]: node for node in canvas["nodes"] if node["type"] != "MarkdownNote"}
    links = [
        {"id": one, "origin_id": a, "origin_slot": b, "target_id": c, "target_slot": d, "type": kind}
        for one, a, b, c, d, kind in canvas["links"]
    ]
    inputs = [_input(nodes[number], name, links) for number, name in SHOWN]
    outputs = []
    for slot, (name, out) in enumerate(outs.items()):
        links.append(_link(links, (out.node, out.slot), (OUTPUTS, slot), name))
        nodes[out.node]["outputs"][out.slot]["links"].append(len(links))
        outputs.append({"id": _id(f"output {name}"), "name": name, "type": name, "linkIds": [len(links)]})
    inside = {
        "id": _id("subgraph"), "version": 1, "revision": 0, "config": {}, "name": NAME,
        "state": {"lastGroupId": 0, "lastNodeId": max(nodes), "lastLinkId": len(links), "lastRerouteId": 0},
        "inputNode": {"id": INPUTS, "bounding": [LEFT - 200, 0, 120, 160]},
        "outputNode": {"id": OUTPUTS, "bounding": [LEFT + 660, 0, 120, 100]},
        "inputs": inputs, "outputs": outputs, "widgets": [], "nodes": list(nodes.values()), "groups": [],
        "links": links, "extra": {"workflowRendererVersion": "LG"}, "category": "Nexfort", "description": ABOUT,
    }  # fmt: skip
    around = {
        "id": 1, "type": inside["id"], "pos": [0, 0], "size": [330, 200], "flags": {}, "order": 0, "mode": 0,
        "inputs": [{"name": one["name"], "type": one["type"], "widget": {"name": one["name"]}, "link": None}
                   for one in inputs],
        "outputs": [{"name": name, "type": name, "links": []} for name in outs],
        "properties": {"proxyWidgets": [[str(number), name] for number, name in SHOWN], "cnr_id": "nexfort"},
        "widgets_values": [], "title": NAME,
    }  # fmt: skip
    return {
        "revision": 0, "last_node_id": 1, "last_link_id": 0, "nodes": [around], "links": [], "version": 0.4,
        "definitions": {"subgraphs": [inside]}, "extra": {},
    }  # fmt: skip


def _input(node: dict[str, Any], name: str, links: list[dict[str, Any]]) -> dict[str, Any]:
    """An input of the node for a widget inside, with its link."""
    slot = len(node["inputs"])
    links.append(_link(links, (INPUTS, len([one for one in links if one["origin_id"] == INPUTS])), (node["id"], slot)))
    node["inputs"].append({"name": name, "type": "COMBO", "widget": {"name": name}, "link": len(links)})
    return {"id": _id(f"input {name}"), "name": name, "type": "COMBO", "linkIds": [len(links)]}


def _link(
    links: list[dict[str, Any]], origin: tuple[int, int], target: tuple[int, int], kind: str = "COMBO"
) -> dict[str, Any]:
    begin = {"origin_id": origin[0], "origin_slot": origin[1]}
    return {"id": len(links) + 1, **begin, "target_id": target[0], "target_slot": target[1], "type": kind}


def _id(what: str) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"nexfort/load_and_compile/{what}"))
