# SPDX-License-Identifier: Apache-2.0
"""Metadata: what AOTAutograd's trace found out about each node is not computed again by Inductor.

Inductor runs a graph with fake tensors once more after its joint passes, in case these left a node without metadata or
with other metadata. With symbolic sizes that takes an eighth of lowering. Here only the nodes that the passes made or
changed are run, and all that depend on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from ..system.process_settings import replaced

_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)  # Inductor writes the second for the first


class _Traced:
    """The nodes of a graph as they left the trace: target, arguments and metadata of each."""

    def __init__(self, graph: fx.Graph) -> None:
        self._rows = {node: (node.target, node.args, node.kwargs, node.meta.get("val")) for node in graph.nodes}

    def noted(self, node: fx.Node) -> bool:
        """Whether a node has the metadata that the trace gave it."""
        return (row := self._rows.get(node)) is not None and row[-1] is node.meta.get("val")

    def unchanged(self, node: fx.Node) -> bool:
        """Whether a node that was noted calls the same. Nothing is said of what it depends on."""
        target, args, kwargs, _ = self._rows[node]
        alike = target is node.target or (target in _VIEWS and node.target in _VIEWS)
        return alike and args == node.args and kwargs == node.kwargs


class _Propagation(FakeTensorProp):
    """A run of a graph that takes the metadata of each node that is as the trace left it, and so is all before it.

    A node whose result is what the trace noted keeps the trace's, though its arguments are others: what passes remove
    most are slices of a whole and views of the same sizes.
    """

    def __init__(self, module: fx.GraphModule, mode: Any, traced: _Traced, inputs: Sequence[Any]) -> None:
        super().__init__(module, mode)
        nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
        self._traced, self._of, self.computed = traced, mode, 0
        self._kept = {
            node
            for node, given in zip(nodes, inputs, strict=True)
            if all(_of_mode(one, mode) for one in (node.meta.get("val"), given)) and _same(node.meta["val"], given)
        }

    def run_node(self, n: fx.Node) -> Any:
        """The metadata of a node; see FakeTensorProp."""
        if n.op != "call_function":
            return super().run_node(n)
        before, known = n.meta.get("val"), self._traced.noted(n) and _complete(n, self._of)
        if known and self._kept.issuperset(n.all_input_nodes) and self._traced.unchanged(n):
            self._kept.add(n)
            return before
        self.computed += 1
        result = super().run_node(n)
        if known and _same(before, n.meta.get("val")) and _alias(before, n) == _alias(n.meta["val"], n):
            n.meta["val"] = before
            self._kept.add(n)
            return before
        return result


def _alias(value: Any, node: fx.Node) -> list[list[bool]]:
    """For each tensor of a node's results, which of its inputs it shares its memory with."""
    values = value if isinstance(value, (list, tuple)) else [value]
    inputs = [one.meta.get("val") for one in node.all_input_nodes]
    return [[_one_memory(one, other) for other in inputs] for one in values]


def _one_memory(one: Any, other: Any) -> bool:
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return False
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _same(noted: Any, given: Any) -> bool:
    """Whether metadata says the same as other metadata, by the expressions of sizes: nothing is asked of a symbol."""
    if isinstance(given, (list, tuple)):
        return isinstance(noted, (list, tuple)) and len(noted) == len(given) and all(map(_same, noted, given))
    if isinstance(given, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return type(noted) is type(given) and noted.node.expr == given.node.expr
    if not isinstance(given, torch.Tensor):
        return type(noted) is type(given) and noted == given
    if not isinstance(noted, torch.Tensor) or given.layout != torch.strided:
        return False
    if (noted.dtype, noted.device, noted.layout) != (given.dtype, given.device, given.layout):
        return False
    return _numbers(noted) == _numbers(given)


def _numbers(tensor: torch.Tensor) -> list[Any]:
    """Sizes, strides and offset."""
    numbers = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    return [number.node.expr if isinstance(number, torch.SymInt) else number for number in numbers]


def _complete(node: fx.Node, mode: Any) -> bool:
    """Whether all that running a node leaves behind is in its metadata."""
    if node.meta.get("unbacked_bindings") or not _plain(node.target):
        return False
    values = node.meta.get("val")
    values = values if isinstance(values, (list, tuple)) else (values,)
    return all(_of_mode(value, mode) for value in values)


def _plain(target: Any) -> bool:
    """Whether it is an operator that changes none of its arguments, or Python's or torch's function of sizes."""
    if isinstance(target, torch._ops.OpOverload):
        return not target._schema.is_mutable
    return getattr(target, "__module__", None) in ("_operator", "math", "torch")


def _of_mode(value: Any, mode: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return getattr(value, "fake_mode", None) is mode
    return isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


@contextmanager
def kept() -> Iterator[None]:
    """Inside, Inductor runs only those nodes of a graph with fake tensors that its joint passes made or changed.

    In the scope of `inductor_scope`. A torch whose Inductor has other functions runs all of them.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._guards import detect_fake_mode
    from torch._inductor import compile_fx

    passes, whole = (getattr(compile_fx, name, None) for name in ("joint_graph_passes", "fake_tensor_prop"))
    if passes is None or whole is None:
        yield
        return
    traced: list[tuple[fx.GraphModule, _Traced]] = []

    def noted_before(graph: fx.GraphModule, *more: Any, **named: Any) -> fx.GraphModule:
        traced.append((graph, _Traced(graph.graph)))
        return passes(graph, *more, **named)

    def changed_alone(graph: fx.GraphModule, inputs: Sequence[Any], *more: Any, **named: Any) -> Any:
        before = next((one for of, one in traced if of is graph), None)
        mode = detect_fake_mode(inputs)
        if before is None or mode is None or more or named:
            return whole(graph, inputs, *more, **named)
        with enable_python_dispatcher():
            _Propagation(graph, mode, before, inputs).propagate_dont_convert_inputs(*inputs)
        return mode

    with ExitStack() as stack:
        stack.enter_context(replaced(compile_fx, "joint_graph_passes", noted_before))
        stack.enter_context(replaced(compile_fx, "fake_tensor_prop", changed_alone))
        yield
