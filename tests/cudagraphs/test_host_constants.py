# SPDX-License-Identifier: Apache-2.0
"""Which tensors in main memory are constants of a step, and what stands for their copies: "meta" is the GPU here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from nexfort_engine.cudagraphs.capture_check import CaptureCheck
from nexfort_engine.cudagraphs.host_constants import Answering, Constants, Remembering, unwatched

AWAY = "meta"
COPIES = "its code copies between the GPU and main memory"
OUTSIDE = torch.arange(4.0)
X = torch.empty(3, 4, device=AWAY)


@pytest.fixture(params=[torch.no_grad, torch.inference_mode], autouse=True, ids=["no_grad", "inference"])
def _mode(request: Any) -> Any:
    """In inference mode operators come to a dispatch mode that otherwise come in parts."""
    with request.param():
        yield


def _in_place() -> torch.Tensor:
    made = torch.zeros(4)
    made[1:].copy_(torch.arange(3))
    return made.mul_(2.0)


def _in_parts() -> torch.Tensor:
    made = torch.empty(4)
    made[0::2], made[1::2] = torch.arange(2), torch.tensor([5.0, 6.0])
    return made


CONSTANT: dict[str, Callable[[], torch.Tensor]] = {
    "arange": lambda: torch.arange(4),
    "half": lambda: torch.arange(4).to(torch.float16),
    "literal": lambda: torch.tensor([1.0, 2.0]),
    "number": lambda: torch.tensor(3),
    "nested": lambda: torch.tensor(((1, 2), [3, True])),
    "complex": lambda: torch.tensor([1j, 2.0]).conj(),
    "as_tensor": lambda: torch.as_tensor([1, 2], dtype=torch.int32),
    "new_tensor": lambda: OUTSIDE.new_tensor([1, 2]),
    "computed": lambda: torch.outer(torch.linspace(0, 1, 3), 10000 ** -torch.arange(2.0)).cos()[None],
    "expanded": lambda: torch.arange(4).expand(2, 4),
    "grid": lambda: torch.stack(torch.meshgrid(torch.arange(2), torch.arange(3), indexing="ij"), -1).view(-1, 2),
    "in place": _in_place,
    "in parts": _in_parts,
    "out": lambda: torch.add(torch.arange(3), 1, out=torch.empty(3, dtype=torch.int64)),
    "number read": lambda: torch.full((2,), torch.tensor([2.5, 3.5])[1].item()),
    "nan": lambda: torch.tensor([float("nan"), -0.0]),
}


def _written() -> torch.Tensor:
    made = torch.zeros(4)
    made.view(2, 2)[0].copy_(OUTSIDE[:2])
    return made


def _drawn() -> torch.Tensor:
    made = torch.zeros(4)
    torch.randn(4, out=made)
    return made


def _by_numpy() -> torch.Tensor:
    made = torch.zeros(4)
    made.numpy()[:] = 3.0
    return made


VARYING: dict[str, Callable[[], torch.Tensor]] = {
    "outside": lambda: OUTSIDE,
    "view": lambda: OUTSIDE[1:],
    "computed": lambda: torch.arange(4) + OUTSIDE,
    "random": lambda: torch.randn(4),
    "like": lambda: torch.rand_like(torch.zeros(4)),
    "drawn in place": lambda: torch.zeros(4).normal_(),
    "drawn into": _drawn,
    "dropped": lambda: torch.nn.functional.dropout(torch.ones(4)),
    "written": _written,
    "written by numpy": _by_numpy,
    "filled": lambda: torch.zeros(4).add_(OUTSIDE),
    "of an array": lambda: torch.tensor(numpy.ones(3)),
    "shared with an array": lambda: torch.from_numpy(numpy.ones(3)),
    "of numbers of tensors": lambda: torch.tensor([OUTSIDE[0], OUTSIDE[1]]),
    "parameter": lambda: torch.nn.Parameter(OUTSIDE, requires_grad=False),
}


def _bits(tensor: torch.Tensor) -> Any:
    return tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("make", CONSTANT.values(), ids=CONSTANT)
def test_a_copy_of_a_constant_is_remembered_and_answered(make: Callable[[], torch.Tensor]) -> None:
    wanted = make()
    with CaptureCheck() as check:
        copy = make().to(AWAY)
    assert check.reason is None
    (sent,) = check.sent
    assert _bits(sent.constant) == _bits(wanted) and sent.constant.dtype == wanted.dtype
    assert (copy.shape, copy.dtype, copy.device.type) == (wanted.shape, wanted.dtype, AWAY)
    with Answering(check.sent) as answering:
        made = make()
        assert answering.holds(made)
        answer = made.to(AWAY)
    assert answering.reason is None
    assert (answer.shape, answer.dtype, answer.stride()) == (copy.shape, copy.dtype, copy.stride())
    assert answer is not sent.there and copy is not sent.there, "who writes to it changes what is kept for no one"


@pytest.mark.parametrize("make", VARYING.values(), ids=VARYING)
def test_what_is_no_constant_is_copied_as_it_was_and_refused(make: Callable[[], torch.Tensor]) -> None:
    with CaptureCheck() as check:
        copy = make().to(AWAY)
    assert check.reason == f"{COPIES} (_to_copy)" and not check.sent
    assert copy.device.type == AWAY
    with Answering([]) as answering:
        answer = make().to(AWAY, torch.float16)
    assert answering.reason == COPIES
    assert (answer.shape, answer.dtype, answer.device.type) == (copy.shape, torch.float16, AWAY)


@pytest.mark.parametrize(
    "other",
    [
        lambda: torch.arange(1, 5),
        lambda: torch.arange(5),
        lambda: torch.arange(4).int(),
        lambda: torch.arange(4).view(2, 2),
    ],
    ids=["numbers", "length", "type", "shape"],
)
def test_another_constant_in_the_same_place_is_no_answer(other: Callable[[], torch.Tensor]) -> None:
    with Remembering() as watched:
        torch.arange(4).to(AWAY)
    with Answering(watched.sent) as answering:
        answer = other().to(AWAY)
    assert answering.reason == "a constant that its code copies to the GPU is another one in each step"
    assert answer.shape == other().shape and answer.dtype == other().dtype


def test_zero_and_nan_are_compared_by_their_bits() -> None:
    with Remembering() as watched:
        torch.tensor([0.0, float("nan")]).to(AWAY)
    with Answering(watched.sent) as answering:
        torch.tensor([0.0, float("nan")]).to(AWAY)
    assert answering.reason is None
    with Answering(watched.sent) as answering:
        torch.tensor([-0.0, float("nan")]).to(AWAY)
    assert answering.reason is not None


def test_a_copy_to_another_type_is_another_copy() -> None:
    with Remembering() as watched:
        for _ in range(3):
            torch.arange(4).to(AWAY)
            torch.arange(4).to(AWAY, torch.float16)
    assert [one.there.dtype for one in watched.sent] == [torch.int64, torch.float16], "each is kept once"


class Seen(TorchDispatchMode):
    """What is left of the operators below the other mode, with the devices of what they take."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, set[str]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        self.calls.append((func._schema.name.removeprefix("aten::"), {t.device.type for t in tensors}))
        return func(*args, **(kwargs or {}))

    def mixed(self) -> list[str]:
        return [name for name, devices in self.calls if len(devices) > 1]


