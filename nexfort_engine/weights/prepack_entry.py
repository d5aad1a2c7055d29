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
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher  # for operators made of others on sizes that are symbols
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.multiprocessing.reductions import StorageWeakRef

from ..graph.alias_analysis import Aliases
from .lease import NO_STAND_INS, StandIns
from .subclass_unwrap import places

LEAST = 1 << 16  # numbers of a weight: what is computed of smaller ones costs nothing and stays where it is
_RESERVE = 1 << 31  # bytes of the device that stay free when results are kept
# operators that stay with those who read what they give: they call code of others
_LOOKS = {"nexfort::substitute"}
_COPIES = ("aten::clone", "nexfort::innermost_weight")
_UNSTABLE = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

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


def take_out(
    module: GraphModule, lasting: Sequence[bool], *, larger: bool = True, copies: bool = True, others: bool = True
) -> Preparation | None:
    """Take what a graph computes of its weights alone out of it, if there is anything worth it.

    lasting: for each of the weights, which are its first inputs, whether its numbers stay while the host says that no
    weight changed. larger: also what takes more memory than what it is made of. copies: also copies of weights that lie
    otherwise; others: what is none. Afterwards the graph's inputs are the weights that it still reads, the prepared
    tensors, and the rest as before.
    """
    graph = module.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"][: len(lasting)]
    values = values_of(graph, [node for node, lasts in zip(inputs, lasting, strict=True) if lasts])
    results = _worth_it(values)
    if not larger:
        results = [node for node in results if values[node].nbytes <= sum(values[s].nbytes for s in _sources(node))]
    results = [node for node in results if (copies if _is_copy(node) else others)]
    if not results:
        return None
    wanted = behind(results)
    taken = copied(module, wanted, results)
    takes = [i for i, node in enumerate(inputs) if node in wanted]
    as_inputs(graph, results, values, inputs[-1], "prepared")
    keeps = still_read(module, inputs)
    return Preparation(taken, takes, keeps, len(results))


def as_inputs(graph: Graph, results: list[Node], values: Mapping[Node, Any], after: Node, name: str) -> Node:
    """Have a graph be given what it computed, as inputs of that name behind another; gives the last of them."""
    for number, result in enumerate(results):
        with graph.inserting_after(after):
            after = graph.placeholder(f"{name}_{number}")
        after.meta["val"] = values[result]
        result.replace_all_uses_with(after)
    return after


def still_read(module: GraphModule, weights: list[Node]) -> list[int]:
    """Take what nobody reads any more out of a graph, weights included; gives the places of those that stay."""
    module.graph.eliminate_dead_code(is_impure_node=_may_do_more)
    keeps = [place for place, node in enumerate(weights) if node.users]
    for place in set(range(len(weights))) - set(keeps):
        module.graph.erase_node(weights[place])
    module.recompile()
    return keeps


def values_of(graph: Graph, weights: list[Node]) -> dict[Node, Any]:
    """What is computed of these weights alone, themselves included, as values without numbers that share memory.

    What somebody writes to is not among them, nor what the caller gets, who may: the results are kept, and there is
    nothing to tell by that they changed.
    """
    aliases = Aliases(graph)
    values: dict[Node, Any] = {node: node.meta["val"] for node in weights}
    with values[weights[0]].fake_mode if weights else nullcontext(), enable_python_dispatcher():
        for node in graph.nodes:
            parts = node.all_input_nodes
            if node.op != "call_function" or not parts or not values.keys() >= set(parts):
                continue
            if _is_pure(node) and not aliases.is_written(node) and not aliases.is_given(node):
                args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return values


def _is_pure(node: Node) -> bool:
    """Whether a call gives the same tensors for the same tensors, and does nothing else."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return node.target is operator.getitem
    return not schema.is_mutable and schema.name not in _LOOKS and not _UNSTABLE & set(node.target.tags)  # type: ignore[union-attr]


def _is_copy(node: Node) -> bool:
    """Whether a value is a weight that lies otherwise, and nothing else."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.name in _COPIES and node.all_input_nodes[0].op == "placeholder"


def _may_do_more(node: Node) -> bool:
    """Whether a call stays whose result nobody uses: torch says no of a graph within the graph, which may write."""
    return node.is_impure() or isinstance(node.target, torch._ops.HigherOrderOperator)


def _worth_it(values: Mapping[Node, Any]) -> list[Node]:
    """Those of the values that are made of a large weight, more than a look at something, and used by the rest."""
    return [node for node in memories(values) if any(values[source].numel() >= LEAST for source in _sources(node))]


