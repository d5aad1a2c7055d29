# SPDX-License-Identifier: Apache-2.0
"""A call of a backbone: its key, and the same call with other tensors, those of its options included."""

from __future__ import annotations

from typing import Any

import torch

from nexfort_engine.cudagraphs.step_call import StepCall, overlaps, places_of, separate
from nexfort_engine.guards.call_spec import Flat, flatten_call

FED = [(0, "bias"), (0, "more", "first"), (0, "more", "second")]


def call(*args: Any, fed: Any = FED, **kwargs: Any) -> StepCall:
    flat = Flat()
    return StepCall.of(flatten_call(args, kwargs, flat), flat, list(fed))


def options(**more: Any) -> dict[str, Any]:
    inner = {"first": torch.ones(2), "second": torch.ones(3), "kept": "as it is"}
    return {"bias": torch.zeros(4), "more": inner, "unused": torch.ones(5), **more}


def test_other_tensors_stand_in_the_places_of_its_own_and_the_caller_keeps_what_he_gave() -> None:
    given = options()
    before = {**given, "more": dict(given["more"])}
    one = call(torch.zeros(2, 2), given, scale=7)
    assert [tuple(t.shape) for t in one.tensors] == [(2, 2), (4,), (2,), (3,)]
    others = [torch.full_like(t, 5.0) for t in one.tensors]
    args, kwargs = one.with_tensors(others)
    assert args[0] is others[0] and args[1]["bias"] is others[1] and kwargs == {"scale": 7}
    assert args[1]["more"]["first"] is others[2] and args[1]["more"]["second"] is others[3]
    assert args[1]["more"]["kept"] == "as it is" and args[1]["unused"] is given["unused"]
    assert {k: v for k, v in given.items() if k != "more"} == {k: v for k, v in before.items() if k != "more"}
    assert all(given["more"][key] is value for key, value in before["more"].items())
    assert one.plainly(lambda *args, **kwargs: (args, kwargs))[0][1] is given


def test_calls_of_one_key_have_tensors_alike_in_the_same_places() -> None:
    first = call(torch.zeros(2, 2), options())
    assert call(torch.ones(2, 2), options(bias=torch.ones(4))).key() == first.key()
    assert call(torch.ones(2, 2), options(unused=None)).key() == first.key(), "nobody uses it"
    others = [
        call(torch.zeros(2, 3), options()),
        call(torch.zeros(2, 2), options(bias=torch.zeros(6))),
        call(torch.zeros(2, 2), options(bias=torch.zeros(4).double())),
        call(torch.zeros(2, 2), options(bias=torch.zeros(8)[::2])),
        call(torch.zeros(2, 2), options(bias=None)),
        call(torch.zeros(2, 2), options(more=3)),
        call(torch.zeros(2, 2), options(more={"first": torch.ones(2)})),
        call(torch.zeros(2, 2), options(more={"second": torch.ones(2)})),
    ]
    assert all(other.key() != first.key() for other in others)
    assert len({other.key() for other in others}) == len(others)


def test_tensors_are_found_by_what_they_are_and_not_by_what_they_hold() -> None:
    given = options()
    second, bias = given["more"]["second"], given["bias"]
    assert places_of([second, bias, second], [{}, given]) == [(1, "more", "second"), (1, "bias")]
    given["again"] = {"there": bias}
    assert set(places_of([bias], [given]) or ()) == {(0, "bias"), (0, "again", "there")}, "both are fed"
    assert places_of([], [given]) == []
    assert places_of([bias, bias.clone()], [given]) is None


def test_an_expanded_tensor_cannot_be_written_to() -> None:
    assert overlaps(torch.zeros(1, 3).expand(4, 3)) and not overlaps(torch.zeros(1, 3).expand(1, 3))
    assert not overlaps(torch.zeros(4, 3).t())
    for given in (torch.randn(1, 3).expand(4, 3), torch.randn(2, 1, 3).expand(2, 5, 3), torch.randn(3, 4).t()):
        found = separate(given)
        assert torch.equal(found, given) and not overlaps(found) and (found is given) == (not overlaps(given))
    wide, slim = (call(torch.zeros(2, 2), options(bias=t)) for t in (torch.ones(4), torch.ones(1).expand(4)))
    assert wide.key() == slim.key()
