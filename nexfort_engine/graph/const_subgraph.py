# SPDX-License-Identifier: Apache-2.0
"""The part of a graph that depends on weights alone, taken out of it as a graph of its own.

weights/prepack_entry.py says what becomes of its results.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.multiprocessing.reductions import StorageWeakRef

from .alias_analysis import Aliases

LEAST = 1 << 16  # numbers of a weight: what is computed of smaller ones costs nothing and stays where it is


# operators that stay with those who read what they give: they call code of others, or speak with other processes
_LOOKS = {"nexfort::substitute", "nexfort::collective"}


_COPIES = ("aten::clone", "nexfort::innermost_weight")


_UNSTABLE = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


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