# what also does something else with what it copies
INTO: dict[str, Callable[[torch.Tensor], Any]] = {
    "copy_": lambda x: x.copy_(torch.arange(4)),
    "part": lambda x: x[1].copy_(torch.tensor([1, 2, 3, 4])),
    "assigned": lambda x: x.__setitem__(0, torch.arange(4)),
    "number assigned": lambda x: x.__setitem__((0, 0), 2.5),
    "index": lambda x: x[torch.tensor([0, 2])],
    "list": lambda x: x[[0, 2]],
    "list in a tuple": lambda x: x[:, [0, 2]],
    "assigned by index": lambda x: x.__setitem__(torch.tensor([0, 2]), torch.tensor(2.5)),
    "number assigned by list": lambda x: x.__setitem__((slice(None), [0, 2]), 7),
}


@pytest.mark.parametrize("does", INTO.values(), ids=INTO)
def test_what_writes_or_looks_up_is_given_copies(does: Callable[[torch.Tensor], Any]) -> None:
    x = torch.empty(3, 4, device=AWAY)
    wanted = does(x)
    with Seen() as seen, CaptureCheck() as check:
        found = does(x)
    assert check.reason is None and check.sent and not seen.mixed()
    with Seen() as seen, Answering(check.sent) as answering:
        again = does(x)
    assert answering.reason is None and not seen.mixed()
    assert not any(name in ("_to_copy", "to") for name, _ in seen.calls), "nothing is copied from main memory"
    if wanted is not None:
        assert wanted.shape == found.shape == again.shape and wanted.dtype == found.dtype == again.dtype


