# SPDX-License-Identifier: Apache-2.0
"""Which kernel an attention takes: the fastest of those that may, once and for all; results are laid out alike."""

from __future__ import annotations

import itertools
import re
import threading
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from attention_kernels import Kernels, call_of
from hypothesis import given, settings

from nexfort_engine.attention.backends import KERNELS, Call, own
from nexfort_engine.attention.tuner import Told, kind, laid
from nexfort_engine.graph.layouts import memory_order
from nexfort_engine.reporting.report import Report

ORDER = (0, 2, 1, 3)
ORDERS = [order for order in itertools.permutations(range(4)) if order[-1] == 3]


def chosen(kernels: Kernels, call: Call | None = None, *, quantised: bool = False, report: Any = None) -> str:
    """Which kernel gives the result of a call once all is known."""
    chooser, call = kernels.chooser(), call or call_of()
    chooser.run(call, ORDER, quantised, Told(None, report))
    kernels.asked.clear()
    chooser.run(call, ORDER, quantised, Told(None, report))
    (name,) = kernels.asked or ("torch",)
    return name


def notes(kernels: Kernels, call: Call | None = None, **more: Any) -> str:
    report = Report()
    chosen(kernels, call, report=report, **more)
    return "\n".join(report.as_dict()["notes"])


# ---- the choice --------------------------------------------------------------------------------------------


def test_the_fastest_is_taken_and_measured_once() -> None:
    kernels = Kernels(slow=300, fast=50)
    chooser, call = kernels.chooser(), call_of()
    for _ in range(5):
        assert torch.equal(chooser.run(call, ORDER, False, Told()), own(call))
    assert kernels.measured == 1 and kernels.asked == {"slow": 2, "fast": 2 + 5}


@pytest.mark.parametrize(("microseconds", "name"), [(96.9, "other"), (97.2, "torch"), (100, "torch"), (200, "torch")])
def test_torch_wins_ties_within_three_in_a_hundred(microseconds: float, name: str) -> None:
    assert chosen(Kernels(other=microseconds)) == name


def test_one_that_raises_is_left_out_with_its_reason() -> None:
    kernels = Kernels(broken=1, fast=50)

    def fail(call: Call) -> torch.Tensor:
        raise ImportError("libbroken.so: cannot open shared object file")

    kernels.instead["broken"] = fail
    assert chosen(kernels) == "fast"
    said = notes(kernels)
    assert "fast, 50 microseconds (torch 100)" in said and "not broken: ImportError: libbroken.so" in said


@pytest.mark.parametrize(
    ("instead", "reason"),
    [
        (lambda call: own(call) * 1.5, "5.0e-01 of the norm"),
        (lambda call: own(call).double(), "torch.float64"),
        (lambda call: own(call) * float("nan"), "nan of the norm"),
        (lambda call: own(call)[:, :1], "of the norm|size of tensor"),
    ],
    ids=["far", "dtype", "nan", "shape"],
)
def test_one_that_gives_another_result_is_left_out(instead: Any, reason: str) -> None:
    kernels = Kernels(wrong=1)
    kernels.instead["wrong"] = instead
    assert chosen(kernels, call_of(heads=3)) == "torch"
    assert re.search(f"not wrong: .*({reason})", notes(kernels, call_of(heads=3)))


def test_what_quantises_needs_low_precision() -> None:
    kernels = Kernels(quantised=10, fast=50)
    kernels.quantising.add("quantised")
    kernels.instead["quantised"] = lambda call: own(call) * 1.05
    assert chosen(kernels) == "fast" and chosen(kernels, quantised=True) == "quantised"


def test_what_takes_no_such_call_is_not_asked() -> None:
    kernels = Kernels(picky=1, fast=50)
    kernels.problems["picky"] = "it takes no mask"
    assert chosen(kernels) == "fast" and not kernels.asked["picky"]
    assert "not picky: it takes no mask" in notes(kernels)
    kernels.problems["fast"] = "nor this"
    assert chosen(kernels) == "torch"
    assert "torch's own choice, for want of another; not picky: it takes no mask; not fast: nor this" in notes(kernels)


