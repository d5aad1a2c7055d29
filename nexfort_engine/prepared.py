# SPDX-License-Identifier: Apache-2.0
"""Prepared weights: what a graph computes of its weights alone, taken out of it, computed once and kept.

A packed or joined weight is the same in every step. Taken out of the graph (`take_out`) it becomes a small graph of
its own, the preparation, whose results are inputs of the rest. The results are kept for as long as the host can say
that no weight changed (`Version`); where it cannot, or there is no room, the preparation runs on every call, which is
what the graph did before. So an artefact with a preparation is as safe as one without: it never sees an old weight.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .parts import places

aten = torch.ops.aten
LEAST = 1 << 16  # numbers of a weight: what is computed of smaller ones costs nothing and stays where it is
_RESERVE = 1 << 31  # bytes of the device that stay free when results are kept
# they give another look at the same numbers
_VIEWS = {
    *(aten.t.default, aten.transpose.int, aten.permute.default, aten.view.default, aten.reshape.default),
    *(aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default, aten.slice.Tensor, aten.select.int),
    *(aten.flatten.using_ints, aten.detach.default, aten.alias.default),
}

Version = Hashable  # what the host says of its weights as a whole: while it is equal, none changed; None: it cannot say
_serials = itertools.count(1)


@dataclass(frozen=True)
class Preparation:
    """A graph that was taken out of another.

    graph: of the weights in `takes`, gives the prepared tensors. takes, keeps: places among the weights of the
    original graph that the preparation reads, and that the rest still does. gives: how many tensors are prepared.
    """

    graph: GraphModule
    takes: list[int]
    keeps: list[int]
    gives: int

    def as_json(self) -> dict[str, Any]:
        """Plain data that says how to call both."""
        return {"takes": self.takes, "keeps": self.keeps, "gives": self.gives}


def take_out(module: GraphModule, weights: int) -> Preparation | None:
    """Take what a graph computes of its first `weights` inputs alone out of it, if there is anything worth it.

    Afterwards its inputs are the weights that it still reads, the prepared tensors, and the rest as before.
    """
    graph = module.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"][:weights]
    known = set(inputs)
    for node in graph.nodes:
        parts = node.all_input_nodes
        if node.op == "call_function" and parts and known.issuperset(parts) and not _changes_something(node):
            known.add(node)
    results = [node for node in graph.nodes if node in known and _is_worth_it(node, known)]
    if not results:
        return None
    taken = _copied(module, inputs, results)
    takes = [i for i, node in enumerate(inputs) if node in _sources(results)]
    metas = _metas(taken, [inputs[i] for i in takes])
    after = inputs[-1]
    for number, (result, meta) in enumerate(zip(results, metas, strict=True)):
        with graph.inserting_after(after):
            place = graph.placeholder(f"prepared_{number}")
        place.meta["val"] = meta
        result.replace_all_uses_with(place)
        after = place
    graph.eliminate_dead_code()
    keeps = [i for i, node in enumerate(inputs) if node.users]
    for i, node in enumerate(inputs):
        if i not in keeps:
            graph.erase_node(node)
    module.recompile()
    return Preparation(taken, takes, keeps, len(results))


def _changes_something(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is None or schema.is_mutable or bool(torch.Tag.nondeterministic_seeded in node.target.tags)  # type: ignore[union-attr]


def _is_worth_it(node: Node, known: set[Node]) -> bool:
    """Whether what depends on the call uses it, and it is more than a look at something and made of a large weight."""
    if node.op == "placeholder" or node.target in _VIEWS:
        return False
    behind = [node]  # itself, and looks at it
    used = False
    for one in behind:
        for user in one.users:
            if user not in known:
                used = True
            elif _only_looks_at(user, one):
                behind.append(user)
    return used and any(_size(source) >= LEAST for source in _sources([node]))


def _only_looks_at(user: Node, one: Node) -> bool:
    return user.target in _VIEWS and user.args[0] is one


def _sources(results: list[Node]) -> set[Node]:
    """The inputs that these are computed of."""
    found, left = set(), list(results)
    seen: set[Node] = set(results)
    while left:
        node = left.pop()
        if node.op == "placeholder":
            found.add(node)
        for part in node.all_input_nodes:
            if part not in seen:
                seen.add(part)
                left.append(part)
    return found


def _size(node: Node) -> int:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else 0


def _copied(module: GraphModule, inputs: list[Node], results: list[Node]) -> GraphModule:
    """A graph of its own that computes the results."""
    sources, graph = _sources(results), Graph()
    there: dict[Node, Node] = {node: graph.node_copy(node) for node in inputs if node in sources}
    wanted, left = set(results), list(results)
    while left:
        for part in left.pop().all_input_nodes:
            if part not in wanted:
                wanted.add(part)
                left.append(part)
    for node in module.graph.nodes:
        if node in wanted and node not in there:
            there[node] = graph.node_copy(node, there.__getitem__)
    graph.output(tuple(there[node] for node in results))
    return GraphModule(module, graph)


def _metas(taken: GraphModule, inputs: list[Node]) -> list[torch.Tensor]:
    """What the preparation gives, without numbers."""
    values = [node.meta["val"] for node in inputs]
    with values[0].fake_mode:
        found = torch.fx.Interpreter(taken).run(*values)
    return list(found)


class PreparingCode:
    """A loaded artefact with its preparation, called like any other: with all of its weights, and then the rest.

    code: the artefact after its preparation. before: the preparation. weights: how many of the inputs are weights.
    """

    def __init__(
        self,
        code: Callable[[list[Any]], Any],
        before: Callable[..., Any],
        weights: int,
        takes: list[int],
        keeps: list[int],
    ) -> None:
        self._code, self._before, self._weights = code, before, weights
        self._takes, self._keeps = _getter(takes), _getter(keeps)

    def __call__(self, inputs: list[Any]) -> Any:
        """As `run`, with the weights prepared for this call alone."""
        return self.run(inputs, self.prepare(inputs))

    def prepare(self, inputs: list[Any]) -> list[torch.Tensor]:
        """The prepared tensors of a call's inputs."""
        return list(self._before(*self._takes(inputs)))

    def run(self, inputs: list[Any], prepared: list[torch.Tensor]) -> Any:
        """The artefact's results, from weights that are prepared already."""
        return self._code([*self._keeps(inputs), *prepared, *inputs[self._weights :]])


