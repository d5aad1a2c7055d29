# SPDX-License-Identifier: Apache-2.0
"""The pictures that ComfyUI's template browser shows beside the templates: title, purpose, and the graph in small.

The browser asks for `<name>.jpg` beside `<name>.json` and shows it as a square. Drawn from the graph alone; the bytes
may differ between versions of Pillow, so `alike` compares what is seen.
"""

from __future__ import annotations

from typing import Any

import workflow_layout
from PIL import Image, ImageChops, ImageDraw, ImageFont
from workflow_graph import Graph
from workflow_nodes import KINDS

SIDE = 288
FINER = 2  # drawn larger by this, then brought down, for smooth edges
QUALITY = 75
SAME_WITHIN = 24  # of 255, over patches of PATCH pixels: JPEG and fonts move less, a node or a word more
PATCH = 8
BACK, NODE, EDGE, OURS, PALE, STRONG = "#1b1d21", "#3a3f47", "#565d68", "#3f8f4f", "#9aa3b0", "#f2f4f7"
WIRES = {
    "MODEL": "#b39ddb", "CLIP": "#e8c35a", "VAE": "#e57373", "CONDITIONING": "#f0a35a", "LATENT": "#e58ad0",
    "IMAGE": "#64b5f6", "VIDEO": "#64b5f6", "CONTROL_NET": "#7ed6b5",
}  # fmt: skip


def draw(graph: Graph, title: str, does: str) -> Image.Image:
    """The picture of one template."""
    side = SIDE * FINER
    picture = Image.new("RGB", (side, side), BACK)
    pen = ImageDraw.Draw(picture)
    margin, most = side // 16, side - side // 8
    top = side // 6  # the browser's own badge covers the corner above
    _text(pen, (margin, top), title, STRONG, side // 11, most)
    _text(pen, (margin, top + side // 8), does, PALE, side // 18, most)
    _graph(pen, graph, (margin, top + side // 4, side - margin, side - margin))
    return picture.resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def alike(one: Image.Image, other: Image.Image) -> bool:
    """Whether two pictures show the same, whatever wrote them."""
    if one.size != other.size:
        return False
    coarse = [picture.convert("RGB").reduce(PATCH) for picture in (one, other)]
    return max(high for _, high in ImageChops.difference(*coarse).getextrema()) <= SAME_WITHIN


def _text(pen: Any, place: tuple[int, int], text: str, colour: str, height: int, most: int) -> None:
    """One line, in a smaller font if it would be wider than `most`."""
    font = ImageFont.load_default(height)
    if (wide := font.getlength(text)) > most:
        font = ImageFont.load_default(int(height * most / wide))
    pen.text(place, text, colour, font)


def _graph(pen: Any, graph: Graph, frame: tuple[int, int, int, int]) -> None:
    """The nodes where the canvas has them, brought to the frame, with their links."""
    places = workflow_layout.seen(graph.nodes, graph.folded)
    wide = max(x + w for (x, _), (w, _) in places.values())
    high = max(y + h for (_, y), (_, h) in places.values())
    across, down = (frame[2] - frame[0]) / wide, (frame[3] - frame[1]) / high
    down = min(down, across * 1.5)  # few nodes stay nodes, and do not become towers

    def at(x: float, y: float) -> tuple[int, int]:
        return round(frame[0] + x * across), round(frame[1] + y * down)

    for node in graph.nodes:
        (x, y), _ = places[node["id"]]
        for number, out in enumerate(node["links"].values()):
            (left, top), (w, h) = places[out.node]
            begin = at(left + w, top + h * (out.slot + 1) / (len(KINDS[_kind(graph, out.node)].outputs) + 1))
            _wire(pen, begin, at(x, y + 45 + 26 * number), WIRES.get(out.type, PALE))
    for node in graph.nodes:
        (x, y), (w, h) = places[node["id"]]
        fill = OURS if node["kind"].startswith("Nexfort") else NODE
        pen.rounded_rectangle((*at(x, y), *at(x + w, y + h)), 5 * FINER, fill, EDGE, FINER)


def _kind(graph: Graph, number: int) -> str:
    return str(graph.nodes[number - 1]["kind"])


def _wire(pen: Any, begin: tuple[int, int], end: tuple[int, int], colour: str) -> None:
    """A link as the canvas draws it: level at both ends."""
    points = []
    for step in range(25):
        part = step / 24
        eased = part * part * (3 - 2 * part)
        points.append((begin[0] + (end[0] - begin[0]) * part, begin[1] + (end[1] - begin[1]) * eased))
    pen.line(points, colour, FINER, "curve")
