# SPDX-License-Identifier: Apache-2.0
"""The example workflows, written once: `workflows/`, `example_workflows/` and `subgraphs/` come from here.

    python tests/support/workflow_source.py           says whether the files are what this source gives
    python tests/support/workflow_source.py --write   writes them

ComfyUI shows what lies in `example_workflows/`, see workflow_templates.py, and in `subgraphs/`, see
workflow_blueprint.py. It would show files in `workflows/` as well, and does not look into folders there. What a
family's workflow consists of is in workflow_families/, one file for each kind of network. Widgets stand in the order of
the front end; tests/nodes/test_workflows.py proves names, order and link types against a real server. It needs no
ComfyUI itself, and Pillow for the pictures.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import workflow_blueprint
import workflow_notes
import workflow_pictures
from PIL import Image
from workflow_families import FAMILIES
from workflow_graph import Graph
from workflow_templates import TEMPLATES

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS, SHOWN, SUBGRAPHS = ROOT / "workflows", ROOT / "example_workflows", ROOT / "subgraphs"


def build_all() -> dict[str, Graph]:
    """Every example workflow by name."""
    found = {}
    for family in FAMILIES:
        for flavour in family.all_flavours:
            graph = Graph(f"{family.key}_{flavour}")
            family.build(graph, flavour)
            workflow_notes.describe(graph, family, flavour)
            found[graph.name] = graph
    return found


def files() -> dict[Path, str]:
    """Path -> text of every JSON file."""
    found = {}
    for name, graph in build_all().items():
        for path, content in ((f"canvas/{name}.json", graph.ui()), (f"api/{name}.json", graph.api())):
            found[WORKFLOWS / path] = _text(content)
    found[SUBGRAPHS / f"{workflow_blueprint.NAME}.json"] = _text(workflow_blueprint.build())
    for template in TEMPLATES:
        found[SHOWN / f"{template.title}.json"] = _text(template.graph().ui())
    return found


def _text(content: Any) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def pictures() -> dict[Path, Image.Image]:
    """Path -> picture of every template."""
    return {SHOWN / f"{one.title}.jpg": workflow_pictures.draw(one.graph(), one.title, one.does) for one in TEMPLATES}


def different() -> list[Path]:
    """The files that are not what the source gives, and those that it does not give at all."""
    texts, drawn = files(), pictures()
    found = [path for path, text in texts.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    found += [path for path, picture in drawn.items() if not _is_there(path, picture)]
    there = {path for folder in (WORKFLOWS, SHOWN, SUBGRAPHS) for path in folder.rglob("*") if path.is_file()}
    return found + sorted(there - set(texts) - set(drawn))


def write() -> None:
    """Make the folder what the source gives; a picture that shows the same stays as it is."""
    texts, drawn = files(), pictures()
    for path in different():
        path.parent.mkdir(parents=True, exist_ok=True)
        if path in texts:
            path.write_text(texts[path], encoding="utf-8")
        elif path in drawn:
            drawn[path].save(path, quality=workflow_pictures.QUALITY, optimize=True)
        else:
            path.unlink()


def _is_there(path: Path, picture: Image.Image) -> bool:
    if not path.exists():
        return False
    with Image.open(path) as found:
        return workflow_pictures.alike(found, picture)


def main() -> None:
    """Compare or write; exit status 1 when a file differs."""
    if "--write" in sys.argv[1:]:
        write()
    found = different()
    for path in found:
        print(f"{path.relative_to(ROOT)} differs; python tests/support/workflow_source.py --write")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