def _getter(places: list[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    if len(places) == 1:
        only = places[0]
        return lambda inputs: (inputs[only],)
    return operator.itemgetter(*places) if places else lambda inputs: ()


@dataclass
class Kept:
    """Prepared tensors of one module, and of what they were made. serial: no two have the same."""

    tensors: list[torch.Tensor]
    version: Version
    made_of: list[weakref.ref[Any] | None]
    places: list[Any]
    serial: int = field(default_factory=lambda: next(_serials))

    @classmethod
    def of(cls, tensors: list[torch.Tensor], version: Version, weights: list[torch.Tensor]) -> Kept:
        """weights: as the module holds them, wherever the numbers are."""
        return cls(tensors, version, [weakref.ref(w) if w is not None else None for w in weights], places(weights))

    def holds(self, version: Version, weights: list[torch.Tensor]) -> bool:
        """Whether they are what would be made now."""
        if version is None or version != self.version or len(weights) != len(self.made_of):
            return False
        same = all((ref() if ref else None) is w for ref, w in zip(self.made_of, weights, strict=True))
        return same and places(weights) == self.places

    @property
    def bytes(self) -> int:
        """Of the device."""
        return sum(t.numel() * t.element_size() for t in self.tensors)


def room_for(tensors: list[torch.Tensor]) -> bool:
    """Whether the device has room to keep what was just made on it, and some to spare."""
    device = tensors[0].device
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + max(0, cached) > _RESERVE
