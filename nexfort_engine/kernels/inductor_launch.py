# SPDX-License-Identifier: Apache-2.0
"""Calls of kernels in what Inductor writes."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import sympy
import torch

from ..system.process_settings import replaced
from .layouts import back

PROGRAMS = (2**31 - 1, 2**16 - 1, 2**16 - 1)  # of a launch at most, in each of its dimensions
_GLUON = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma
"""


def empty(like: Any, sizes: Sequence[Any], dtype: torch.dtype = torch.float32) -> Any:
    """A contiguous tensor with nothing in it, where `like` is, in Inductor's representation."""
    from torch._inductor.lowering import empty_strided

    return empty_strided(sizes, None, dtype=dtype, device=like.get_device())


def empty_result(q: Any, order: Sequence[int]) -> tuple[Any, Any]:
    """Memory for what attention gives for queries (B, H, L, E), and that as such a tensor, which lies in `order`."""
    from torch._inductor.lowering import permute

    made = empty(q, [q.get_size()[i] for i in order], q.get_dtype())
    return made, permute(made, back(order))


@dataclass(frozen=True)
class Forms:
    """A kernel in Gluon in several forms, of which each call takes one by its sizes, or calls something else.

    rule: a function of `sizes` that gives a key of `constants`, or anything else; its text stands in the artefact, so
    it uses nothing from outside. constants: of each form. otherwise: a line of code in which {name} stands for the
    kernel's argument of that name, or one of `given`. unless: a condition, written so too, under which no form is
    taken.
    """

    rule: Callable[..., int]
    sizes: tuple[Any, ...]
    constants: Mapping[int, Mapping[str, int]]
    otherwise: str
    unless: str = "False"
    given: Mapping[str, Any] = field(default_factory=dict)


def launch(
    kernel: Any,
    grid: Sequence[Any],
    written: Sequence[str],
    arguments: dict[str, Any],
    gluon: Any = None,
    forms: Forms | None = None,
) -> None:
    """Have a kernel called that writes to the arguments of these names alone.

    gluon: one in Gluon to be called in its place, with the same arguments. Where it has descriptors written, its last
    argument but for constants is `scratch`, which has room for them. forms: of it; the constants of one are among the
    arguments.
    """
    from torch._higher_order_ops import triton_kernel_wrap
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
    from torch._inductor import ir

    unknown = set(written) - (arguments.keys() & set(kernel.arg_names))
    assert not unknown, f"{kernel} has no arguments {sorted(unknown)}, which it is said to write to"
    _note_limits(grid, arguments)
    made: Callable[..., Any] = ir.UserDefinedTritonKernel if gluon is None else _gluon_kernel()
    # torch 2.14 and newer have to be told which arguments are for the launch alone
    more = {"launch_kwargs": ()} if "launch_kwargs" in inspect.signature(made).parameters else {}
    number = kernel_side_table.add_kernel(kernel)
    # Inductor would compile the kernel halfway, an eighth of the time that a block of convolutions takes. On torch 2.14
    # and newer it does: the function has another name and says more.
    known: AbstractContextManager[None] = nullcontext()
    if hasattr(triton_kernel_wrap, "identify_mutated_tensors"):
        known = replaced(triton_kernel_wrap, "identify_mutated_tensors", _said(kernel, written))
    with known:
        called = made(kernel_idx=number, grid=[tuple(grid)], tma_descriptor_metadata={}, kernel_args=arguments, **more)
    if gluon is not None:
        called.kernel_idx, called.forms = kernel_side_table.add_kernel(gluon), forms


