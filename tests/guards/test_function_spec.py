# SPDX-License-Identifier: Apache-2.0
"""Functions as arguments: taken apart and put together they do the same; another code or another value is seen."""

from __future__ import annotations

import functools
import inspect
import random
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from nexfort_engine.guards.call_spec import Flat, Leaves, flatten, flatten_call, flatten_result, spec_text, unflatten
from nexfort_engine.modules.memory_format import Unsupported

T = torch.Tensor


class Scale:
    """A plain object with a method."""

    def __init__(self, by: float) -> None:
        self.by = by

    def of(self, x: T) -> T:
        return x * self.by


def closure(mask: T, count: int, factor: float) -> Callable[[T], T]:
    def masked(x: T, *, more: float = 1.0) -> T:
        return x * mask.sum() + count * factor * more

    return masked


def with_default(mask: T, count: int, factor: float) -> Callable[[T], T]:
    def shifted(x: T, mask: T = mask, count: int = count) -> T:
        return x + mask.sum() * count * factor

    return shifted


def wrapped(mask: T, count: int, factor: float) -> Callable[[T], T]:
    inner = closure(mask, count, factor)

    @functools.wraps(inner)
    def outer(x: T) -> T:
        return inner(x) + outer.level

    outer.level = factor  # type: ignore[attr-defined]
    return outer


def partial(mask: T, count: int, factor: float) -> Callable[[T], T]:
    return functools.partial(lambda count, x, by: x * by * count, count, by=factor)


def method(mask: T, count: int, factor: float) -> Callable[[T], T]:
    return Scale(factor).of


MAKERS = [closure, with_default, partial, method]


def taken_apart(value: Any) -> tuple[Any, Flat]:
    into = Flat()
    return flatten(value, into), into


def together(spec: Any, flat: Flat) -> Any:
    return unflatten(spec, Leaves(flat.tensors, flat.ints, flat.mappings))


@pytest.mark.parametrize("maker", MAKERS)
@given(count=st.integers(1, 9), factor=st.floats(-3, 3), other=st.floats(-3, 3))
def test_a_function_is_its_code_and_what_it_holds(maker: Any, count: int, factor: float, other: float) -> None:
    x, mask = torch.randn(3), torch.randn(2)
    spec, flat = taken_apart(maker(mask, count, factor))
    hash(spec)
    again, _ = taken_apart(maker(torch.randn(2), count + 1, factor))
    assert spec == again and hash(spec) == hash(again) and spec_text(spec) == spec_text(again), "made anew"
    assert torch.equal(together(spec, flat)(x), maker(mask, count, factor)(x))
    if maker is not method:
        flat.ints = [number + 1 for number in flat.ints]
    changed = together(spec, flat)(x)
    assert torch.equal(changed, maker(mask, count + (maker is not method), factor)(x)), "numbers are data"
    different, _ = taken_apart(maker(mask, count, other))
    assert (different == spec) == (repr(factor) == repr(other)), "a plain value is part of the structure"


def test_functions_of_other_code_are_another_structure() -> None:
    one, other = (taken_apart(code)[0] for code in (lambda x: x * 2.0, lambda x: x * 3.0))
    assert one != other and spec_text(one) != spec_text(other)
    assert taken_apart(functional.gelu)[0] == taken_apart(functional.gelu)[0] != taken_apart(functional.relu)[0]
    assert taken_apart(torch.tanh)[0] != taken_apart(torch.sigmoid)[0]
    assert spec_text(taken_apart(torch.tanh)[0]) != spec_text(taken_apart(torch.sigmoid)[0])


IN_A_PROCESS = """
import sys
sys.path[:0] = [{here!r}, {root!r}]
import torch
from test_function_spec import MAKERS, spec_text, taken_apart
for maker in MAKERS:
    print(spec_text(taken_apart(maker(torch.ones(2), 3, 0.5))[0]))
print(spec_text(taken_apart(torch.tanh)[0]))
"""


def test_the_text_is_the_same_in_another_process() -> None:
    here = Path(__file__).parent
    code = IN_A_PROCESS.format(here=str(here), root=str(here.parents[1]))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    texts = [spec_text(taken_apart(maker(torch.ones(2), 3, 0.5))[0]) for maker in MAKERS]
    assert done.stdout.splitlines() == [text.replace(__name__, "test_function_spec") for text in texts] + [
        spec_text(taken_apart(torch.tanh)[0])
    ]
    assert "0x" not in done.stdout


