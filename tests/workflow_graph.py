# SPDX-License-Identifier: Apache-2.0
"""A workflow as data, in its two forms: the front end's canvas format and the API format of POST /prompt.

What the workflows are is told in workflow_source.py; here is only how one is written down.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

COLUMN, GAP, WIDTH = 400, 60, 330

# What each node type gives, and which of its inputs are sockets (everything else is a widget), in order.
OUTPUTS: dict[str, tuple[str, ...]] = {
    "CheckpointLoaderSimple": ("MODEL", "CLIP", "VAE"),
    "UNETLoader": ("MODEL",),
    "CLIPLoader": ("CLIP",),
    "DualCLIPLoader": ("CLIP",),
    "VAELoader": ("VAE",),
    "LoraLoader": ("MODEL", "CLIP"),
    "LoraLoaderModelOnly": ("MODEL",),
    "ModelSamplingSD3": ("MODEL",),
    "NexfortCompileModel": ("MODEL",),
    "NexfortCompileVAE": ("VAE",),
    "CLIPTextEncode": ("CONDITIONING",),
    "FluxGuidance": ("CONDITIONING",),
    "ConditioningZeroOut": ("CONDITIONING",),
    "EmptyLatentImage": ("LATENT",),
    "EmptySD3LatentImage": ("LATENT",),
    "EmptyHunyuanLatentVideo": ("LATENT",),
    "KSampler": ("LATENT",),
    "VAEDecode": ("IMAGE",),
    "CreateVideo": ("VIDEO",),
    "SaveImage": (),
    "SaveVideo": (),
}
# Output names of the canvas where they differ from the type.
OUTPUT_NAMES = {"NexfortCompileModel": ("model",), "NexfortCompileVAE": ("vae",)}
SOCKETS: dict[str, tuple[str, ...]] = {
    "LoraLoader": ("model", "clip"),
    "LoraLoaderModelOnly": ("model",),
    "ModelSamplingSD3": ("model",),
    "NexfortCompileModel": ("model",),
    "NexfortCompileVAE": ("vae",),
    "CLIPTextEncode": ("clip",),
    "FluxGuidance": ("conditioning",),
    "ConditioningZeroOut": ("conditioning",),
    "KSampler": ("model", "positive", "negative", "latent_image"),
    "VAEDecode": ("samples", "vae"),
    "CreateVideo": ("images",),
    "SaveImage": ("images",),
    "SaveVideo": ("video",),
}


@dataclass(frozen=True)
class Out:
    """One output of a node, to be linked from."""

    node: int
    slot: int
    type: str


@dataclass
class Graph:
    """A workflow under construction: nodes in order, each with its column on the canvas."""

    name: str
    nodes: list[dict[str, Any]] = field(default_factory=list)
    note: str = ""

    def add(
        self,
        kind: str,
        column: int,
        title: str = "",
        widgets: dict[str, Any] | None = None,
        models: tuple[tuple[str, str, str], ...] = (),
        **links: Out,
    ) -> tuple[Out, ...]:
        """Add a node and return its outputs. `models` are (file name, folder, address to get it from)."""
        number = len(self.nodes) + 1
        node = {
            "id": number, "kind": kind, "column": column, "title": title, "widgets": widgets or {},
            "links": links, "models": models,
        }  # fmt: skip
        self.nodes.append(node)
        return tuple(Out(number, slot, type_) for slot, type_ in enumerate(OUTPUTS[kind]))

    def api(self) -> dict[str, Any]:
        """The API format: what POST /prompt takes. `control_after_generate` is the canvas's alone."""
        found = {}
        for node in self.nodes:
            inputs = {name: value for name, value in node["widgets"].items() if name != "control_after_generate"}
            inputs |= {name: [str(out.node), out.slot] for name, out in node["links"].items()}
            title = node["title"] or node["kind"]
            found[str(node["id"])] = {"class_type": node["kind"], "inputs": inputs, "_meta": {"title": title}}
        return found

    def ui(self) -> dict[str, Any]:
        """The canvas format, version 0.4, with a note to the left of everything."""
        links: list[list[Any]] = []
        given: dict[tuple[int, int], list[int]] = {}
        inputs: dict[int, list[dict[str, Any]]] = {}
        for node in self.nodes:
            inputs[node["id"]] = []
            for slot, name in enumerate(SOCKETS.get(node["kind"], ())):
                out: Out = node["links"][name]
                links.append([len(links) + 1, out.node, out.slot, node["id"], slot, out.type])
                given.setdefault((out.node, out.slot), []).append(len(links))
                inputs[node["id"]].append({"name": name, "type": out.type, "link": len(links)})
        places = self._places()
        nodes = [self._ui_node(order, node, inputs, given, places) for order, node in enumerate(self.nodes)]
        nodes.append(self._ui_note())
        return {
            "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"nexfort/{self.name}")),
            "revision": 0,
            "last_node_id": len(nodes),
            "last_link_id": len(links),
            "nodes": nodes,
            "links": links,
            "groups": [],
            "config": {},
            "extra": {"ds": {"scale": 0.65, "offset": [520, 160]}},
            "version": 0.4,
        }

    def _places(self) -> dict[int, tuple[list[int], list[int]]]:
        """Position and size of each node: columns from left to right, stacked from the top."""
        bottom: dict[int, int] = {}
        places = {}
        for node in self.nodes:
            kind, column = node["kind"], node["column"]
            height = 30 + 26 * (max(len(SOCKETS.get(kind, ())), len(OUTPUTS[kind])) + len(node["widgets"]))
            height += {"CLIPTextEncode": 110, "NexfortCompileModel": 60, "NexfortCompileVAE": 60}.get(kind, 0)
            height += 300 if kind in ("SaveImage", "SaveVideo") else 0
            top = bottom.get(column, 0)
            places[node["id"]] = ([column * COLUMN, top], [WIDTH, height])
            bottom[column] = top + height + GAP
        return places

    def _ui_node(
        self,
        order: int,
        node: dict[str, Any],
        inputs: dict[int, list[dict[str, Any]]],
        given: dict[tuple[int, int], list[int]],
        places: dict[int, tuple[list[int], list[int]]],
    ) -> dict[str, Any]:
        kind, number = node["kind"], node["id"]
        position, size = places[number]
        names = OUTPUT_NAMES.get(kind, OUTPUTS[kind])
        ours = kind.startswith("Nexfort")
        properties: dict[str, Any] = {
            "cnr_id": "nexfort" if ours else "comfy-core",
            "Node name for S&R": kind,
        }
        if node["models"]:
            properties["models"] = [{"name": n, "url": u, "directory": d} for n, d, u in node["models"] if u]
        found = {
            "id": number, "type": kind, "pos": position, "size": size, "flags": {}, "order": order, "mode": 0,
            "inputs": inputs[number],
            "outputs": [
                {"name": name, "type": type_, "slot_index": slot, "links": given.get((number, slot), [])}
                for slot, (name, type_) in enumerate(zip(names, OUTPUTS[kind], strict=True))
            ],
            "properties": properties,
            "widgets_values": list(node["widgets"].values()),
        }  # fmt: skip
        if node["title"]:
            found["title"] = node["title"]
        if ours:
            found |= {"color": "#232", "bgcolor": "#353"}
        return found

    def _ui_note(self) -> dict[str, Any]:
        number = len(self.nodes) + 1
        return {
            "id": number, "type": "MarkdownNote", "pos": [-460, 0], "size": [400, 560], "flags": {},
            "order": number - 1, "mode": 0, "inputs": [], "outputs": [], "title": "Read me",
            "properties": {}, "widgets_values": [self.note], "color": "#222", "bgcolor": "#000",
        }  # fmt: skip
