# SPDX-License-Identifier: Apache-2.0
"""Every link, anchor and picture of the documents leads somewhere; every workflow file has the fields it must have.

What the workflows say is tested in nodes/test_workflows.py, what the translations say in test_locales.py.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
FENCED = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]*)>?(?:\s+\"[^\"]*\")?\s*\)")
TAG = re.compile(r"<(?:a|img)\s[^>]*?(?:href|src)=\"([^\"]*)\"")
REFERENCE = re.compile(r"^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)
PICTURES = {".png": b"\x89PNG", ".jpg": b"\xff\xd8\xff", ".webp": b"RIFF", ".svg": b"<"}


def documents() -> list[Path]:
    """Every Markdown file of the project."""
    found = []
    for place, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in ("build", "demo-output")]
        found += [Path(place, name) for name in files if name.endswith(".md")]
    return sorted(found)


def targets(text: str) -> Iterator[str]:
    """Where a document's links and pictures lead, without those in examples."""
    prose = CODE.sub("", FENCED.sub("", text))
    for kind in (LINK, TAG, REFERENCE):
        yield from kind.findall(prose)


def anchors(text: str) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in HEADING.findall(FENCED.sub("", text)):
        plain = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(f"{plain}-{seen[plain]}" if seen[plain] else plain)
        seen[plain] += 1
    return found


def wrong(page: Path, target: str) -> str | None:
    """What is wrong with one link of a page, or None. Pages of the web are not asked, only looked at."""
    address, _, anchor = target.partition("#")
    if re.match(r"[a-z]+:", address):
        return None if address.startswith("https://") else f"{target}: expected https"
    place = (page.parent / address) if address else page
    if address.startswith("/") or ROOT not in (place.resolve(), *place.resolve().parents):
        return f"{target}: expected a path inside the project, relative to the page"
    if not place.exists():
        return f"{target}: there is no such file"
    if anchor and (place.suffix != ".md" or anchor not in anchors(place.read_text(encoding="utf-8"))):
        return f"{target}: there is no such heading"
    begins = PICTURES.get(place.suffix)
    if begins is not None and not place.read_bytes().startswith(begins):
        return f"{target}: it is no picture of that kind"
    return None


@pytest.mark.parametrize("page", documents(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page: Path) -> None:
    found = list(targets(page.read_text(encoding="utf-8")))
    assert [problem for target in found if (problem := wrong(page, target))] == []


def test_how_to_install_is_within_the_first_lines_of_the_readme() -> None:
    first = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:15]
    assert any("ComfyUI Manager" in line for line in first) and any("git clone" in line for line in first)


def test_each_page_is_linked_from_another() -> None:
    linked = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in documents()
        for target in targets(page.read_text(encoding="utf-8"))
        if target.partition("#")[0] and not re.match(r"[a-z]+:", target)
    }
    alone = [page for page in documents() if page not in linked and "tests" not in page.parts]
    assert [page.relative_to(ROOT).as_posix() for page in alone] == ["README.md"]


def test_links_that_lead_nowhere_are_noticed() -> None:
    page = ROOT / "README.md"
    text = "[a](nowhere.md) ![b](nothing.png 'x') [c](LICENSE#x) [d](#nothing) [e](http://x.y) [f](/etc/passwd)"
    text += " [g](../../outside.md) [h](README.md#switch-it-off) [i](#which-node-goes-where) [j](LICENSE)"
    text += " `[k](code.md)`"
    text += '\n```\n[l](fenced.md)\n```\n<img src="gone.png"> [m]: gone.md\n\n[n]: gone.md\n'
    found = {target: wrong(page, target) for target in targets(text)}
    fine = {target for target, problem in found.items() if problem is None}
    assert fine == {"README.md#switch-it-off", "#which-node-goes-where", "LICENSE"}
    bad = {"nowhere.md", "LICENSE#x", "#nothing", "http://x.y", "/etc/passwd", "../../outside.md", "gone.png"}
    assert set(found) == fine | bad | {"gone.md"}


