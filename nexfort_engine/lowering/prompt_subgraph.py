# SPDX-License-Identifier: Apache-2.0
"""What a block makes of a prompt: taken out of its graph as a part of its own, so that it may be computed once.

Keys and values of a prompt are the same in every step of a picture. A prompt is told from an image by structure: as
many tokens as it has, nothing has that a block returns, and what reads it first is of it and of weights alone. That, up
to where it meets the rest, is a graph of its own (`take_out_prompts`), lowered beside the rest. Who knows that a
prompt is the last step's answers for such a part (`answered_by`); otherwise it runs before the rest, as it did, so that
an artefact with such parts is as safe as one without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.multiprocessing.reductions import StorageWeakRef

from ..graph.alias_analysis import Aliases
from ..graph.const_subgraph import LEAST, as_inputs, behind, copied, memories, still_read, values_of
from ..graph.repeated_sequences import is_library
from ..graph.sizes import numbers_of

_FEWEST = 16  # rows of each of the batch at the captured call; a step's time and the like have one


@dataclass(frozen=True)
class Part:
    """A graph of weights and one prompt. takes: which inputs of the whole. of: which of those is the prompt."""

    graph: GraphModule
    takes: list[int]
    of: int


@dataclass(frozen=True)
class PromptSubgraphs:
    """A graph without its parts. keeps: which inputs of the whole it still has; those, and then what the parts give."""

    parts: list[Part]
    keeps: list[int]

    def as_json(self) -> dict[str, Any]:
        """Plain data that says how to call them."""
        return {"keeps": self.keeps, "parts": [{"takes": part.takes, "of": part.of} for part in self.parts]}


def take_out_prompts(module: GraphModule, lasting: Sequence[bool]) -> PromptSubgraphs | None:
    """Take what a graph computes of a prompt and weights alone out of it, if it computes products of one.

    lasting: for each of its weights and what is made of them, which are its first inputs, whether its numbers stay
    while the host says that no weight changed.
    """
    graph, weights = module.graph, len(lasting)
    inputs = list(graph.find_nodes(op="placeholder"))
    if not inputs:
        return None
    own = [node for node, lasts in zip(inputs, lasting, strict=False) if lasts]
    parts, last = list[Part](), inputs[-1]
    for x in inputs[weights:]:
        values = _made_of(graph, own, x)
        results = _results(values, x)
        if not results:
            continue
        wanted = behind(results)
        taken = [place for place, node in enumerate(inputs) if node in wanted]
        parts.append(Part(copied(module, wanted, results), taken, taken.index(inputs.index(x))))
        last = as_inputs(graph, results, values, last, f"of_prompt_{len(parts)}")
    if not parts:
        return None
    # prompts stay: their sizes may be asked for
    return PromptSubgraphs(parts, [*still_read(module, inputs[:weights]), *range(weights, len(inputs))])


def _made_of(graph: torch.fx.Graph, weights: list[Node], x: Node) -> dict[Node, Any]:
    """What is computed of an input and weights alone, if all that is computed of that input first is; else nothing."""
    like = x.meta["val"]
    if not isinstance(like, torch.Tensor) or like.dim() != 3 or not like.is_floating_point():
        return {}
    tokens, given = _symbols(like.shape[1]), graph.find_nodes(op="output")[0].all_input_nodes
    is_returned = any(tokens & _symbols(size) for node in given for size in getattr(node.meta["val"], "shape", ()))
    if not tokens or is_returned or (numbers_of(like.shape[1:2]) or 0) < _FEWEST or Aliases(graph).is_written(x):
        return {}
    values = values_of(graph, [*weights, x])
    memory = StorageWeakRef(values[x].untyped_storage())
    looks = [node for node, value in values.items() if _is_in(memory, value)]  # at the input, itself included
    users = {user for look in looks for user in look.users}
    readers = {user for user in users if not isinstance(user.meta.get("val"), (int, torch.SymInt))}
    return values if values.keys() >= readers else {}


def _symbols(size: Any) -> set[Any]:
    return size.node.expr.free_symbols if isinstance(size, torch.SymInt) else set()


def _is_in(memory: StorageWeakRef, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and StorageWeakRef(value.untyped_storage()) == memory


def _results(values: dict[Node, Any], x: Node) -> list[Node]:
    """Those of the values that the rest uses and that take a product of the input and a large weight."""
    of_x, found = {x}, []
    for node in values:
        if not of_x.isdisjoint(node.all_input_nodes):
            of_x.add(node)
    for node in memories(values):
        wanted = behind([node])
        large = any(values[part].numel() >= LEAST for part in wanted if part.op == "placeholder" and part is not x)
        if large and any(part in of_x and is_library(part) for part in wanted):
            found.append(node)
    return found