@pytest.mark.parametrize(
    "does",
    [
        lambda x: x.copy_(OUTSIDE),
        lambda x: x.__setitem__(0, torch.randn(4)),
        lambda x: x[OUTSIDE[:2].long()],
        lambda x: x.__setitem__(torch.tensor([0, 2]), OUTSIDE[3]),
    ],
    ids=["copy_", "assigned", "index", "assigned by index"],
)
def test_what_writes_or_looks_up_something_else_is_refused(does: Callable[[torch.Tensor], Any]) -> None:
    x = torch.empty(3, 4, device=AWAY)
    with CaptureCheck() as check:
        does(x)
    assert COPIES in (check.reason or "")
    with Seen() as seen, Answering(check.sent) as answering:
        does(x)
    assert answering.reason == COPIES and not seen.mixed()


def test_a_number_that_goes_where_a_mask_says_is_left_as_it_is() -> None:
    """From main memory it is filled in; from the GPU torch would first ask how many places there are."""
    x, mask = torch.empty(3, 4, device=AWAY), torch.empty(3, 4, dtype=torch.bool, device=AWAY)
    for watched in (Remembering(), Answering([])):
        with Seen() as seen, watched:
            x[mask] = 2.5
            x[mask] = torch.tensor(2.5)
        assert watched.reason is None and seen.mixed() == ["index_put_"] * 2


@pytest.mark.parametrize(
    "does",
    [
        lambda: torch.tensor([1, 2], device=AWAY),
        lambda: torch.tensor(2.0, device=AWAY, dtype=torch.float16),
        lambda: torch.as_tensor((1, 2), dtype=torch.float32, device=AWAY),
        lambda: torch.asarray([1, 2], device=AWAY),
        lambda: X.new_tensor([1, 2]),
    ],
    ids=["tensor", "number", "as_tensor", "asarray", "new_tensor"],
)
def test_a_literal_on_the_gpu_is_a_copy_like_any_other(does: Callable[[], torch.Tensor]) -> None:
    wanted = does()
    with CaptureCheck() as check:
        found = does()
    with Answering(check.sent) as answering:
        again = does()
    assert len(check.sent) == 1 and check.reason is None and answering.reason is None
    for made in (found, again):
        assert (made.dtype, made.shape, made.device) == (wanted.dtype, wanted.shape, wanted.device)


def test_the_default_device_is_that_of_literals() -> None:
    with CaptureCheck() as check, torch.device(AWAY):
        assert torch.tensor([1, 2]).device.type == AWAY
    with torch.device(AWAY), CaptureCheck() as further:
        assert torch.tensor([1, 2]).device.type == AWAY
    assert len(further.sent) == 1 and check.reason is None


def test_the_cpu_may_look_into_its_constants() -> None:
    with CaptureCheck() as check:
        made = torch.arange(4)
        assert made.sum().item() == 6 and made[made > 1].tolist() == [2, 3] and bool((made > -1).all())
        assert torch.equal(made, made)
        torch.unique(made).to(AWAY)
    assert check.reason is None and len(check.sent) == 1
    with CaptureCheck() as check:
        OUTSIDE.sum().item()
    assert "waits for the GPU" in (check.reason or "")


def test_what_a_step_left_behind_is_no_constant_of_the_next() -> None:
    kept: list[torch.Tensor] = []

    def step() -> None:
        if not kept:
            kept.append(torch.arange(4))
        kept[0].to(AWAY)

    with Remembering() as watched:
        step()
    assert len(watched.sent) == 1
    with Answering(watched.sent) as answering:
        step()
    assert answering.reason == COPIES


def test_nothing_is_seen_where_nobody_watches() -> None:
    with CaptureCheck() as check:
        with unwatched():
            assert torch.tensor([1, 2], device=AWAY).device.type == AWAY
            OUTSIDE.to(AWAY)
        torch.arange(4).to(AWAY)
    assert check.reason is None and len(check.sent) == 1
    with unwatched():
        assert torch.arange(4).tolist() == [0, 1, 2, 3]


