# SPDX-License-Identifier: Apache-2.0
"""The promises about what changes between two runs, over tiny backbones: options, weights, attributes, dtypes.

What contracts have in common is said in contracts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from backbones import make, tensors_of
from older_host import is_older
from subjects import (
    MOVES,
    TOLERANCE,
    Subject,
    cold_subject,
    distance,
    equal_bits,
    every,
    graph_subject,
    graphs_as_they_are,
    names,
    new_since,
)
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

pytestmark = pytest.mark.usefixtures("threads", "artefact_cache")
with_options = pytest.mark.parametrize(
    "name", names(where=lambda kind: bool(kind.edits), few=("torch_dit", "comfy_wan"))
)


@with_options
def test_options_added_later_act_as_in_eager(host: str) -> None:
    with graphs_as_they_are():
        cold = graph_subject(host)
        before, wanted = cold.run(), cold.eager()
        for label, edit in cold.tiny.kind.edits.items():
            options: dict[str, Any] = {}
            edit(options)
            edited = cold.eager(options=options)
            if equal_bits(edited, wanted) and is_older():
                continue  # its network does not ask for this option yet
            assert distance(edited, wanted) > MOVES, f"{label} does not matter to the network"
            for _ in range(2):
                assert distance(cold.run(options=options), edited) < TOLERANCE, label
            mark = cold.report.mark()
            assert equal_bits(cold.run(), before), f"{label} is still felt after it was removed"
            assert not new_since(cold, mark)


@with_options
def test_options_of_the_first_call_bind_no_later_one(host: str) -> None:
    with graphs_as_they_are():
        cold = cold_subject(make(host))
        options: dict[str, Any] = {}
        cold.tiny.kind.edits["override"](options)
        assert distance(cold.eager(options=options), cold.eager()) > MOVES
        assert cold.same(options=options) < TOLERANCE
        assert cold.same() < TOLERANCE
        mark = cold.report.mark()
        assert cold.same(options=options) < TOLERANCE and cold.same(batch=1) < TOLERANCE
        assert not new_since(cold, mark)


@pytest.mark.parametrize("name", names(where=lambda kind: kind.control is not None, few=["comfy_unet"]))
def test_a_controlnet_acts_as_in_eager(tiny: Subject) -> None:
    before = tiny.run()
    assert distance(tiny.eager(control=True), tiny.eager()) > MOVES
    given: list[dict[str, Any]] = []
    for module in (tiny.module, tiny.compiled):
        args, kwargs = tiny.tiny.make_inputs(batch=3, seed=1, control=True)
        with torch.inference_mode():
            result = tensors_of(module(*args, **kwargs))
        given.append({"result": result, "left": {name: len(items) for name, items in kwargs["control"].items()}})
    assert distance(given[1]["result"], given[0]["result"]) < TOLERANCE
    assert given[1]["left"] == given[0]["left"], "networks take items out of the lists, once"
    with graphs_as_they_are():
        assert cold_subject(tiny.tiny).same(control=True) < TOLERANCE, "while it is planned as well"
    assert equal_bits(tiny.run(), before)


def _weights(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for sub in module.modules():
        for name, weight in list(sub._parameters.items()):
            if weight is not None:
                yield sub, name, weight


def _replaced(sub: nn.Module, name: str, value: torch.Tensor) -> None:
    setattr(sub, name, nn.Parameter(value, requires_grad=False))


def _replaced_in_inference_mode(sub: nn.Module, name: str, value: torch.Tensor) -> None:
    with torch.inference_mode():  # as ComfyUI's patcher applies a LoRA
        _replaced(sub, name, value.clone())


def _updated_in_place(sub: nn.Module, name: str, value: torch.Tensor) -> None:
    with torch.no_grad():
        sub._parameters[name].copy_(value)  # type: ignore[union-attr]


def _data_swapped(sub: nn.Module, name: str, value: torch.Tensor) -> None:
    sub._parameters[name].data = value  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "change", [_replaced, _replaced_in_inference_mode, _updated_in_place, _data_swapped], ids=lambda c: c.__name__
)
@every
def test_changed_weights_are_honoured_and_cost_nothing(tiny: Subject, change: Callable[..., None]) -> None:
    before, wanted = tiny.run(), tiny.eager()
    originals = [(sub, name, weight, weight.detach().clone()) for sub, name, weight in _weights(tiny.module)]
    mark = tiny.report.mark()
    generator = torch.Generator().manual_seed(5)
    try:
        for sub, name, _, value in originals:
            change(sub, name, value * (1 + 0.3 * torch.randn(value.shape, generator=generator)))
        changed = tiny.eager()
        assert distance(changed, wanted) > MOVES
        assert distance(tiny.run(), changed) < TOLERANCE
    finally:
        for sub, name, weight, value in originals:
            if sub._parameters[name] is weight:
                change(sub, name, value)
            else:
                sub._parameters[name] = weight
    assert equal_bits(tiny.run(), before)
    assert not new_since(tiny, mark)


@every
def test_changed_attribute_of_a_block_is_honoured(host: str) -> None:
    with graphs_as_they_are():
        tiny = graph_subject(host)
        before, wanted = tiny.run(), tiny.eager()
        for sub, name in _numbers(tiny):
            value = getattr(sub, name)
            setattr(sub, name, value + 0.7)
            try:
                changed = tiny.eager()
                if distance(changed, wanted) > MOVES:
                    assert distance(tiny.run(), changed) < TOLERANCE, f"{name} of a {type(sub).__name__}"
                    break
            finally:
                setattr(sub, name, value)
        else:
            pytest.fail("no number that a block reads matters to the network")
        assert equal_bits(tiny.run(), before)


def _numbers(tiny: Subject) -> Iterator[tuple[nn.Module, str]]:
    """The plain floats in the blocks of regions that are there more than once; what forward reads comes first."""
    kinds = [region.kind for region in tiny.engine.regions]
    blocks = [r.module for r in tiny.engine.regions if kinds.count(r.kind) > 1] or [tiny.module]
    found = [(sub, name) for block in blocks for sub in block.modules() for name in ("gain", "eps", "scale")]
    yield from ((sub, name) for sub, name in found if type(vars(sub).get(name)) is float)


def _in_bfloat16(module: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]]) -> list[torch.Tensor]:
    def cast(value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(torch.bfloat16) if floating else value

    args, kwargs = call
    with torch.inference_mode():
        return tensors_of(module(*map(cast, args), **{key: cast(value) for key, value in kwargs.items()}))


@every
def test_changed_dtype_is_honoured(host: str) -> None:
    with graphs_as_they_are():
        cold = graph_subject(host)
        exact = cold.eager()
        assert distance(cold.run(), exact) < TOLERANCE
        cold.tiny.to(torch.bfloat16)
        rounded = _in_bfloat16(cold.module, cold.tiny.make_inputs())
        with sdpa_kernel(SDPBackend.MATH):
            otherwise = _in_bfloat16(cold.module, cold.tiny.make_inputs())
        found = _in_bfloat16(cold.compiled, cold.tiny.make_inputs())
        assert {t.dtype for t in found} == {t.dtype for t in rounded}
        # the distance rule: two eager runs that differ in the attention kernel alone are the floor
        assert distance(found, rounded) <= 2 * distance(otherwise, rounded)
        assert distance(_floats(found), exact) <= 1.1 * distance(_floats(rounded), exact)
        assert distance(_floats(rounded), exact) > TOLERANCE
        cold.tiny.to(torch.float32)  # the weights stay rounded
        mark = cold.report.mark()
        assert cold.same() < TOLERANCE < distance(cold.eager(), exact)
        assert not new_since(cold, mark) and not cold.report.as_dict()["eager"]


def _floats(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.float() for tensor in tensors]