def memories(values: Mapping[Node, Any]) -> list[Node]:
    """Those of the values that the rest uses: the first in each piece of memory, the others are looks at it."""
    first: dict[Any, Node] = {}
    used: set[Any] = set()
    for node, value in values.items():
        if isinstance(value, torch.Tensor):
            memory = StorageWeakRef(value.untyped_storage())
            first.setdefault(memory, node)
            if not values.keys() >= node.users.keys():
                used.add(memory)
    return [node for memory, node in first.items() if memory in used and node.op != "placeholder"]


def _sources(node: Node) -> list[Node]:
    """The inputs that a value is made of."""
    return [part for part in behind([node]) if part.op == "placeholder"]


def behind(results: list[Node]) -> set[Node]:
    """What these are computed of, from the inputs on, themselves included."""
    found, left = set(results), list(results)
    while left:
        for part in left.pop().all_input_nodes:
            if part not in found:
                found.add(part)
                left.append(part)
    return found


def copied(module: GraphModule, wanted: set[Node], results: list[Node]) -> GraphModule:
    """A graph of its own that computes the results. wanted: them and all that they are computed of."""
    graph, there = Graph(), dict[Node, Node]()
    for node in module.graph.nodes:
        if node in wanted:
            there[node] = graph.node_copy(node, there.__getitem__)
    graph.output(tuple(there[node] for node in results))
    return GraphModule(module, graph)


class PreparingCode:
    """A loaded artefact with its preparation, called like any other: with all of its weights, and then the rest.

    code: the artefact after its preparation. before: the preparation. weights: how many of the inputs are weights.
    takes, keeps: which of them each reads.
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
        self._takes, self._keeps = getter(takes), getter(keeps)
        self.takes, self.keeps = takes, keeps

    def __call__(self, inputs: list[Any]) -> Any:
        """As `run`, with the weights prepared for this call alone."""
        return self.run(inputs, self.prepare(inputs))

    def prepare(self, inputs: list[Any]) -> list[torch.Tensor]:
        """The prepared tensors of a call's inputs."""
        return list(self._before(*self._takes(inputs)))

    def run(self, inputs: list[Any], prepared: list[torch.Tensor]) -> Any:
        """The artefact's results, from weights that are prepared already."""
        return self._code([*self._keeps(inputs), *prepared, *inputs[self._weights :]])


def getter(places: list[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """What takes these places of a list."""
    if len(places) == 1:
        only = places[0]
        return lambda inputs: (inputs[only],)
    return operator.itemgetter(*places) if places else lambda inputs: ()


@dataclass
class Kept:
    """Prepared tensors of one module, and of what they were made. serial: no two have the same.

    stand_ins: for weights that the host lends, and need not lend again while these are kept. at: places of the weights
    that these are made of or stand for; None for all.
    """

    tensors: list[torch.Tensor]
    version: Version
    made_of: list[weakref.ref[Any] | None]
    places: list[Any]
    stand_ins: StandIns
    at: list[int] | None = None
    serial: int = field(default_factory=lambda: next(_serials))

    @classmethod
    def of(
        cls,
        tensors: list[torch.Tensor],
        version: Version,
        weights: list[torch.Tensor],
        stand_ins: StandIns = NO_STAND_INS,
        at: list[int] | None = None,
    ) -> Kept:
        """weights: as the module holds them, wherever the numbers are."""
        weights = _at(weights, at)
        made_of: list[Any] = [weakref.ref(w) if w is not None else None for w in weights]
        return cls(tensors, version, made_of, places(weights), stand_ins, at)

    def moved(self, weights: list[torch.Tensor]) -> None:
        """The weights, as the module holds them, lie elsewhere now and are the same."""
        self.places = places(_at(weights, self.at))

    def holds(self, version: Version, weights: list[torch.Tensor]) -> bool:
        """Whether they are what would be made now."""
        weights = _at(weights, self.at)
        if version is None or version != self.version or len(weights) != len(self.made_of):
            return False
        same = all((ref() if ref else None) is w for ref, w in zip(self.made_of, weights, strict=True))
        return same and places(weights) == self.places


def _at(weights: list[torch.Tensor], at: list[int] | None) -> list[torch.Tensor]:
    return weights if at is None else [weights[i] for i in at]


def room_for(tensors: list[torch.Tensor], more: Callable[[torch.device], int]) -> bool:
    """Whether the device has room to keep what was just made on it, and some to spare.

    more: bytes of it that others would give up at once, besides what is free; asked only if those do not suffice.
    """
    device = tensors[0].device
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    left = free + max(0, cached)
    return left > _RESERVE or left + more(device) > _RESERVE
