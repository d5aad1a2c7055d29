# SPDX-License-Identifier: Apache-2.0
"""The whole numbers that a block is called with: which of them a trace leaves free, and which of those are sizes.

Nearly every number is a size, or a count that sizes are made of. Where one may be less than 1, strides have
`max(1, size)` in them: a kernel that found its places by those took 238 microseconds, and 35 otherwise (2 x 640
channels at 128x128 laid out anew, H200, torch 2.11, 2026-11). So numbers of 2 and more are traced as sizes. A number
that ends in no size is data, such as a row's index, and 0 and 1 are values of it like others.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..guards.value_digests import table_of
from ..system.process_settings import replaced
from .source_hashes import is_host_code

_SOURCE = re.compile(r"\['ints'\]\[(\d+)\]$")  # what export calls a number, by the parameter's name of Lifted.forward


@dataclass(frozen=True)
class Numbers:
    """Places of whole numbers among a call's. free: may vary. sizes: of the free ones, those that are more than 0."""

    free: frozenset[int] = frozenset()
    sizes: frozenset[int] = frozenset()

    @classmethod
    def all_free(cls, values: Sequence[int]) -> Numbers:
        """Every number is free; those of 2 and more are taken for sizes."""
        return cls(frozenset(range(len(values))), cls.sizes_free(values).sizes)

    @classmethod
    def sizes_free(cls, values: Sequence[int]) -> Numbers:
        """Only the numbers that are taken for sizes are free."""
        sizes = frozenset(i for i, value in enumerate(values) if value > 1)
        return cls(sizes, sizes)

    def told_by(self, program: torch.export.ExportedProgram, nodes: Sequence[Node]) -> Numbers:
        """What the trace shows: a number that a size depends on is a size, one that is only used otherwise is data.

        nodes: the numbers' placeholders.
        """
        in_sizes = _symbols_in_sizes(program)
        free, sizes = set(self.free), set(self.sizes)
        for i in self.free:
            value = nodes[i].meta.get("val")
            symbols = value.node.expr.free_symbols if isinstance(value, torch.SymInt) else set()
            if not symbols:
                continue
            if symbols & in_sizes:
                free -= {i} - sizes
            elif nodes[i].users:
                sizes.discard(i)
        return Numbers(frozenset(free), frozenset(sizes))


@contextmanager
def positive_sizes(numbers: Numbers) -> Iterator[None]:
    """Inside the block numbers that are sizes are more than 0 to torch, and others may be any. 1 is not fixed.

    `conditions_of` has it checked. The caller holds the capture's lock. A block's code that asks `isinstance` is told
    that they are ints, and a number whose text it takes is fixed.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    original, symbols = ShapeEnv.create_unspecified_symbol, set[Any]()

    def create(self: Any, val: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        name = source.name if isinstance(source.name, str) else source.name()
        place = _SOURCE.search(name)
        if type(val) is not int or place is None:
            return original(self, val, source, *args, **kwargs)
        positive = True if int(place[1]) in numbers.sizes else None
        made = self.create_symbol(val, source, *args, **kwargs, positive=positive, do_not_specialize_zero_one=True)
        symbols.update(made.free_symbols)
        return made

    asked = _ints_to_blocks(symbols) if numbers.free else nullcontext()
    with replaced(ShapeEnv, "create_unspecified_symbol", create), asked:
        yield


@contextmanager
def _ints_to_blocks(symbols: set[Any]) -> Iterator[None]:
    """Numbers of these symbols are to a block's code what they are in eager, where code can tell."""
    kind, original = torch.SymInt, torch.SymInt.__repr__

    def is_asked_by_block(number: Any, frame: Any) -> bool:
        expr = getattr(number.node, "_expr", None)
        return expr is not None and not symbols.isdisjoint(expr.free_symbols) and is_host_code(frame.f_code)

    def class_of(self: Any) -> type:
        return int if is_asked_by_block(self, sys._getframe(1)) else kind

    def text_of(self: Any) -> str:
        return repr(int(self)) if is_asked_by_block(self, sys._getframe(1)) else original(self)

    # `isinstance` asks for it where the type is not the one that it is asked for; no assignment puts it there, and the
    # assignments of the other one have the class forget what it remembers of its table
    table_of(kind)["__class__"] = property(class_of)
    with replaced(kind, "__repr__", text_of):
        try:
            yield
        finally:
            del table_of(kind)["__class__"]


def _symbols_in_sizes(program: torch.export.ExportedProgram) -> set[Any]:
    """The symbols that the sizes and strides of a program's tensors depend on."""
    found: set[Any] = set()
    for node in program.graph.nodes:
        value = node.meta.get("val")
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor):
                for size in (*tensor.shape, *(tensor.stride() if tensor.layout is torch.strided else ())):
                    if isinstance(size, torch.SymInt):
                        found |= size.node.expr.free_symbols
    return found
