# SPDX-License-Identifier: Apache-2.0
"""What a block does besides computing its result: random numbers, changed inputs, values written for its caller.

What compiled code would do otherwise is refused; changes to the call's tensors and plain values written into its
mappings are listed, so that they can be made again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from .readset import PLAIN, Recording, Refused

CHANGES_GIVEN = "it changes a list or an object that it is given"


def refuse_random(graph: GraphModule) -> None:
    """Raise Refused if the graph draws random numbers."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            if _dropout_of(node) == 0.0:
                continue  # attention without dropout carries the tag as well
            raise Refused(f"it draws random numbers ({node.target}), which compiled code would draw differently")


def _dropout_of(node: Node) -> float | None:
    """The dropout probability an operator is called with; 0 outside training; None where it has none."""
    given = dict(node.kwargs)
    for arg, declared in zip(node.args, node.target._schema.arguments, strict=False):  # type: ignore[union-attr]
        given[declared.name] = arg
    for declared in node.target._schema.arguments:  # type: ignore[union-attr]
        if declared.name in ("dropout_p", "p"):
            if given.get("train") is False or given.get("training") is False:
                return 0.0
            return given.get(declared.name, declared.default_value)  # type: ignore[return-value]
    return None


def tensors_held(module: nn.Module) -> dict[tuple[str, int], torch.Tensor]:
    """The tensors on a module tree by where they are, those in plain containers included."""
    found: dict[tuple[str, int], torch.Tensor] = {}

    def look(value: Any, at: str, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            found[at, id(value)] = value
        elif depth and type(value) in (list, tuple, dict):
            for item in value.values() if isinstance(value, dict) else value:
                look(item, at, depth - 1)

    for path, sub in module.named_modules():
        for name, value in sub.__dict__.items():
            look(value, f"{path}.{name}", 3)
    return found


def take_out_kept(graph: GraphModule, count: int) -> None:
    """Take out the last `count` outputs: what the block left on itself. Raises Refused if it is of the call's data.

    A table made from sizes or weights is a cache, and without it the block makes the table again. What comes from the
    call (the last frames of a chunk) is there for a later call, and compiled code would leave nothing.
    """
    if not count:
        return
    output = next(node for node in graph.graph.nodes if node.op == "output")
    kept = output.args[0][-count:]
    output.args = (output.args[0][:-count],)
    own = ("weights_", "c_", "factors_")
    given = {n for n in graph.graph.nodes if n.op == "placeholder" and not n.name.startswith(own)}
    due, seen = [n for n in kept if isinstance(n, Node)], set()
    while due:
        node = due.pop()
        if node in given:
            raise Refused("it keeps a tensor that it made of its inputs, for a later call; compiled code would not")
        if node not in seen:
            seen.add(node)
            due += [] if _is_of_shape(node) else node.all_input_nodes
    for node in reversed(graph.graph.nodes):
        schema = getattr(node.target, "_schema", None)
        if node in seen and node.op == "call_function" and not node.users and not (schema and schema.is_mutable):
            graph.graph.erase_node(node)


def _is_of_shape(node: Node) -> bool:
    """Whether a node takes no more of its inputs than sizes, dtype and device."""
    if node.op != "call_function":
        return False
    name = getattr(node.target, "__name__", "")
    return not isinstance(node.meta.get("val"), torch.Tensor) or name.startswith("new_") or "_like." in name


def written_inputs(graph: GraphModule) -> set[Node]:
    """The placeholders that the graph writes to, also through views of them."""
    found = set()
    for node in graph.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or not schema.is_mutable:
            continue
        for arg, declared in zip(node.args, schema.arguments, strict=False):
            if declared.alias_info is not None and declared.alias_info.is_write:
                root = arg
                while isinstance(root, Node) and root.op == "call_function" and _is_view(root):
                    root = root.args[0]
                if isinstance(root, Node) and root.op == "placeholder":
                    found.add(root)
    return found


def _is_view(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None or not node.args:
        return False
    first = schema.arguments[0].alias_info
    return first is not None or str(node.target).startswith(("aten.reshape", "aten.contiguous", "aten.to."))


def mapping_writes(recordings: list[Recording], nested: list[Recording], tensors: dict[int, Node]) -> list[list[Any]]:
    """What the block writes into its caller's mappings, as rows (number of the mapping, key, template).

    A template is a plain value or the size of one of `tensors` (nodes by their index in the call). Raises Refused for
    what could not be written again, and for writes into the mappings inside.
    """
    if any(inner.written or inner.removed for inner in nested):
        raise Refused("it changes a mapping inside the options it is given")
    places: dict[str, list[int]] = {}
    for i, node in tensors.items():
        for d, size in enumerate(node.meta["val"].shape):
            if not isinstance(size, int):
                places.setdefault(str(size.node.expr), [i, d])
    rows = []
    for number, recording in enumerate(recordings):
        if recording.removed:
            raise Refused(f"it takes {sorted(map(str, recording.removed))} out of the options it is given")
        for key, value in recording.written.items():
            text = _write_value(value, places)
            if text is None or type(key) is not str:
                raise Refused(f"it writes {key!r} into the options it is given, which could not be written again")
            rows.append([number, key, text])
    return rows


def _write_value(value: Any, places: dict[str, list[int]]) -> Any:
    if isinstance(value, torch.SymInt):
        place = places.get(str(value.node.expr))
        return {"size": place} if place else ({"plain": int(value)} if value.node.expr.is_number else None)
    if isinstance(value, (list, tuple)):
        parts = [_write_value(v, places) for v in value]
        return None if None in parts else {"tuple" if isinstance(value, tuple) else "list": parts}
    return {"plain": value} if type(value) in PLAIN else None