def test_anchors_are_made_as_github_makes_them() -> None:
    text = "# Two  words\n## `code` & signs: yes!\n## Again\n## Again\n## Again\n```\n# no heading\n```\n"
    assert anchors(text) == {"two--words", "code--signs-yes", "again", "again-1", "again-2"}


# ---- workflows ---------------------------------------------------------------------------------------------

CANVAS: dict[str, type | tuple[type, ...]] = {
    "last_node_id": int, "last_link_id": int, "nodes": list, "links": list, "groups": list, "config": dict,
    "extra": dict, "version": (int, float),
}  # fmt: skip
NODE: dict[str, type | tuple[type, ...]] = {
    "id": int, "type": str, "pos": list, "size": list, "flags": dict, "order": int, "mode": int, "inputs": list,
    "outputs": list, "properties": dict, "widgets_values": list,
}  # fmt: skip
SOCKET: dict[str, type | tuple[type, ...]] = {"name": str, "type": str}


def ill_formed(value: Any, fields: dict[str, type | tuple[type, ...]], where: str) -> list[str]:
    """Which required fields an object lacks, or has in another type."""
    if not isinstance(value, dict):
        return [f"{where} is no object"]
    return [
        f"{where}.{name} is {value.get(name, 'missing')!r}"
        for name, kind in fields.items()
        if name not in value or not isinstance(value[name], kind) or isinstance(value[name], bool)
    ]


def canvas_problems(canvas: Any) -> list[str]:
    """What the front end's schema of a workflow would refuse."""
    found = ill_formed(canvas, CANVAS, "workflow")
    if found:
        return found
    for node in canvas["nodes"]:
        where = f"node {node.get('id')}"
        found += ill_formed(node, NODE, where)
        for socket in (*node.get("inputs", []), *node.get("outputs", [])):
            found += ill_formed(socket, SOCKET, f"{where}'s socket")
        found += [f"{where}.{name} holds no two numbers" for name in ("pos", "size") if len(node.get(name, [])) != 2]
    ids = [node.get("id") for node in canvas["nodes"]]
    found += [f"node {one} is there twice" for one in {one for one in ids if ids.count(one) > 1}]
    for link in canvas["links"]:
        if len(link) != 6 or link[1] not in ids or link[3] not in ids:
            found.append(f"link {link} is none of six parts between two nodes")
    return found


def api_problems(prompt: Any) -> list[str]:
    """What the server would refuse before it looks at any node, and what its replacements need: a title in _meta."""
    found = []
    for number, node in prompt.items():
        found += ill_formed(node, {"class_type": str, "inputs": dict, "_meta": dict}, f"node {number}")
        for name, value in node.get("inputs", {}).items():
            if isinstance(value, list) and (len(value) != 2 or value[0] not in prompt or not isinstance(value[1], int)):
                found.append(f"node {number}.{name} is {value}, expected [node, slot]")
        if not isinstance(node.get("_meta", {}).get("title"), str):
            found.append(f"node {number} has no title")
    return found


FILES = sorted(path for folder in ("workflows", "example_workflows") for path in (ROOT / folder).rglob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_workflow_has_what_it_must_have(path: Path) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    assert (api_problems if path.parent.name == "api" else canvas_problems)(content) == []


def test_a_workflow_that_lacks_something_is_noticed() -> None:
    canvas = json.loads(next(path for path in FILES if path.parent.name != "api").read_text(encoding="utf-8"))
    api = json.loads(next(path for path in FILES if path.parent.name == "api").read_text(encoding="utf-8"))
    for name in CANVAS:
        assert canvas_problems({key: value for key, value in canvas.items() if key != name}), name
    for name in NODE:
        broken = {key: value for key, value in canvas["nodes"][0].items() if key != name}
        assert canvas_problems({**canvas, "nodes": [broken, *canvas["nodes"][1:]]}), name
    assert canvas_problems({**canvas, "links": [*canvas["links"], [999, 998, 0, 997, 0, "MODEL"]]})
    first = next(iter(api))
    for name in ("class_type", "inputs", "_meta"):
        assert api_problems({**api, first: {key: value for key, value in api[first].items() if key != name}}), name
    assert api_problems({**api, first: {**api[first], "inputs": {"model": ["gone", 0]}}})
