# SPDX-License-Identifier: Apache-2.0
"""Shape conditions: they hold exactly for the sizes they describe, survive their text form, and run no code."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from nexfort_engine.guards.shape_guards import Conditions, evaluate, names  # noqa: E402


def stored(conditions: Conditions) -> Conditions:
    """The conditions after a trip through a manifest."""
    return Conditions(**json.loads(json.dumps(conditions.as_json())))


# A joint attention block: batch s0, image tokens s1, prompt tokens s2, a mask over both, and the height as a number.
JOINT = Conditions(
    shapes=[["s0", "s1", 64], ["s0", "s2", 64], ["s0", "s1 + s2"]],
    ints=["s3", 16],
    ranges={"s0": [1, None], "s1": [1, 4096], "s2": [2, None]},
    guards=["Eq(Mod(s1, s3), 0)", "s1 >= s2 or s2 > 10"],
)


def sizes(batch: int = 2, image: int = 24, text: int = 5, mask: int | None = None) -> list[tuple[int, ...]]:
    return [(batch, image, 64), (batch, text, 64), (batch, image + text if mask is None else mask)]


@pytest.mark.parametrize("conditions", [JOINT, stored(JOINT)], ids=["made", "stored"])
@pytest.mark.parametrize(
    ("shapes", "ints", "reason"),
    [
        (sizes(), (4, 16), None),
        (sizes(batch=1, image=4096, text=77), (1, 16), None),
        (sizes(image=24, text=24), (3, 16), None),
        (sizes(mask=30), (4, 16), "size 30 of dimension 1 of input 2 where s1 + s2 was captured"),
        ([(2, 24, 64), (3, 5, 64), (2, 29)], (4, 16), "size 3 of dimension 0 of input 1 where s0"),
        ([(2, 24, 32), (2, 5, 64), (2, 29)], (4, 16), "size 32 of dimension 2 of input 0 where 64"),
        ([(2, 24), (2, 5, 64), (2, 29)], (4, 16), "rank 2 where 3"),
        (sizes(), (5, 16), "the relation Eq(Mod(s1, s3), 0) does not hold"),
        (sizes(image=8, text=9), (4, 16), "the relation s1 >= s2 or s2 > 10"),
        (sizes(image=8, text=11), (4, 16), None),
        (sizes(), (4, 17), "the number 17 where 16 was captured"),
        (sizes(image=4100), (4, 16), "s1 = 4100 above 4096"),
        (sizes(text=1), (4, 16), "s2 = 1 below 2"),
    ],
)
def test_a_call_fits_or_the_reason_says_what_was_found(
    conditions: Conditions, shapes: Any, ints: Any, reason: str | None
) -> None:
    found = conditions.broken([torch.Size(s) for s in shapes], ints)
    if reason is None:
        assert found is None
    else:
        with pytest.raises(AssertionError, match=re.escape(reason)):
            raise AssertionError(found)


@given(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=3), min_size=1, max_size=3), st.data())
def test_fixed_sizes_fit_themselves_only(shapes: list[list[int]], data: st.DataObject) -> None:
    conditions = stored(Conditions(shapes))
    assert conditions.broken(shapes) is None
    i = data.draw(st.integers(0, len(shapes) - 1))
    d = data.draw(st.integers(0, len(shapes[i]) - 1))
    shapes[i][d] += data.draw(st.integers(1, 5))
    assert f"dimension {d} of input {i}" in str(conditions.broken(shapes))


def test_a_symbol_that_no_size_gives_alone_cannot_be_checked() -> None:
    assert Conditions([["s0", "2*s1"]]).unbound() == {"s1"}
    assert Conditions([["s0"]], guards=["s0 > s9"]).unbound() == {"s9"}
    assert Conditions([["s0", "2*s1"]], ints=["s1"]).unbound() == set()
    assert not JOINT.unbound()


def test_a_relation_that_divides_by_zero_does_not_hold() -> None:
    found = Conditions([["s0", 8]], ["s1"], {}, ["(s0 // s1) == 2", "s1 != 0"])
    assert found.broken([(6, 8)], [3]) is None
    assert "does not hold" in (found.broken([(6, 8)], [0]) or "")


def test_names_are_symbols_and_no_functions() -> None:
    assert names("Eq(Mod(s0*s1, 4), Max(s77, 2))") == {"s0", "s1", "s77"}
    assert names("12") == set()


# ---- expressions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "s0.__class__",
        "(lambda: 1)()",
        "[s0 for s0 in (1,)]",
        "open('/etc/passwd')",
        "s0 if s0 else evil(s0)",
        "s0 and print(s0)",
        "f'{s0}'",
        "unknown",
        "(s0 := 3)",
        "1 < s0 < 3",
        "'text'",
    ],
)
def test_nothing_but_arithmetic_is_evaluated(text: str) -> None:
    with pytest.raises(ValueError, match="was found in a shape condition"):
        evaluate(text, {"s0": 2})


def _expressions() -> Any:
    """Sympy expressions of the kinds that torch makes of sizes, and the symbols in them."""
    import sympy
    from torch.utils._sympy import functions as f

    a, b = sympy.symbols("s0 s1", integer=True, positive=True)
    return (a, b), [
        *[2 * a + b, a * b - 1, a**2, f.FloorDiv(a * b, 2), f.Mod(a, 3), f.PythonMod(a - b, 4), f.CeilDiv(a, 4)],
        *[f.ModularIndexing(a, 2, 8), f.Max(a, b, 7), f.Min(a, 5), f.CleanDiv(6 * a, 3), f.PowByNatural(a, 2)],
        *[f.IntTrueDiv(a, b), f.ToFloat(a), f.TruncToInt(f.ToFloat(a)), f.FloatTrueDiv(f.ToFloat(a), 2.0)],
        *[sympy.Eq(a, b), sympy.Ne(a, b), sympy.And(a > b, b < 5), sympy.Or(a >= b, sympy.Eq(b, 3)), ~(a > b)],
        *[sympy.Abs(a - b), f.FloorDiv(a - b, 2), sympy.floor(sympy.Rational(1, 2) * a), a / 2 + sympy.Rational(1, 3)],
        *[f.RoundToInt(f.ToFloat(a) / 3), f.FloorToInt(f.ToFloat(a)), f.CeilToInt(f.ToFloat(a)), f.Where(a > b, a, 0)],
        *[f.OpaqueUnaryFn_sqrt(a), f.FloatPow(f.ToFloat(a), 2.0), f.LShift(a, 2), f.RShift(a, 1)],
    ]


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 300))
def test_what_torch_prints_is_evaluated_as_torch_means_it(first: int, second: int) -> None:
    from torch.utils._sympy.printers import PythonPrinter

    (a, b), expressions = _expressions()
    for expression in expressions:
        text = PythonPrinter().doprint(expression)
        assert names(text) <= {"s0", "s1"}
        found, meant = evaluate(text, {"s0": first, "s1": second}), expression.subs({a: first, b: second})
        if isinstance(found, bool):
            assert found == bool(meant), text
        else:
            assert math.isclose(float(found), float(meant), rel_tol=1e-12), text


@pytest.mark.parametrize(
    ("guard", "even", "odd"),
    [
        ("(s0 % 2) == 1", True, False),
        ("Eq(Mod(s0, 2), 0)", False, True),
        ("Ne(Mod(s0, 2), 0)", True, False),
        ("Eq(0, PythonMod(s0 + 1, 2))", True, False),
        ("Eq(Mod(s0, 4), 1)", False, False),
        ("s0 % 2 < 1", False, False),
        ("s0 >= 2", False, False),
        ("Eq(s0, 2)", False, False),
    ],
)
def test_a_parity_is_told_from_other_relations(guard: str, even: bool, odd: bool) -> None:
    told = Conditions(shapes=[["s0", 4]], ranges={"s0": [3, None]}, guards=[guard])
    found = [told.other_parity([torch.Size([size, 4])]) for size in (2, 4, 1, 7)]
    assert [one is not None for one in found] == [even, even, odd, odd]
    assert {one for one in found if one} <= {f"the relation {guard} does not hold"}
    assert told.other_parity([torch.Size([4])]) is None


@pytest.mark.parametrize(
    ("guard", "given", "narrow", "wide"),
    [
        ("(s0 // 2) == 1", 4, True, False),
        ("(s0 // 2) == 1", 3, False, False),
        ("Eq(1, FloorDiv(s0, 4))", 12, True, False),
        ("Eq(s0 - 2, 0)", 5, True, False),
        ("Ne(s0 // 2, 1)", 3, False, True),
        ("s0 // 4 != 0", 2, False, True),
        ("Eq(Mod(s0, 4), 1)", 6, False, False),
        ("(s0 % 3) == 0", 4, False, False),
        ("Eq(s0 // 2, 2)", 6, False, False),
        ("s0 // 2 < 1", 6, False, False),
    ],
)
def test_a_size_of_one_that_code_makes_of_others_is_told(guard: str, given: int, narrow: bool, wide: bool) -> None:
    told = Conditions(shapes=[["s0", 4]], guards=[guard])
    assert (told.narrow([(given, 4)]), told.wide([(given, 4)])) == (narrow, wide)
    assert (told.narrow([(4,)]), told.wide([(4,)])) == (False, False), "ranks are told by `broken`"
