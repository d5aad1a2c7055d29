# SPDX-License-Identifier: Apache-2.0
"""What a capture took for granted about sizes: what the block's code asked, what torch decided, as Conditions.

Torch takes for granted that a size which may vary is at least 2, so `if x.shape[0] == 1` is answered by that alone, and
nothing is left to check when a call of batch 1 comes. Here every answer given to the block's own code is noted; it is
among the conditions of the artefact. Answers given to torch's own code choose between equal results and are not.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node
from torch.overrides import TorchFunctionMode

from ..guards.option_recorder import Refused
from ..guards.shape_guards import Conditions, Dim
from ..system.process_settings import replaced
from .operator_sizes import chosen_for_two, taken_for_granted
from .whole_numbers import Numbers

_TORCH = os.path.join(Path(torch.__file__).parent, "")  # with a separator: torchvision is another package
# the way from a comparison in the block's code to the shape environment
_BETWEEN = (
    *(_TORCH + os.path.join(*place) for place in (("__init__.py",), ("fx", "experimental", ""), ("_utils",))),
    _TORCH + os.path.join("utils", "_stats.py"),
    _TORCH + os.path.join("_export", "non_strict_utils.py"),  # export exchanges `max` and `min` for its own functions
)
# Python of torch's that is written as a block's own code is: what it asks chooses results, or raises
_FOR_BLOCKS = (_TORCH + os.path.join("nn", ""), _TORCH + "functional.py")
_SYMBOLS = _TORCH + os.path.join("fx", "experimental", "")
_SLICES = _TORCH + os.path.join("_subclasses", "fake_impls.py")
_WHOLE = {int, torch.SymInt}
_NUMBERS = {*_WHOLE, float, torch.SymFloat}
_PLACES = ("slice_forward", "_compute_slice_index", "meta_select")


@contextlib.contextmanager
def noted(scales: bool = True) -> Iterator[list[tuple[Any, Any, Any]]]:
    """Note (shape environment, expression, answer) for each question of code outside torch inside the block.

    scales: whether the greatest of numbers that are not whole may be an expression; otherwise it is asked for.
    Replaces a method and a function of torch's for the length of the block; the caller holds the capture's lock.
    """
    import torch._export.non_strict_utils as export
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    original, choose = ShapeEnv.evaluate_expr, getattr(export, "_tensor_min_max", None)
    answers: list[tuple[Any, Any, Any]] = []

    def evaluate_expr(self: Any, expr: Any, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, expr, *args, **kwargs)
        if asked_by_block(sys._getframe(1)) or asked_in_earnest(sys._getframe(1)):
            answers.append((self, expr, answer))
        return answer

    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(ShapeEnv, "evaluate_expr", evaluate_expr))
        if choose is not None:
            stack.enter_context(replaced(export, "_tensor_min_max", _unasked(choose, scales, answers)))
        yield answers


def _unasked(choose: Callable[..., Any], scales: bool, noted: list[tuple[Any, Any, Any]]) -> Callable[..., Any]:
    """`max` and `min` as export has them, that give an expression for any count of sizes, or of quotients of them.

    Export's do so for two whole numbers and else ask which is greater, which would be a condition: diffusers compares
    the greater of two scales with a limit, and an artefact would serve wide pictures or tall ones.
    """

    def chosen(*args: Any, real_callable: Any, tensor_callable: Any, **kwargs: Any) -> Any:
        several = args
        if len(args) == 1 and isinstance(args[0], Iterable) and not isinstance(args[0], torch.Tensor):
            several = tuple(args[0])  # it may be a generator, which is walked over once
            args = (several,)
        kinds = {type(v) for v in several}
        if kwargs or not kinds & {torch.SymInt, torch.SymFloat} or not kinds <= _NUMBERS:
            return choose(*args, real_callable=real_callable, tensor_callable=tensor_callable, **kwargs)
        if kinds <= _WHOLE or (scales and not kinds & _WHOLE):
            found = functools.reduce(torch.sym_max if tensor_callable is torch.maximum else torch.sym_min, several)
            if isinstance(found, torch.SymInt):
                noted.append((found.node.shape_env, found.node.expr, None))  # for `chosen_for_two`
            return found
        return real_callable(*args)

    return chosen


def computes_with_chosen_scale(program: torch.export.ExportedProgram) -> bool:
    """Whether the greatest or least of numbers that are not whole goes into a result: Inductor rounds those down."""
    from torch.utils._sympy.functions import Max, Min

    for node in program.graph.nodes:
        for given in node.all_input_nodes if isinstance(node.meta.get("val"), torch.Tensor) else ():
            value = given.meta.get("val")
            if isinstance(value, (torch.SymInt, torch.SymFloat)):
                for chosen in value.node.expr.atoms(Max, Min):
                    if not all(arg.is_integer for arg in chosen.args):
                        return True
    return False


class SizesKeptFree(TorchFunctionMode):
    """Inside a trace, calls torch without arguments that would fix a size and say nothing new.

    `repeat_interleave(..., output_size=n)` with a plain number of repeats compares n as a plain int, which turns the
    batch into a constant; diffusers repeats attention masks so.

    parameters: those that such calls were given. A block's own are inputs of the trace, so these are of other modules.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parameters: list[torch.nn.Parameter] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        for given in (*args, *kwargs.values()):
            several = given if isinstance(given, (list, tuple)) else (given,)
            self.parameters += [one for one in several if isinstance(one, torch.nn.Parameter)]
        repeats = func in (torch.repeat_interleave, torch.Tensor.repeat_interleave)
        if repeats and len(args) > 1 and isinstance(args[1], (int, torch.SymInt)):
            kwargs.pop("output_size", None)
        return func(*args, **kwargs)