def test_modes_are_gone_afterwards_also_when_it_fails() -> None:
    for kind in (Remembering, CaptureCheck, lambda: Answering([])):
        with pytest.raises(ZeroDivisionError), kind():
            1 / 0
    assert not _get_current_dispatch_mode_stack() and not _get_current_function_mode_stack()


# -- any program ------------------------------------------------------------------------------------------

PLACES = st.integers(0, 50)
OPERATIONS = st.one_of(
    st.tuples(st.just("range"), st.integers(0, 3)),
    st.tuples(st.just("literal"), st.integers(0, 3)),
    st.tuples(st.sampled_from(["add", "add_", "copy_", "out"]), PLACES, PLACES, PLACES),
    st.tuples(st.sampled_from(["view", "flip", "fill_", "send", "send"]), PLACES),
)
OTHERS = st.one_of(
    st.tuples(st.just("outside"), st.integers(0, 1)), st.tuples(st.sampled_from(["random", "random_"]), PLACES)
)
Program = list[tuple[Any, ...]]


def _run(program: Program, outside: list[torch.Tensor], seed: int, watched: Constants | None) -> Any:
    """The bits of all that was sent, each with whether it was remembered."""
    torch.manual_seed(seed)
    outside = [tensor.clone() for tensor in outside]
    made, found = [torch.zeros(4)], []
    if watched is not None:
        watched.__enter__()
        made = [torch.zeros(4)]
    try:
        for name, *numbers in program:
            a, b, c = ([made[number % len(made)] for number in numbers] + made[:1] * 3)[:3]
            if name == "send":
                known = watched is not None and watched.holds(a)
                a.to(AWAY, torch.float64)
                found.append((known, _bits(a.clone())))
                continue
            made.append(
                {
                    "range": lambda n=numbers[0]: torch.arange(n, n + 4).float(),
                    "literal": lambda n=numbers[0]: torch.tensor([1.0, 2.0, 3.0, n]),
                    "outside": lambda n=numbers[0]: outside[n % 2],
                    "random": lambda: torch.randn(4),
                    "random_": lambda a=a: a.uniform_(),
                    "add": lambda a=a, b=b: a + b,
                    "add_": lambda a=a, b=b: a.add_(b, alpha=0.5),
                    "copy_": lambda a=a, b=b: a.copy_(b),
                    "out": lambda a=a, b=b, c=c: torch.add(a, b, out=c),
                    "view": lambda a=a: a.view(2, 2).view(4),
                    "flip": lambda a=a: a.flip(0),
                    "fill_": lambda a=a: a.view(2, 2)[1].fill_(2.0) is None or a,
                }[name]()
            )
    finally:
        if watched is not None:
            watched.__exit__(None, None, None)
    return found


def _answered(program: Program, outside: list[torch.Tensor], seed: int, watched: Remembering) -> str | None:
    answering = Answering(watched.sent)
    _run(program, outside, seed, answering)
    return answering.reason


@settings(deadline=None, max_examples=120)
@given(program=st.lists(st.one_of(OPERATIONS, OPERATIONS, OTHERS), max_size=12))
def test_what_is_remembered_never_depends_on_anything_else(program: Program) -> None:
    runs = [
        ([torch.full((4,), 0.25), torch.full((4,), 0.75)], 1),
        ([torch.full((4,), 1.25), torch.full((4,), 2.75)], 2),
    ]
    one, other = (_run(program, *run, Remembering()) for run in runs)
    plain = _run(program, *runs[0], None)
    assert [bits for _, bits in one] == [bits for _, bits in plain], "what runs is what ran"
    for (known, bits), (also, others) in zip(one, other, strict=True):
        assert known == also and (not known or bits == others)
    watched = Remembering()
    _run(program, *runs[0], watched)
    assert _answered(program, *runs[1], watched) == (None if all(known for known, _ in one) else COPIES)


@settings(deadline=None, max_examples=100)
@given(program=st.lists(OPERATIONS, max_size=12))
def test_all_that_is_made_of_numbers_is_remembered(program: Program) -> None:
    assert all(known for known, _ in _run(program, [OUTSIDE, OUTSIDE], 0, Remembering()))
