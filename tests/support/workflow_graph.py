# SPDX-License-Identifier: Apache-2.0
"""A workflow as data, in its two forms: the front end's canvas format and the API format of POST /prompt.

What the workflows are is told in workflow_families/; here is only how one is written down.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

import workflow_layout
from workflow_nodes import KINDS

COLUMN, GAP, WIDTH = 400, 60, 330
# What the canvas keeps among a node's widgets and the API does not take.
CANVAS_ONLY = ("control_after_generate", "upload")
# What stands in each column, from the left.
COLUMNS = ("Models and sizes", "What is done to the model", "Prompt", "Sampling", "Result")
Place = tuple[list[int], list[int]]  # position and size


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
    compact: bool = False  # laid out for the template browser, which shows the whole of it when it opens it
    folded: frozenset[str] = frozenset()  # kinds of nodes that are shown by their title only

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
            "id": number, "kind": kind, "column": column, "title": title or KINDS[kind].title,
            "widgets": widgets or {}, "links": links, "models": models,
        }  # fmt: skip
        self.nodes.append(node)
        return tuple(Out(number, slot, type_) for slot, type_ in enumerate(KINDS[kind].outputs))

    def api(self) -> dict[str, Any]:
        """The API format: what POST /prompt takes."""
        found = {}
        for node in self.nodes:
            inputs = {name: value for name, value in node["widgets"].items() if name not in CANVAS_ONLY}
            inputs |= {name: [str(out.node), out.slot] for name, out in node["links"].items()}
            meta = {"title": node["title"]}
            found[str(node["id"])] = {"class_type": node["kind"], "inputs": inputs, "_meta": meta}
        return found

    def ui(self) -> dict[str, Any]:
        """The canvas format, version 0.4, with a note to the left of everything."""
        links: list[list[Any]] = []
        given: dict[tuple[int, int], list[int]] = {}
        inputs: dict[int, list[dict[str, Any]]] = {}
        for node in self.nodes:
            inputs[node["id"]] = []
            linked = [name for name in KINDS[node["kind"]].sockets if name in node["links"]]
            for slot, name in enumerate(linked):
                out: Out = node["links"][name]
                links.append([len(links) + 1, out.node, out.slot, node["id"], slot, out.type])
                given.setdefault((out.node, out.slot), []).append(len(links))
                inputs[node["id"]].append({"name": name, "type": out.type, "link": len(links)})
        places = workflow_layout.compact(self.nodes, self.folded) if self.compact else self.places()
        nodes = [self._ui_node(order, node, inputs, given, places) for order, node in enumerate(self.nodes)]
        nodes.append(self._ui_note())
        return {
            "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"nexfort/{self.name}")),
            "revision": 0,
            "last_node_id": len(nodes),
            "last_link_id": len(links),
            "nodes": nodes,
            "links": links,
            "groups": [] if self.compact else self._groups(places),
            "config": {},
            "extra": {"ds": {"scale": 0.75, "offset": [560, 160]}},  # clear of the front end's own bars
            "version": 0.4,
        }

    def places(self) -> dict[int, Place]:
        """Position and size of each node: columns from left to right without a gap, stacked from the top."""
        bottom: dict[int, int] = {}
        places = {}
        used = sorted({node["column"] for node in self.nodes})
        for node in self.nodes:
            kind, column = KINDS[node["kind"]], node["column"]
            height = 30 + 26 * (max(len(kind.sockets), len(kind.outputs)) + len(node["widgets"])) + kind.taller
            top = bottom.get(column, 0)
            places[node["id"]] = ([used.index(column) * COLUMN, top], [WIDTH, height])
            bottom[column] = top + height + GAP
        return places

    def _groups(self, places: dict[int, Place]) -> list[dict[str, Any]]:
        """A titled frame around each column."""
        found = []
        for number, title in enumerate(COLUMNS):
            inside = [places[node["id"]] for node in self.nodes if node["column"] == number]
            if not inside:
                continue
            height = max(position[1] + size[1] for position, size in inside)
            bounding = [inside[0][0][0] - 20, -90, WIDTH + 40, height + 110]
            found.append({
                "id": len(found) + 1, "title": title, "bounding": bounding, "color": "#3f789e", "font_size": 24,
                "flags": {},
            })  # fmt: skip
        return found

    def _ui_node(
        self,
        order: int,
        node: dict[str, Any],
        inputs: dict[int, list[dict[str, Any]]],
        given: dict[tuple[int, int], list[int]],
        places: dict[int, Place],
    ) -> dict[str, Any]:
        kind, number = KINDS[node["kind"]], node["id"]
        position, size = places[number]
        ours = node["kind"].startswith("Nexfort")
        flags = {"collapsed": True} if node["kind"] in self.folded else {}
        properties: dict[str, Any] = {
            "cnr_id": "nexfort" if ours else "comfy-core",
            "Node name for S&R": node["kind"],
        }
        if node["models"]:
            properties["models"] = [{"name": n, "url": u, "directory": d} for n, d, u in node["models"] if u]
        found = {
            "id": number, "type": node["kind"], "pos": position, "size": size, "flags": flags, "order": order,
            "mode": 0, "inputs": inputs[number],
            "outputs": [
                {"name": name, "type": type_, "slot_index": slot, "links": given.get((number, slot), [])}
                for slot, (name, type_) in enumerate(zip(kind.output_names, kind.outputs, strict=True))
            ],
            "properties": properties,
            "widgets_values": list(node["widgets"].values()),
            "title": node["title"],
        }  # fmt: skip
        if ours:
            found |= {"color": "#232", "bgcolor": "#353"}
        return found

    def _ui_note(self) -> dict[str, Any]:
        number = len(self.nodes) + 1
        position, size = workflow_layout.NOTE if self.compact else ([-460, 0], [400, 560])
        return {
            "id": number, "type": "MarkdownNote", "pos": position, "size": size, "flags": {},
            "order": number - 1, "mode": 0, "inputs": [], "outputs": [], "title": "Read me",
            "properties": {}, "widgets_values": [self.note], "color": "#222", "bgcolor": "#000",
        }  # fmt: skip
