# SPDX-License-Identifier: Apache-2.0
"""What a block does besides computing its result: random numbers, changed inputs, values written for its caller.

What compiled code would do otherwise is refused; changes to the call's tensors and plain values written into its
mappings are listed, so that they can be made again.
"""

from __future__ import annotations

import dis
import itertools
import operator
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from ..guards.option_recorder import Recording, Refused
from ..modules.containers import items_of, refill
from ..modules.tree import INTERNAL, PLAIN
from .source_hashes import is_host_code

CHANGES_GIVEN = "it changes a list or an object that it is given"
KEEPS = "it keeps a tensor that it made of its inputs, for a later call; compiled code would not"
HOLDS_BY_MODULES = "it holds a mapping whose keys are modules"
ASKS_FOR_THREAD = "it asks for the number of its thread"
_BY_STRIDES = ("aten.reshape", "aten.contiguous", "aten.flatten", "aten.ravel")  # views or copies
MAY_CHANGE = (
    CHANGES_GIVEN,
    KEEPS,
    HOLDS_BY_MODULES,
    ASKS_FOR_THREAD,
)  # what the capture of a block says that is then captured as one that changes lists


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


Held = dict[tuple[str, int], torch.Tensor]


def tensors_held(module: nn.Module) -> Held:
    """The tensors on a module tree by where they are, those in plain containers included."""
    found: Held = {}

    def look(value: Any, at: str, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            found[at, id(value)] = value
        elif depth and type(value) in (list, tuple, dict):
            for item in value.values() if isinstance(value, dict) else value:
                look(item, at, depth - 1)

    for path, sub in module.named_modules():
        for name, value in (*sub.__dict__.items(), *sub._buffers.items()):
            if name not in ("_parameters", "_buffers"):
                look(value, f"{path}.{name}" if path else name, 3)
    return found


def kept_since(before: Held, module: nn.Module) -> tuple[list[torch.Tensor], list[str]]:
    """The tensors that a module tree holds now and did not before; and each one's place if another was there, or ""."""
    new = {key: tensor for key, tensor in tensors_held(module).items() if key not in before}
    places = {at for at, _ in before}
    return list(new.values()), [at if at in places else "" for at, _ in new]


def refuse_counting(reads: Mapping[tuple[str, str], Any], module: nn.Module) -> None:
    """Raise Refused for a block that changed a number of its own that it read: it goes on from there the next time.

    reads: the attributes that it read, as they were then; module: what was traced, as it is now.
    """
    for (path, name), value in reads.items():
        now = module.get_submodule(path).__dict__.get(name)
        if type(value) in (int, float) and type(now) in (int, float) and now != value:
            raise Refused(f"it counts in its attribute {name}, and compiled code would not")


Numbers = list[tuple[Any, list[Any]]]


def numbers_held(module: nn.Module) -> Numbers:
    """The lists and dictionaries of a module tree that hold no tensors, with what is in them."""
    found: Numbers = []
    for sub in module.modules():
        for name, value in list(sub.__dict__.items()):
            if type(value) in (list, dict) and name not in INTERNAL:
                items = items_of(value)
                if items and all(type(part) in PLAIN for part in _parts(items)):
                    found.append((value, items))
    return found


def refuse_counted(before: Numbers) -> None:
    """Raise Refused for a block that changed such a list of its own; it is put back first."""
    for value, items in before:
        if items_of(value) != items:
            refill(value, items)
            raise Refused(f"it changes numbers in a {type(value).__name__} of its own, and compiled code would not")


def ask_types(codes: Iterable[types.CodeType]) -> bool:
    """Whether code that ran asks for types: a number out of a list is shown to it as something else.

    Python's own library and torch are left out, and so is a method that asks for the type of `self`.
    """
    return any("type" in code.co_names and is_host_code(code) and _asks_a_type(code) for code in codes)


def _asks_a_type(code: types.CodeType) -> bool:
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "PUSH_NULL", "EXTENDED_ARG")]
    return any(
        step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval == "type" and following.argval != "self"
        for step, following in itertools.pairwise(steps)
    )


def _parts(items: list[Any]) -> Iterator[Any]:
    for item in items:
        yield from item if type(item) is tuple else (item,)