def _note_limits(grid: Sequence[Any], arguments: dict[str, Any]) -> None:
    """Have it noted (assumptions.Limits) that what a kernel counts fits: the numbers of a tensor, and its programs.

    What does not fit at the captured call is counted in 64 bits, and has no limit. What a kernel reads may not be in
    memory yet, such as a weight that is cast for it.
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    known = V.graph.sizevars
    read = [ir.ExternKernel.realize_input(value) for value in arguments.values() if isinstance(value, ir.IRNode)]
    tensors = [value.get_layout().storage_size() for value in read]
    for count, most in (*zip(grid, PROGRAMS, strict=True), *((numbers, PROGRAMS[0]) for numbers in tensors)):
        if known.optimization_hint(count, fallback=most + 1) <= most:
            known.check_leq(count, most)


def _said(kernel: Any, written: Sequence[str]) -> Callable[..., list[str]]:
    """What says to Inductor which of its arguments a kernel writes to, in their order."""
    return lambda *_: [name for name in kernel.arg_names if name in written]


@functools.cache
def _gluon_kernel() -> Any:
    from torch._inductor import ir
    from torch._inductor.codegen.wrapper import WrapperLine

    from . import gluon_autotuner

    written: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()  # rules, by the code that they stand in

    class GluonKernel(ir.UserDefinedTritonKernel):
        """A call of a kernel in Gluon, written as Inductor writes those in Triton's language."""

        forms: Forms | None = None

        def codegen(self, wrapper: Any) -> None:
            define = wrapper.define_kernel

            def as_gluon(name: str, text: str, *rest: Any, **named: Any) -> Any:
                return define(name, _as_gluon(text, inspect.getsource(gluon_autotuner)), *rest, **named)

            wrapper.define_kernel = as_gluon
            try:
                if self.forms is None:
                    super().codegen(wrapper)
                else:
                    self._in_forms(wrapper, self.forms)
            finally:
                del wrapper.define_kernel

        def _in_forms(self, wrapper: Any, forms: Forms) -> None:
            def text(value: Any) -> str:
                if isinstance(value, ir.IRNode):
                    return value.codegen_reference()
                return f"({wrapper.codegen_python_sizevar(value)})" if isinstance(value, sympy.Expr) else repr(value)

            names = {name: text(value) for name, value in {**self.kwargs, **forms.given}.items()}
            rule = inspect.getsource(forms.rule)
            if rule not in written.setdefault(wrapper, set()):
                written[wrapper].add(rule)
                wrapper.imports.splice(rule)  # `add_import_once` would have it in what tunes kernels, too
            sizes = ", ".join(map(text, forms.sizes))
            unless = forms.unless.format(**names)
            wrapper.writeline(f"form = None if {unless} else {forms.rule.__name__}({sizes})")
            for number, (form, constants) in enumerate(forms.constants.items()):
                wrapper.writeline(f"{'elif' if number else 'if'} form == {form!r}:")
                wrapper.writeline(Indent(1))
                self.kwargs.update(constants)
                super().codegen(wrapper)
                wrapper.writeline(Indent(-1))
            wrapper.writeline("else:")
            wrapper.writeline(Indent(1))
            wrapper.writeline(forms.otherwise.format(**names))
            wrapper.writeline(Indent(-1))

    class Indent(WrapperLine):
        """Lines behind it stand further right, or left."""

        def __init__(self, by: int) -> None:
            self.by = by

        def codegen(self, code: Any) -> None:
            code.do_indent(self.by)

    return GluonKernel


def _as_gluon(text: str, compiling: str) -> str:
    """What Inductor writes for a kernel in Triton's language, for one in Gluon. compiling: the text of gluon_autotuner.

    The kernel is compiled when its text is read, so behind all that it uses.
    """
    found = re.fullmatch(
        r"(?P<call>.*?\'\'\')(?P<imports>.*?)@triton_heuristics\.user_autotune\((?P<how>.*?)\n\)\n"
        r"(?P<kernels>@triton\.jit\ndef (?P<name>\w+)\(.*)(?P<end>\'\'\'.*?)",
        text,
        re.DOTALL,
    )
    if found is None:
        raise RuntimeError(f"torch {torch.__version__} wrote a kernel in a way that is unknown here: {text[:1000]}")
    # Inductor numbers those of a graph; without it the text is the same wherever the kernel is called
    name = re.sub(r"_\d+$", "", found["name"])
    kernels = found["kernels"].replace("@triton.jit", "@gluon.jit").replace(f"def {found['name']}(", f"def {name}(")
    compiled = f"\n{found['name']} = gluon_autotune({found['how']}\n)({name})\n"
    return found["call"] + found["imports"] + compiling + _GLUON + kernels + compiled + found["end"]