def test_a_mapping_in_a_cell_and_among_the_arguments_stays_one() -> None:
    options: dict[str, Any] = {"a": 1}

    def reads(x: T) -> T:
        return x * options["a"]

    flat = Flat()
    spec = flatten_call((reads, options), {"again": options}, flat)
    assert flat.mappings == [options]
    leaves = Leaves(flat.tensors, flat.ints, [{"a": 5}])
    function, first, second = (unflatten(part, leaves) for part in spec[2:])
    assert first is second and function(2) == 10
    first["a"] = 7
    assert function(2) == 14


def two_of_each(a: T, b: T) -> functools.partial[T]:
    return functools.partial(lambda x, y, *, less, more: x * y - less + more, a, less=b, more=a + b)


def test_a_partial_s_arguments_keep_their_places() -> None:
    a, b, x = torch.randn(3), torch.randn(3), torch.randn(3)
    made = two_of_each(a, b)
    made.level = 4.0  # type: ignore[attr-defined]
    again = together(*taken_apart(made))
    assert torch.equal(again(x), made(x)) and again.level == 4.0
    made.level = 5.0  # type: ignore[attr-defined]
    assert taken_apart(made)[0] != taken_apart(two_of_each(a, b))[0]


def test_a_function_that_names_lead_to_is_itself() -> None:
    """Code may ask `is`, or look it up in a dict."""
    for named in (closure, functional.relu, Scale.of):
        spec, flat = taken_apart([named, functools.partial(named)])
        first, second = together(spec, flat)
        assert first is second.func is named and spec_text(spec) == spec_text(taken_apart([named, second])[0])
    assert together(*taken_apart(Scale(2.0).of)).__func__ is Scale.of


def test_a_function_that_is_given_twice_stays_one() -> None:
    one, other = (closure(torch.ones(2), 1, 1.0) for _ in range(2))
    spec, flat = taken_apart([one, one, functools.partial(one), other])
    first, second, held, third = together(spec, flat)
    assert first is second is held.func is not third
    assert spec != taken_apart([one, other, functools.partial(one), other])[0]


def test_names_of_a_function_are_kept() -> None:
    def inner(x: T) -> T:
        return x

    @functools.wraps(inner)
    def outer(x: T) -> T:
        return inner(x)

    again = together(*taken_apart(outer))
    assert (again.__name__, again.__qualname__, again.__module__) == ("inner", inner.__qualname__, __name__)
    assert again.__wrapped__.__name__ == "inner" and list(inspect.signature(again).parameters) == ["x"]


def test_globals_of_no_module_are_refused() -> None:
    """Nothing would see that they change, or that they are others."""
    for name in ("no_module", __name__):
        with pytest.raises(Unsupported, match="of no loaded module"):
            taken_apart(types.FunctionType(closure.__code__, {"__name__": name}))


def counting() -> Callable[[], int]:
    count = 0

    def counted() -> int:
        nonlocal count
        count += 1
        return count

    return counted


def counting_inside() -> Callable[[], Any]:
    count = 0

    def counted() -> Any:
        def inner() -> None:
            nonlocal count
            count += 1

        return inner

    return counted


def itself() -> Callable[[], Any]:
    def found() -> Any:
        return found

    return found


def too_early() -> Callable[[], Any]:
    def found() -> Any:
        return later

    if found is None:
        later = 1
    return found


def drawing() -> Callable[[], float]:
    numbers = random.Random(0)
    return lambda: numbers.random()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (counting(), "a function that assigns count"),
        (counting_inside(), "a function that assigns count"),
        (itself(), "a function that holds itself"),
        (wrapped(torch.ones(2), 1, 1.0), "a function that holds itself"),
        (drawing(), "Random, whose content cannot be listed"),
        (too_early(), "a variable that has no value yet"),
        (torch.nn.Linear(1, 1).forward, "Linear"),
        (functools.partial(torch.nn.Linear(1, 1)), "Linear"),
        (type("Called", (), {"__call__": lambda self: None})(), "Called"),
    ],
)
def test_what_cannot_be_taken_apart_is_refused_with_a_reason(value: Any, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        taken_apart(value)


@pytest.mark.parametrize("result", [closure(torch.ones(2), 1, 1.0), torch.tanh, Scale(1.0).of])
def test_a_function_is_no_result(result: Any) -> None:
    with pytest.raises(Unsupported, match="function"):
        flatten_result([torch.ones(1), result], Flat())
