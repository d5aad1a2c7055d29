# SPDX-License-Identifier: Apache-2.0
"""Which model files were used with a backbone, by the key of that: names for people, where artefacts say a class alone.

One readable JSON file beside the artefacts, bounded. Checkpoints of one architecture share artefacts, so a backbone may
have several names. A file that is damaged, or that somebody else could have written, says nothing.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from .sidecar import UnreadableError, recall_own, tell_once, update

log = logging.getLogger("nexfort")

FOLDER, FILE = "names", "models.json"
MOST, EACH = 512, 8  # backbones, and names of each
_FORMAT = 1
_LONGEST = 200


def read(root: Path) -> tuple[dict[str, list[str]], dict[str, str]]:
    """The names of each backbone, the one used last first, and the type of the node that each was compiled by."""
    try:
        found = recall_own(root / FOLDER, FILE)
    except (UnreadableError, OSError) as reason:
        tell_once(f"{root / FOLDER / FILE} is not read and is made again: {reason}")
        return {}, {}
    return _names(found), _nodes(found)


def note(root: Path, keys: list[str], name: str, node: str = "") -> None:
    """A model file of this name was used with these backbones, which a node of this type compiled."""

    def changed(found: Any) -> dict[str, Any]:
        known = _names(found)
        for key in keys:
            others = [one for one in known.pop(key, []) if one != name]
            known[key] = [name[:_LONGEST], *others][:EACH]
        names = dict(list(known.items())[-MOST:])
        nodes = {**_nodes(found), **dict.fromkeys(keys, node[:_LONGEST])}
        return {"format": _FORMAT, "names": names, "nodes": {key: nodes[key] for key in names if nodes.get(key)}}

    try:
        update(root / FOLDER, FILE, changed)
    except OSError as error:
        log.debug("Nexfort: the name of a model is not kept: %s", error)


def _names(found: Any) -> dict[str, list[str]]:
    """What a file's content holds; nothing where it is not such a file."""
    names = found.get("names") if isinstance(found, dict) and found.get("format") == _FORMAT else None
    if not isinstance(names, dict):
        return {}
    return {
        key: some[:EACH]
        for key, some in names.items()
        if isinstance(key, str) and isinstance(some, list) and all(isinstance(one, str) for one in some)
    }


def _nodes(found: Any) -> dict[str, str]:
    """The types of nodes that a file's content holds; nothing where it is not such a file."""
    nodes = found.get("nodes") if isinstance(found, dict) and found.get("format") == _FORMAT else None
    if not isinstance(nodes, dict):
        return {}
    return {key: node for key, node in nodes.items() if isinstance(key, str) and isinstance(node, str)}