def test_what_the_user_switches_off_is_no_candidate_and_may_come_back() -> None:
    kernels = Kernels(fast=50, fastest=20)
    chooser, call = kernels.chooser(), call_of()
    for off, name in ((set(), "fastest"), ({"fastest"}, "fast"), ({"fastest", "fast"}, ""), (set(), "fastest")):
        kernels.off = off
        chooser.run(call, ORDER, False, Told())
        kernels.asked.clear()
        chooser.run(call, ORDER, False, Told())
        assert list(kernels.asked) == ([name] if name else [])
    assert kernels.measured == 2, "with all of them, and without the fastest"


def test_another_version_is_measured_anew() -> None:
    kernels = Kernels(fast=50)
    one = kind(call_of(), ORDER, kernels.made())
    kernels.versions["fast"] = "2"
    assert kind(call_of(), ORDER, kernels.made()) != one


def test_a_kind_is_known_at_other_sizes_below_the_same_powers_of_two() -> None:
    kernels = Kernels(fast=50)
    chooser = kernels.chooser()
    for rows, keys in ((33, 70), (64, 128), (40, 65)):
        chooser.run(call_of(rows=rows, keys=keys), ORDER, False, Told())
    assert kernels.measured == 1
    chooser.run(call_of(rows=65, keys=128), ORDER, False, Told())
    chooser.run(call_of(rows=64, keys=129), ORDER, False, Told())
    chooser.run(call_of(rows=64, keys=128, heads=4, batch=1), ORDER, False, Told())
    assert kernels.measured == 4, "more rows, more keys, other heads"


def test_where_a_kind_is_known_some_sizes_may_not_be_taken() -> None:
    kernels, report = Kernels(fast=50), Report()
    chooser = kernels.chooser()
    chooser.run(call_of(rows=64), ORDER, False, Told(None, report))
    kernels.microseconds["other"] = 100.0
    picky = Kernels(fast=50, other=99)
    picky.problems["fast"] = "it takes multiples of 8"
    chooser = picky.chooser()
    picky.problems.clear()
    chooser.run(call_of(rows=64), ORDER, False, Told(None, report))
    picky.problems["fast"] = "it takes multiples of 8"
    picky.asked.clear()
    assert torch.equal(chooser.run(call_of(rows=63), ORDER, False, Told(None, report)), own(call_of(rows=63)))
    assert not picky.asked and "at sizes that fast does not take" in str(report)


def test_one_that_fails_at_other_sizes_of_its_kind_is_let_go_of_there() -> None:
    kernels, report = Kernels(fast=50), Report()
    chooser, told = kernels.chooser(), Told(None, report)
    chooser.run(call_of(rows=64), ORDER, False, told)

    def fail(call: Call) -> torch.Tensor:
        raise RuntimeError("no kernel for 63 rows" if call.query.shape[2] == 63 else "not asked")

    kernels.instead["fast"] = fail
    asked = kernels.asked["fast"]
    for _ in range(3):
        assert torch.equal(chooser.run(call_of(rows=63), ORDER, False, told), own(call_of(rows=63)))
    assert kernels.asked["fast"] == asked + 1
    assert "at some sizes torch's own choice, because it failed: RuntimeError: no kernel for 63 rows" in str(report)
    kernels.instead.clear()
    chooser.run(call_of(rows=64), ORDER, False, told)
    assert kernels.asked["fast"] == asked + 2 and kernels.measured == 1


def test_want_of_memory_passes_through() -> None:
    """The host has its own remedies."""
    kernels = Kernels(fast=50)
    chooser = kernels.chooser()
    chooser.run(call_of(), ORDER, False, Told())

    def fail(call: Call) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    kernels.instead["fast"] = fail
    with pytest.raises(torch.OutOfMemoryError):
        chooser.run(call_of(), ORDER, False, Told())


@pytest.mark.parametrize(
    "more",
    [
        {"mask": torch.ones(2, 1, 8, 8, dtype=torch.bool)},
        {"mask": torch.zeros(2, 1, 8, 8, dtype=torch.float32)},
        {"mask": torch.zeros(2, 2, 8, 8, dtype=torch.float32)},
        {"is_causal": True},
        {"groups": 1},
        {"values": 24},
        {"width": 24},
        {"outermost": "heads"},
        {"dtype": torch.float16},
    ],
    ids=str,
)
def test_whatever_shapes_the_work_is_in_the_kind(more: dict[str, Any]) -> None:
    kernels = Kernels(fast=50)
    assert kind(call_of(**more), ORDER, kernels.made()) != kind(call_of(), ORDER, kernels.made())


