# SPDX-License-Identifier: Apache-2.0
"""The chart of docs/benchmarks.md, from results.csv; `python -m benchmarks.figures --write` writes it.

One step of each network eager, through ComfyUI's TorchCompileModel and through Nexfort, as far as the three were run
together. The bars of a network share a scale, and no two networks do, so that slow and fast ones can be read. The
picture brings its own background and follows the reader's theme.
"""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from benchmarks.ratios import CORE, MODES, NAMES, ROOT, fastest, read, runs

PICTURE = ROOT / "web" / "docs" / "images" / "speed.svg"
WAYS = {"eager": "eager", "core": "ComfyUI's TorchCompileModel", "warm": "Nexfort"}
_STYLE = """
  .page { fill: #ffffff; stroke: #d1d9e0 }
  text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328 }
  .title { font-weight: 600; font-size: 15px }
  .name, .best { font-weight: 600 }
  .quiet { fill: #59636e; font-size: 12px }
  .eager { fill: #c4cbd3 } .core { fill: #7aa7d9 } .warm { fill: #1a7f37 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117; stroke: #3d444d }
    text { fill: #f0f6fc }
    .quiet { fill: #9198a1 }
    .eager { fill: #57606a } .core { fill: #4878b0 } .warm { fill: #3fb950 }
  }
"""
_WIDTH, _LEFT, _BAR, _LONGEST = 760, 176, 16, 380  # pixels; _LEFT: where bars begin
_TOP, _GROUP, _BOTTOM = 84, 72, 34


def measured(file: Path) -> dict[str, dict[str, dict[str, str]]]:
    """Backbone -> way -> its row with the milliseconds of the faster process, for those that were run together."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    processes = {"eager": ("eager",), "core": CORE, "warm": MODES["O2"]}
    for (_, backbone), run in runs(read(file), CORE, MODES["O2"]).items():
        if backbone in NAMES:
            found[backbone] = {
                way: {**next(run[one] for one in own if one in run), "ms": str(fastest(run, own))}
                for way, own in processes.items()
            }
    return {name: found[name] for name in NAMES if name in found}


def chart(file: Path) -> str:
    """The picture as SVG; the same text for the same rows."""
    found = measured(file)
    height = _TOP + _GROUP * len(found) + _BOTTOM
    sizes = {"width": str(_WIDTH), "height": str(height), "viewBox": f"0 0 {_WIDTH} {height}"}
    svg = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img", **sizes})
    ElementTree.SubElement(svg, "title").text = "; ".join(_said(name, ways) for name, ways in found.items())
    ElementTree.SubElement(svg, "style").text = _STYLE
    _box(svg, "page", 0.5, 0.5, _WIDTH - 1, height - 1, 6)
    _text(svg, "title", 20, 30, "Milliseconds a step (shorter is faster)")
    right = 20.0
    for way, label in WAYS.items():
        _box(svg, way, right, 46, 12, 12, 2)
        _text(svg, "", right + 18, 57, label)
        right += 52 + 7.2 * len(label)
    for number, (name, ways) in enumerate(found.items()):
        _group(svg, _TOP + _GROUP * number, name, ways)
    facts = [row for ways in found.values() for row in ways.values()]
    where = " and ".join(sorted({f"{row['gpu']}, torch {row['torch'].split('+')[0]}" for row in facts}))
    dates = " to ".join(sorted({min(row["date"] for row in facts), max(row["date"] for row in facts)})) if facts else ""
    _text(svg, "quiet", 20, height - 14, f"{where}, {dates}. The bars of a network share a scale.")
    ElementTree.indent(svg)
    return ElementTree.tostring(svg, encoding="unicode") + "\n"


def _group(svg: ElementTree.Element, top: float, name: str, ways: dict[str, dict[str, str]]) -> None:
    """One network: its name, and a bar for each way."""
    network, _, batch = NAMES[name].partition(", ")
    _text(svg, "name", 20, top + 22, network)
    _text(svg, "quiet", 20, top + 39, f"{ways['warm']['size'].replace('x', '×')}, {batch}")
    eager = float(ways["eager"]["ms"])
    longest = max(float(ways[way]["ms"]) for way in WAYS)
    for place, way in enumerate(WAYS):
        ms, y = float(ways[way]["ms"]), top + place * (_BAR + 3)
        _box(svg, way, _LEFT, y, _LONGEST * ms / longest, _BAR, 3)
        times = f", {eager / ms:.2f}× as fast" if way != "eager" else ""
        label = "best" if way == "warm" else ""
        _text(svg, label, _LEFT + _LONGEST * ms / longest + 8, y + 12.5, f"{ms:.1f} ms{times}")


def _said(name: str, ways: dict[str, dict[str, str]]) -> str:
    """The figures of one network for those who hear the picture."""
    figures = ", ".join(f"{label} {float(ways[way]['ms']):.1f} ms" for way, label in WAYS.items())
    return f"{NAMES[name].partition(',')[0]}: {figures}"


def _box(svg: ElementTree.Element, kind: str, x: float, y: float, width: float, height: float, round_: float) -> None:
    places = {"x": x, "y": y, "width": width, "height": height, "rx": round_}
    ElementTree.SubElement(svg, "rect", {"class": kind, **{name: f"{at:g}" for name, at in places.items()}})


def _text(svg: ElementTree.Element, kind: str, x: float, y: float, text: str) -> None:
    named = {"class": kind} if kind else {}
    ElementTree.SubElement(svg, "text", {**named, "x": f"{x:g}", "y": f"{y:g}"}).text = text