def asked_by_block(frame: Any) -> bool:
    """Whether a block's code or torch's layers asked: they do so through a magic method of SymInt, SymBool or SymFloat.

    Kernels ask too, straight from C++, so that no frame of torch lies between: whether a tensor is contiguous, say.
    """
    through_python = False
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        through_python |= frame.f_code.co_filename == _BETWEEN[0]
        frame = frame.f_back
    if not through_python or frame is None:
        return False
    file = frame.f_code.co_filename
    return not file.startswith(_TORCH) or file.startswith(_FOR_BLOCKS)


def asked_in_earnest(frame: Any) -> bool:
    """Whether torch asked what changes the result: eager would raise, or a slice would be cut off at the end."""
    while frame is not None and frame.f_code.co_filename.startswith(_SYMBOLS):
        if frame.f_code.co_name == "expect_true":
            return True
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == _SLICES and frame.f_code.co_name.endswith(_PLACES)


def relations(env: Any, answers: list[tuple[Any, Any, Any]]) -> list[Any]:
    """The noted answers of one shape environment as relations that held at capture.

    What a tensor will hold is not known then: no to both sides means that the graph is for either, and checks itself.
    """
    import sympy
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    found = []
    for asked, expr, answer in answers:
        if asked is env and answer in (True, False, sympy.true, sympy.false):
            relation = env.replace(expr if answer else sympy.Not(expr))
            if not free_unbacked_symbols(relation):
                found.append(relation)
    return found


def settle(program: torch.export.ExportedProgram) -> None:
    """Make sizes numbers that an equality of the trace gives once others say what its terms are.

    Torch does so where an equality says it by itself. A table of six rows that is added to `t.reshape(batch, 6, -1)`
    says that a sixth of t's width is 1152, and reshaping that nothing is left over; kernels would find the rows at a
    sixth of a size, one number at a time.
    """
    env = _shape_env(program)
    # the environment is frozen after a trace, and says so, yet what is asked of a symbol alone replaces it (torch 2.11)
    asked: set[Any] = set()
    while env is not None and (told := [expr for expr in _told(env) if expr not in asked]):
        asked.update(told)
        for expr in told:
            env.evaluate_expr(expr)


def _told(env: Any) -> list[Any]:
    """Symbol == number, for symbols that are none yet."""
    import sympy
    from torch.utils._sympy.functions import FloorDiv, Mod

    equalities = _equalities(env)
    known = {expr.lhs: expr.rhs for expr in equalities if expr.rhs.is_Integer and not expr.lhs.is_Symbol}
    # torch 2.14 and newer ask whether something is left over, where older ones ask whether t is 6 times its sixth
    whole = {of.args: n for of, n in known.items() if isinstance(of, FloorDiv) and known.get(Mod(*of.args)) == 0}
    found = [sympy.Eq(size, by * n) for (size, by), n in whole.items()]
    found += [expr.subs(known) for expr in equalities if expr.has(*known)] if known else []
    return [expr for expr in found if isinstance(expr, sympy.Eq) and expr.lhs.is_Symbol and expr.rhs.is_Integer]


def conditions_of(
    program: torch.export.ExportedProgram,
    tensors: list[Node],
    ints: list[Node],
    answers: list[tuple[Any, Any, Any]],
    numbers: Numbers,
) -> Conditions:
    """What must hold for a call with these tensors and numbers; `answers` are what `noted` gave.

    Raises Refused where a size cannot be derived from those of the inputs.
    """
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    shapes = [[_dim_text(s) for s in node.meta["val"].shape] for node in tensors]
    values: list[Dim] = []
    for node in ints:
        value = node.meta["val"]
        values.append(value if isinstance(value, int) else _dim_text(value))
    data = {values[i] for i in numbers.free - numbers.sizes}
    env = _shape_env(program)
    ranges: dict[str, list[int | None]] = {}
    guards: list[str] = []
    if env is not None:
        for symbol, bound in program.range_constraints.items():
            if free_unbacked_symbols(symbol):
                continue  # what a tensor will hold
            high = int(bound.upper) if getattr(bound.upper, "is_Integer", False) and bound.upper < 2**62 else None
            least = _asked_least(bound) if str(symbol) in data else _least(env, symbol, bound)
            ranges[str(symbol)] = [least, high]
        asked = [expr for one, expr, _ in answers if one is env]
        taken = taken_for_granted(program, env) + chosen_for_two(program, env, asked)
        guards = _guards(env, relations(env, answers) + taken)
    conditions = Conditions(shapes, values, ranges, guards)
    if conditions.unbound():
        raise Refused(f"the sizes of its inputs depend on each other in a way that cannot be checked: {shapes}")
    return conditions


