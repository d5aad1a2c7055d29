# SPDX-License-Identifier: Apache-2.0
"""The example workflows, written once: `workflows/*.json`, `workflows/*.jpg` and `workflows/api/*.json` come from here.

    python tests/support/workflow_source.py           says whether the files are what this source gives
    python tests/support/workflow_source.py --write   writes them

What a family's workflow consists of is in workflow_families/, one file for each kind of network. Widgets stand in the
order of the front end; tests/nodes/test_workflows.py proves names, order and link types against a real server. It
needs no ComfyUI itself, and Pillow for the pictures.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import workflow_notes
import workflow_pictures
from PIL import Image
from workflow_families import FAMILIES
from workflow_graph import Graph

WORKFLOWS = Path(__file__).resolve().parents[2] / "workflows"


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
    """Path -> text of every JSON file below `workflows/`."""
    found = {}
    for name, graph in build_all().items():
        for path, content in ((f"{name}.json", graph.ui()), (f"api/{name}.json", graph.api())):
            found[WORKFLOWS / path] = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    return found


def pictures() -> dict[Path, Image.Image]:
    """Path -> picture of every workflow."""
    graphs = build_all()
    return {
        WORKFLOWS / f"{family.key}_{flavour}.jpg": workflow_pictures.draw(
            graphs[f"{family.key}_{flavour}"], family, flavour
        )
        for family in FAMILIES
        for flavour in family.all_flavours
    }


def different() -> list[Path]:
    """The files that are not what the source gives, and those that it does not give at all."""
    texts, drawn = files(), pictures()
    found = [path for path, text in texts.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    found += [path for path, picture in drawn.items() if not _is_there(path, picture)]
    there = {path for path in WORKFLOWS.rglob("*") if path.is_file()}
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
        print(f"{path.relative_to(WORKFLOWS.parent)} differs; python tests/support/workflow_source.py --write")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