def take_out_kept(graph: GraphModule, exchanged: Sequence[int | None]) -> None:
    """Take out the last outputs: what the block left on itself. Raises Refused where a later call goes on from them.

    A table made from sizes or weights is a cache, and without it the block makes the table again. What comes from the
    call (the last frames of a chunk) is there for a later call, and compiled code would leave nothing; and so is what
    stands where one of the block's own tensors was and comes from that. exchanged: the numbers of those.
    """
    if not exchanged:
        return
    output = next(node for node in graph.graph.nodes if node.op == "output")
    kept = output.args[0][-len(exchanged) :]
    output.args = (output.args[0][: -len(exchanged)],)
    own = ("weights_", "c_", "factors_")
    given = {n for n in graph.graph.nodes if n.op == "placeholder" and not n.name.startswith(own)}
    weights = [n for n in graph.graph.nodes if n.op == "placeholder" and n.name.startswith("weights_")]
    seen: set[Node] = set()
    for node, number in zip(kept, exchanged, strict=True):
        if isinstance(node, Node):
            sources = _sources(node)
            if sources & given or (number is not None and weights[number] in sources):
                raise Refused(KEEPS)
            seen |= sources
    for node in reversed(graph.graph.nodes):
        schema = getattr(node.target, "_schema", None)
        if node in seen and node.op == "call_function" and not node.users and not (schema and schema.is_mutable):
            graph.graph.erase_node(node)


def _sources(node: Node) -> set[Node]:
    """A node and what its numbers come from, what is written into it or its views included."""
    due, seen = [node], set()
    while due:
        one = due.pop()
        if one in seen:
            continue
        seen.add(one)
        if not _is_of_shape(one):
            due += one.all_input_nodes
        due += [user for user in one.users if user.op == "call_function" and (_is_view(user) or one in _written(user))]
    return seen


def _written(node: Node) -> list[Any]:
    """The arguments that an operator writes to, those that it takes by name (`out=`) or in a list among them."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    found: list[Any] = []
    for place, what in enumerate(schema.arguments):
        if what.alias_info is not None and what.alias_info.is_write:
            given = node.args[place] if place < len(node.args) else node.kwargs.get(what.name)
            found += given if isinstance(given, (list, tuple)) else [given]
    return found


def _is_of_shape(node: Node) -> bool:
    """Whether a node takes no more of its inputs than sizes, dtype and device."""
    if node.op != "call_function":
        return False
    name = getattr(node.target, "__name__", "")
    numbers = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)
    return isinstance(node.meta.get("val"), numbers) or name.startswith("new_") or "_like." in name


def written_inputs(graph: GraphModule) -> dict[Node, bool]:
    """The placeholders that the graph writes to, also through views of them.

    The value says whether it writes through an operator whose result is a view or a copy by the strides of its input:
    what is a view of the contiguous tensor that a graph is shown may be a copy of the caller's.
    """
    found: dict[Node, bool] = {}
    for node in graph.graph.nodes:
        for one in _written(node) if node.op == "call_function" else ():
            root, by_strides = _root(one)
            if isinstance(root, Node) and root.op == "placeholder":
                found[root] = found.get(root, False) or by_strides
    return found


def refuse_strides(graph: GraphModule, given: Iterable[Node | None]) -> None:
    """Raise Refused for code that reads a tensor of its caller by strides of its own: a copy may lie otherwise.

    given: the placeholders of the call's tensors. A weight is passed as it lies, and its strides are in the key.
    """
    taken = set(given)
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default):
        root, _ = _root(node)
        if root in taken:
            raise Refused("it reads the memory of a tensor that it is given by strides of its own")


def _root(node: Any) -> tuple[Any, bool]:
    """What a node is a view of, or the node itself; and whether it is one by the strides of its input."""
    by_strides = False
    while isinstance(node, Node) and node.op == "call_function" and _is_view(node):
        by_strides = by_strides or str(node.target).startswith(_BY_STRIDES)
        node = node.args[0]
    return node, by_strides


def _is_view(node: Node) -> bool:
    if node.target is operator.getitem:  # one of the parts that `chunk` and its like give
        return isinstance(node.args[0], Node) and _is_view(node.args[0])
    schema = getattr(node.target, "_schema", None)
    if schema is None or not node.args:
        return False
    first = schema.arguments[0].alias_info
    return first is not None or str(node.target).startswith((*_BY_STRIDES, "aten.to."))


def mapping_writes(recordings: list[Recording], nested: list[Recording], tensors: dict[int, Node]) -> list[list[Any]]:
    """What the block writes into its caller's mappings, as rows (number of the mapping, key, template).

    A template is a plain value or the size of one of `tensors` (nodes by their index in the call). Raises Refused for
    what could not be written again, and for writes into the mappings inside.
    """
    if any(inner.written or inner.removed for inner in nested):
        raise Refused(CHANGES_GIVEN)
    places: dict[str, list[int]] = {}
    for i, node in tensors.items():
        for d, size in enumerate(node.meta["val"].shape):
            if not isinstance(size, int):
                places.setdefault(str(size.node.expr), [i, d])
    rows = []
    for number, recording in enumerate(recordings):
        if recording.removed:
            raise Refused(CHANGES_GIVEN)
        for key, value in recording.written.items():
            text = _write_value(value, places)
            if text is None or type(key) is not str:
                raise Refused(CHANGES_GIVEN)
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
