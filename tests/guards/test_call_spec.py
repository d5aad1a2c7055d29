# SPDX-License-Identifier: Apache-2.0
"""Signatures: a call taken apart and put together again is the same call, and two that differ to code differ here."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections import namedtuple
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from nexfort_engine.guards.call_spec import (  # noqa: E402
    Flat,
    Leaves,
    flatten,
    flatten_call,
    of_its_own,
    spec_text,
    unflatten,
    unflatten_call,
)
from nexfort_engine.modules.memory_format import Unsupported, format_of, normalised, tensor_meta  # noqa: E402

Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Sizes:
    """A container as hosts pass them around."""

    tensor: Any
    scale: float
    more: Any = None


class Bag:
    """A plain object with attributes."""

    def __init__(self, **content: Any) -> None:
        self.__dict__.update(content)

    def __eq__(self, other: object) -> bool:
        return type(other) is Bag and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


class Slotted:
    """An object whose attributes have places of their own; one of them may be empty."""

    __slots__ = ("first", "second")

    def __init__(self, *content: Any) -> None:
        for name, value in zip(self.__slots__, content, strict=False):
            setattr(self, name, value)


class Flag(str, enum.Enum):
    """An enum that is a string as well."""

    ON = "on"


def taken_apart(value: Any) -> tuple[Any, Flat]:
    into = Flat()
    return flatten(value, into), into


def together(spec: Any, flat: Flat) -> Any:
    return unflatten(spec, Leaves(flat.tensors, flat.ints, flat.mappings))


T = torch.ones(2, 3)
plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 2**40),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.sampled_from([T, torch.float16, torch.device("cpu"), torch.channels_last, Flag.ON, torch.Size([2, 1, 7])]),
    st.just({"patches": {}}),
)
values = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(Pair, inner, inner),
        st.builds(Sizes, st.just(T), st.floats(allow_nan=False), inner),
        st.builds(lambda a, b: Bag(a=a, b=b), inner, inner),
        st.builds(Slotted, inner, inner),
        st.builds(Slotted, inner),
    ),
    max_leaves=8,
)


def equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a is b
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, Slotted):
        there = [[getattr(v, n) for n in Slotted.__slots__ if hasattr(v, n)] for v in (a, b)]
        return equal(*there)
    if isinstance(a, (Bag, Sizes)):
        return vars(a).keys() == vars(b).keys() and all(equal(v, vars(b)[k]) for k, v in vars(a).items())
    return a == b


@given(values)
def test_what_was_taken_apart_is_put_together_again(value: Any) -> None:
    spec, flat = taken_apart(value)
    hash(spec)
    assert equal(together(spec, flat), value)


@given(values, values)
def test_the_text_tells_apart_what_the_spec_does(one: Any, other: Any) -> None:
    (a, flat_a), (b, flat_b) = taken_apart(one), taken_apart(other)
    assert (a == b) == (spec_text(a) == spec_text(b))
    if a == b and equal_leaves(flat_a, flat_b):
        assert equal(one, other) or repr(one) == repr(other)


def equal_leaves(a: Flat, b: Flat) -> bool:
    return a.tensors == b.tensors and a.ints == b.ints and a.mappings == b.mappings


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, True), (0, False), (1, 1.0), (True, 1.0), (0, 0.0), (0.0, -0.0), ("1", 1), ((1,), [1]), (None, False)],
    ids=repr,
)
def test_values_that_are_equal_but_not_the_same_have_different_specs(one: Any, other: Any) -> None:
    # code tells them apart: `is True`, integer against float arithmetic, a sign that a division shows
    assert taken_apart(one)[0] != taken_apart(other)[0]
    assert spec_text(taken_apart(one)[0]) != spec_text(taken_apart(other)[0])


def test_whole_numbers_are_data_and_others_are_not() -> None:
    spec, flat = taken_apart([64, 0, 1.5, -3, True])
    assert flat.ints == [64, 0, -3]
    assert taken_apart([32, 1, 1.5, 7, True])[0] == spec
    for other in ([64, 0, 2.5, -3, True], [64, 0, 1.5, -3, False], [64, 0, 1.5, -3, 1], [64.0, 0, 1.5, -3, True]):
        assert taken_apart(other)[0] != spec


def test_a_size_of_symbols_becomes_a_tuple() -> None:
    spec, flat = taken_apart(torch.Size([4, 8]))
    assert type(together(spec, flat)) is torch.Size
    assert unflatten(spec, Leaves([], ["s0", 8])) == ("s0", 8)


def test_calls_keep_what_is_positional_and_what_is_named() -> None:
    flat = Flat()
    options = {"patches": {}}
    spec = flatten_call((T, 3), {"mask": None, "transformer_options": options}, flat)
    args, kwargs = unflatten_call(spec, Leaves(flat.tensors, flat.ints, flat.mappings))
    assert args[0] is T and args[1] == 3
    assert kwargs["mask"] is None and kwargs["transformer_options"] is options
    for other in (
        ((T,), {"mask": None, "transformer_options": options, "size": 3}),
        ((T, 3), {"mask": T, "transformer_options": options}),
        ((T, 3), {"transformer_options": options}),
    ):
        assert flatten_call(*other, Flat()) != spec


def test_leaves_come_in_the_order_of_the_call() -> None:
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    flat = Flat()
    flatten_call((a, [b, 5]), {"later": Sizes(c, 0.5, {"x": 1})}, flat)
    assert [t.numel() for t in flat.tensors] == [1, 2, 3]
    assert flat.ints == [5] and flat.mappings == [{"x": 1}]


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (torch.nn.Linear(1, 1), "Linear"),
        (torch.nn.Linear(1, 1).forward, "Linear"),
        (torch.Generator(), "Generator"),
        (object(), "object"),
        (iter([]), "list_iterator"),
        (1j, "complex"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_listed_is_refused_by_name(value: Any, named: str) -> None:
    with pytest.raises(Unsupported, match=named):
        taken_apart([value])


def test_the_text_of_a_spec_holds_no_address() -> None:
    text = spec_text(taken_apart(Sizes(T, 2.0, [Bag(x=torch.float16), Pair(1, 2)]))[0])
    assert "0x" not in text
    assert "Sizes" in text and "Bag" in text and "torch.float16" in text


# ---- tensors -------------------------------------------------------------------------------------------------


def test_sizes_are_no_part_of_a_tensor_s_signature() -> None:
    assert tensor_meta(torch.ones(2, 3)) == tensor_meta(torch.ones(5, 7)) == ("torch.float32", 2, "cpu", "c")
    assert tensor_meta(torch.nn.Parameter(T)) == tensor_meta(T)
    for other in (torch.ones(2, 3, 1), torch.ones(2, 3).half(), torch.ones(2, 3).int(), T.to("meta")):
        assert tensor_meta(other) != tensor_meta(T)


def test_only_memory_formats_that_code_is_made_for_are_told_apart() -> None:
    image = torch.randn(2, 8, 4, 4)
    last = image.to(memory_format=torch.channels_last)
    assert (format_of(image), format_of(last)) == ("c", "l")
    assert format_of(torch.randn(2, 8, 3, 4, 4).to(memory_format=torch.channels_last_3d)) == "l"
    assert format_of(image.permute(0, 2, 3, 1)) == format_of(T.t()) == "c"
    assert format_of(torch.randn(2, 1, 4, 4).to(memory_format=torch.channels_last)) == "c", "it is both"
    assert normalised(last) is last and normalised(image) is image
    assert normalised(T.t()).is_contiguous() and torch.equal(normalised(T.t()), T.t())


def test_a_copy_lies_in_memory_as_the_tensor_does() -> None:
    """Some of the channels of a tensor in channels_last: torch.cat and clone give channels_last, regions get "c"."""
    last = torch.randn(1, 8, 4, 4).to(memory_format=torch.channels_last)
    for value in (last, last[:, :4], last[:, :, 1:3], torch.randn(1, 6, 4)[..., ::2], last[:, :1].expand(1, 3, 4, 4)):
        once, two = of_its_own(value), of_its_own([value], True)[0]
        assert torch.equal(once, value) and torch.equal(two, torch.cat([value, value]))
        assert format_of(once) == format_of(value) == format_of(two), value.stride()
        once.zero_(), two.zero_()
        assert value.count_nonzero()
    both = last.repeat(2, 1, 1, 1)[:, :4]
    assert of_its_own(both).stride() == both.stride()
    assert torch.equal(of_its_own(T.to_sparse()).to_dense(), T)


def test_tensors_that_are_not_plain_data_are_refused() -> None:
    class Odd(torch.Tensor):
        pass

    with pytest.raises(Unsupported, match="Odd"):
        tensor_meta(T.as_subclass(Odd))
    with pytest.raises(Unsupported, match="sparse"):
        tensor_meta(T.to_sparse())


def test_not_a_number_is_found_again() -> None:
    spec, flat = taken_apart((math.nan,))
    assert math.isnan(together(spec, flat)[0])
    assert spec_text(spec) == spec_text(taken_apart((float("nan"),))[0])