# ---- not measured ------------------------------------------------------------------------------------------


def test_without_memory_nothing_is_decided_for_good() -> None:
    kernels = Kernels(fast=50)

    def fail(call: Call) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    kernels.instead["fast"] = fail
    assert chosen(kernels) == "torch" and "there was no memory for it" in notes(kernels)


def test_other_devices_have_torchs_own_choice() -> None:
    assert "cpu" not in KERNELS
    call = call_of()
    from nexfort_engine.attention.tuner import Chooser

    assert torch.equal(Chooser({}).run(call, ORDER, False, Told()), own(call))


def test_threads_measure_once() -> None:
    kernels = Kernels(fast=50)
    chooser, call, start = kernels.chooser(), call_of(), threading.Barrier(8)

    def ask() -> None:
        start.wait()
        chooser.run(call, ORDER, False, Told())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kernels.measured == 1


# ---- the report --------------------------------------------------------------------------------------------


def test_each_report_is_told_of_each_kind_once() -> None:
    kernels, one, other = Kernels(fast=50, slow=200), Report(), Report()
    chooser, call = kernels.chooser(), call_of(mask=torch.ones(2, 1, 1, 8, dtype=torch.bool))
    for report in (one, one, other):
        chooser.run(call, ORDER, False, Told(None, report))
    wanted = [
        "attention of float32, 2 heads of 16 (2 of 16), up to 32 rows and 8 keys, BLHE BLHE BLHE to BLHE, mask bool "
        "B11S, among fast slow: fast, 50 microseconds (torch 100, slow 200)"
    ]
    assert one.as_dict()["notes"] == other.as_dict()["notes"] == wanted


# ---- results -----------------------------------------------------------------------------------------------

SIZES = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 3),
        "heads": st.sampled_from([1, 2, 4]),
        "rows": st.integers(1, 9),
        "keys": st.integers(1, 9),
        "width": st.sampled_from([1, 4, 16]),
        "values": st.sampled_from([None, 3, 8]),
        "outermost": st.sampled_from(["heads", "rows"]),
        "dtype": st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
        "seed": st.integers(0, 2**16),
    }
)


@settings(max_examples=100, deadline=None)
@given(sizes=SIZES, shared=st.booleans(), masked=st.sampled_from(["no", "causal", "bool", "added"]), data=st.data())
def test_values_are_torchs_and_the_layout_is_as_asked(sizes: Any, shared: bool, masked: str, data: Any) -> None:
    """Whichever kernel ran and however its result lies."""
    if shared:
        sizes = {**sizes, "groups": 1}
    call = call_of(**sizes)
    keep = torch.rand(sizes["batch"], 1, sizes["rows"], sizes["keys"]) > 0.3
    keep[..., 0] = True
    if masked == "bool":
        call = call._replace(mask=keep)
    elif masked == "added":
        call = call._replace(mask=torch.randn(keep.shape).to(call.query.dtype))
    call = call._replace(is_causal=masked == "causal")
    order = data.draw(st.sampled_from(ORDERS))
    elsewhere = data.draw(st.sampled_from(ORDERS))
    kernels = Kernels(fast=data.draw(st.sampled_from([50, 200])))
    kernels.instead["fast"] = lambda call: laid(own(call), elsewhere)
    chooser, wanted = kernels.chooser(), own(call)
    for _ in range(2):
        found = chooser.run(call, order, False, Told())
        assert torch.equal(found, wanted) and found.dtype == wanted.dtype
        like = torch.empty_permuted(wanted.shape, order)
        assert all(a == b for a, b, n in zip(found.stride(), like.stride(), found.shape, strict=True) if n > 1)


@given(sizes=st.lists(st.sampled_from([1, 2, 3, 5]), min_size=4, max_size=4), order=st.permutations(range(4)))
def test_the_order_in_memory_is_what_lays_a_tensor_out_as_it_is(sizes: list[int], order: list[int]) -> None:
    tensor = torch.empty_permuted(sizes, order)
    again = laid(tensor, memory_order(tensor.shape, tensor.stride()))
    assert again is tensor
