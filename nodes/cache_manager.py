# SPDX-License-Identifier: Apache-2.0
"""The node "Nexfort Cache Manager": shows what the compile cache holds. It changes nothing.

Pruning and clearing are commands and POST routes: a widget for them, left in a workflow, would act on every
run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from comfy_api.latest import io, ui

from . import running
from .compile_inputs import CATEGORY
from .told import without_paths

HEADINGS = ("block", "model", "shapes", "size", "last used", "state")


class NexfortCacheManager(io.ComfyNode):
    """An output node that lists the artefacts on disk each time it runs."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The node as the front end sees it."""
        return io.Schema(
            node_id="NexfortCacheManager",
            display_name="Nexfort Cache Manager",
            category=CATEGORY,
            description=(
                "Lists what the compile cache holds: block, model, the sizes it served, size on disk, time of last "
                "use and state. It only looks. "
                "To free space use the Nexfort tab of the sidebar or `nexfort cache prune`. "
                "Whatever is removed is compiled again when it is next needed."
            ),
            search_aliases=["nexfort", "compile cache", "cache list", "disk usage"],
            is_output_node=True,
            not_idempotent=True,
            inputs=[
                io.AnyType.Input(
                    "after",
                    optional=True,
                    tooltip="Connect any output here, say the image, to list the cache after that node has "
                    "run. Unconnected, it lists whenever the queue gets to it. The value is not looked at.",
                )
            ],
            outputs=[
                io.String.Output(display_name="table", tooltip="The table as text, for a text preview or a text file.")
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs: object) -> int:
        """Never the same twice: the disk changes behind ComfyUI's back, so the list is made on every run."""
        return time.time_ns()

    @classmethod
    def execute(cls, after: object = None) -> io.NodeOutput:
        """Read the table of the cache and show it on the node."""
        text = table(listing())
        _show_on_node(text, cls.hidden.unique_id)
        return io.NodeOutput(text, ui=ui.PreviewText(text))


def listing() -> list[dict[str, Any]]:
    """The cache as plain rows, last used first; times are UTC text. It is the cache that the engines here use."""
    from nexfort_engine.api import store_at
    from nexfort_engine.cache import model_names
    from nexfort_engine.hosts.comfy.model import cache_root

    store = store_at(cache_root())
    names, nodes = model_names.read(store.root)
    models = [(row, str(row["info"].get("model"))) for row in store.rows()]
    rows = [_row(row, names.get(model, []), nodes.get(model, "")) for row, model in models]
    return sorted(rows, key=lambda row: (row["last_used"], row["id"]), reverse=True)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as aligned text with a line of totals, or one sentence for an empty cache."""
    if not rows:
        return "The compile cache is empty. It fills when a compiled model first samples."
    from nexfort_engine.cache import table as view
    from nexfort_engine.cache.paths import size_text

    lines = [HEADINGS]
    for row in rows:
        used = row["last_used"][:16].replace("T", " ")
        lines.append((row["region"], row["family"], view.shapes(row), size_text(row["size"]), used, row["state"]))
    total = sum(row["size"] for row in rows)
    return "\n".join([f"{len(rows)} blocks, {size_text(total)}", "", *view.aligned(lines)])


def _row(row: Mapping[str, Any], files: Sequence[str] = (), node: str = "") -> dict[str, Any]:
    """What may leave the server of one row of the store. Whatever else the engine noted stays there."""
    from nexfort_engine.cache import table as view

    last_used = row["last_used"]
    found = {
        "id": row["id"],
        "region": view.region(row),
        "family": view.family(row),
        "kind": str(row["info"].get("kind", view.UNKNOWN)),
        "model": view.plain(row["info"].get("model") or view.family(row)),
        "mode": view.plain(row["info"].get("mode") or ""),
        "files": [view.plain(name) for name in files],
        "node": view.plain(node),
        "shapes": list(row["shapes"]),
        "size": int(row["size"]),
        "created": _time_text(row["created"]),
        "last_used": _time_text(row["created"] if last_used is None else last_used),
        "state": view.state(row),
        "pinned": bool(row["pinned"]),
        "base": bool(row["base"]),
    }
    return dict(without_paths(found))


def _time_text(moment: str | float) -> str:
    """UTC in ISO form with seconds, from the store's text or from seconds since the epoch."""
    seconds = datetime.fromisoformat(moment).timestamp() if isinstance(moment, str) else moment
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _show_on_node(text: str, node_id: str | None) -> None:
    """Show text under the node. The front end draws a node's own text output only for nodes of core."""
    server = running.server()
    if server is not None and node_id is not None:
        server.send_progress_text(text, node_id)
