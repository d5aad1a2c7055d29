# SPDX-License-Identifier: Apache-2.0
"""The inputs of an exported graph by what they stand for: weights, literal tensors, the call's tensors and numbers.

Export gives one placeholder to everything that it was called with, used or not, and puts the literal tensors of the
code before them. Here the unused go, and the rest comes into the order that an artefact is called in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from ..guards.option_recorder import Refused
from .side_effects import written_inputs

_MAX_CONSTANT = 1 << 16  # elements; a larger tensor from outside the block is data that may change


@dataclass
class Placeholders:
    """Placeholder nodes in the order of the call; `constants` with their values.

    written: those that the graph changes, and whether it does so by strides (side_effects.written_inputs).
    """

    constants: list[tuple[Node, torch.Tensor]]
    weights: list[Node]
    tensors: list[Node]
    options: list[Node]
    ints: list[Node]
    strengths: list[Node]
    written: dict[Node, bool]

    @classmethod
    def of(
        cls, program: torch.export.ExportedProgram, weights: int, tensors: int, options: int, ints: int
    ) -> Placeholders:
        """Those of a program that was given so many weights, tensors, option tensors and numbers, and then strengths.

        Raises Refused for a large literal tensor, and for code that changes its own weights.
        """
        graph = program.graph_module
        nodes = [n for n in graph.graph.nodes if n.op == "placeholder"]
        constants = _constants(program, nodes)
        given = iter(nodes[len(constants) :])
        a, b, c, d = ([next(given) for _ in range(count)] for count in (weights, tensors, options, ints))
        found = cls(constants, a, b, c, d, list(given), written_inputs(graph))
        if any(node in found.written for node in found.weights):
            raise Refused("it changes its own weights or buffers")
        if any(node in found.written for node, _ in constants):
            raise Refused("it changes a tensor that it reaches by name, and compiled code would change a copy")
        return found

    def used(self, nodes: list[Node]) -> list[int]:
        """The indices of those among `nodes` that the graph reads or changes."""
        return [i for i, node in enumerate(nodes) if node.users or node in self.written]

    def tidy(self, graph: GraphModule, keep: Sequence[Node] = ()) -> None:
        """Take out the unused ones; weights come first, constants after them, the rest follows in the call's order.

        keep: those that stay all the same.
        """
        for nodes in (self.weights, self.tensors, self.options, self.ints, self.strengths):
            used = self.used(nodes)
            for i, node in enumerate(nodes):
                if i not in used and node not in keep:
                    graph.graph.erase_node(node)
        leading = [self.weights[i] for i in self.used(self.weights)] + [node for node, _ in self.constants]
        first = next((n for n in graph.graph.nodes if n.op == "placeholder"), None)
        for node in reversed(leading):
            if node is not first:
                first.prepend(node)  # type: ignore[union-attr]
                first = node
        graph.recompile()


def _constants(program: torch.export.ExportedProgram, nodes: list[Node]) -> list[tuple[Node, torch.Tensor]]:
    """Literal tensors of the code (`torch.tensor(0.5)`), which export lifts to leading inputs."""
    names = program.graph_signature.inputs_to_lifted_tensor_constants
    found = []
    for node in nodes:
        if node.name in names:
            value = program.constants[names[node.name]]
            if value.numel() > _MAX_CONSTANT:
                raise Refused(f"it uses a tensor of {value.numel()} elements that is neither weight nor argument")
            found.append((node, value.detach()))
    return found