def check(conditions: Conditions, shapes: list[torch.Size], ints: list[int]) -> None:
    """The call that was captured must fit its own conditions. Raises Refused where they cannot be evaluated."""
    try:
        reason = conditions.broken(shapes, ints)
    except (ValueError, ArithmeticError) as error:
        reason = str(error)
    if reason:
        raise Refused(f"the sizes it was captured at do not fit what the capture took for granted: {reason}")


def _shape_env(program: torch.export.ExportedProgram) -> Any:
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, torch.Tensor) and hasattr(value, "fake_mode"):
            return value.fake_mode.shape_env
    return None


def _guards(env: Any, answers: list[Any]) -> list[str]:
    """The relations that must hold: every one that the block's own code branched on, and equalities of torch's.

    Torch's own inequalities (is this dimension 1, is that stride larger) choose between equal results and are stricter
    than the lowered code: many a family would be refused at batch 1 for nothing.
    """
    import sympy

    found: dict[str, None] = {}
    for expr in (*_equalities(env), *answers):
        if not (expr in (True, sympy.true) or getattr(expr, "is_number", False)):
            found[_print(expr)] = None
    return list(found)


def _equalities(env: Any) -> list[Any]:
    """Those among the relations that torch asked for."""
    import sympy

    return [expr for guard in env.guards if isinstance(expr := env.replace(guard.expr), sympy.Eq)]


def _asked_least(bound: Any) -> int | None:
    """The least value of a number that is no size: what the code asked for alone."""
    return int(bound.lower) if getattr(bound.lower, "is_Integer", False) and bound.lower > -(2**62) else None


def _least(env: Any, symbol: Any, bound: Any) -> int:
    """The least value of a symbol that something asked for, and 1 at least: eager takes other kernels for nothing.

    Torch takes every size for 2 at least, and follows that up: a product of two such sizes would be 4 at least. Only
    what was said of the symbol alone counts.
    """
    import sympy

    least = int(bound.lower) if bound.lower.is_number else 0
    exprs = [env.replace(guard.expr) for guard in env.guards]
    alone = [expr for expr in exprs if getattr(expr, "free_symbols", None) == {symbol}]
    while least > 2 and all(expr.subs(symbol, least - 1) != sympy.false for expr in alone):
        least -= 1
    return least if least > 2 else 1


def _dim_text(size: Any) -> Dim:
    if isinstance(size, int):
        return size
    expr = size.node.expr
    return int(expr) if expr.is_number else _print(expr)


def _print(expr: Any) -> str:
    from torch.utils._sympy.printers import PythonPrinter

    return PythonPrinter().doprint(expr)


_COUNTED = (2**31 - 1, 2**16 - 1)  # by 32 bits, and by a launch of a kernel in its later dimensions


class _Since:
    """The guards that a graph's shape environment gets from here on. inputs: the graph's, as values without numbers."""

    def __init__(self, inputs: list[Any]) -> None:
        sizes = [size for value in inputs for size in (value.shape if isinstance(value, torch.Tensor) else (value,))]
        self._env = next((size.node.shape_env for size in sizes if isinstance(size, torch.SymInt)), None)
        self._known = len(self._env.guards) if self._env is not None else 0

    def _relations(self) -> list[Any]:
        """As they were asked: afterwards both sides of an equality are one to the environment."""
        return [guard.expr for guard in self._env.guards[self._known :]] if self._env is not None else []


class Equalities(_Since):
    """What passes over a graph take to be equal from here on: what they write is wrong at other sizes."""

    def texts(self) -> list[str]:
        """The relations, as conditions have them."""
        import sympy

        return list(dict.fromkeys(_print(expr) for expr in self._relations() if isinstance(expr, sympy.Eq)))


class Limits(Equalities):
    """What a graph that is lowered from here on is lowered for: what its sizes equal, and what 32 bits count.

    Nearly every kernel for a GPU is made for such sizes and would read and write elsewhere beyond. What lowering has
    found to be equal it wrote once; operators of torch's that take one of several kernels by sizes do so here, too.
    The rest of what lowering takes for granted chooses between equal results, as with `_guards`.
    """

    def texts(self) -> list[str]:
        """The relations, as conditions have them."""
        import sympy

        found = [self._env.replace(expr) for expr in self._relations()] if self._env is not None else []
        limits = [expr for expr in found if isinstance(expr, sympy.Le) and expr.rhs in _COUNTED and expr.free_symbols]
        return list(dict.fromkeys([*super().texts(), *map(_print, limits)]))
