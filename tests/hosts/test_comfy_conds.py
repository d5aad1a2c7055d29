# SPDX-License-Identifier: Apache-2.0
"""Conditions in main memory reach the GPU once, whatever changes, and are those that the host would have copied there.

There is no GPU here: `meta` stands for one where copies are counted, main memory by another name where numbers matter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backbones import make
from hypothesis import given
from hypothesis import strategies as st
from patchers import CONFIG, TOLERANCE, distance, patcher_around, sample

from nexfort_engine.constants import bits
from nexfort_engine.hosts import comfy as host
from nexfort_engine.hosts import comfy_conds
from nexfort_engine.hosts.comfy_conds import Conds

CPU, AWAY, RENAMED = torch.device("cpu"), torch.device("meta"), torch.device("cpu:0")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool)


def copies(conds: Conds, *calls: dict[str, Any]) -> int:
    """How many tensors the calls copied."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._to_copy.default:
                self.count += 1
            return func(*args, **(kwargs or {}))

    with Counting() as counting:
        for call in calls:
            assert all(tensor.device == AWAY for tensor in conds.sent((), call, AWAY)[1].values())
    return counting.count


def test_a_value_is_copied_once_and_a_changed_one_again() -> None:
    conds, one = Conds(), {"guidance": torch.tensor([3.5])}
    assert copies(conds, one, {"guidance": torch.tensor([3.5])}, one) == 1
    assert copies(conds, {"guidance": torch.tensor([4.0])}, one, {"guidance": torch.tensor([4.0])}) == 1
    assert copies(conds, {"guidance": torch.tensor([-0.0])}, {"guidance": torch.tensor([0.0])}) == 2
    assert copies(conds, {"c_ar": torch.tensor([3.5])}) == 1
    assert copies(conds, {"guidance": torch.tensor([[3.5]])}, {"guidance": torch.tensor([3.5]).double()}) == 2
    one["guidance"][0] = 7  # in place: the kept value is one of its own
    assert copies(conds, one, {"guidance": torch.tensor([7.0])}) == 1
    conds.clear()
    assert copies(conds, one) == 1


def test_values_that_take_turns_are_all_kept_and_a_thousand_are_not() -> None:
    conds, values = Conds(), [{"guidance": torch.tensor([float(i)])} for i in range(1000)]
    assert copies(conds, *values) == 1000
    assert copies(conds, *values[-comfy_conds._MOST :]) == 0
    assert len(conds._sent["guidance", AWAY]) == comfy_conds._MOST


def test_large_values_are_fewer() -> None:
    conds, values = (
        Conds(),
        [{"c": torch.full((comfy_conds._MOST_BYTES // 3,), i, dtype=torch.uint8)} for i in range(5)],
    )
    assert copies(conds, *values, *values[2:]) == 5 and len(conds._sent["c", AWAY]) == 3


def test_what_need_not_or_cannot_be_kept_stays_what_it_is() -> None:
    large = torch.empty(comfy_conds._MOST_BYTES + 1, dtype=torch.uint8)
    given = {"there": torch.empty(3, device=AWAY), "large": large, "number": 3, "none": None, "text": "a"}
    given |= {"sparse": torch.eye(2).to_sparse(), "own": torch.nn.Parameter(torch.ones(2)), "shapes": [[1, 2], (3,)]}
    _, found = Conds().sent((), given, AWAY)
    assert list(found) == list(given) and all(found[name] is given[name] for name in given if name != "shapes")
    assert found["shapes"] == given["shapes"]
    on_processor = {"guidance": torch.tensor([3.5])}
    assert Conds().sent((), on_processor, CPU)[1]["guidance"] is on_processor["guidance"]


def test_tensors_in_lists_are_sent_as_well() -> None:
    conds = Conds()
    for _ in range(2):
        found = conds.sent((), {"ref_latents": [torch.ones(2), torch.zeros(3)]}, AWAY)[1]["ref_latents"]
        assert [tensor.device for tensor in found] == [AWAY] * 2 and [len(tensor) for tensor in found] == [2, 3]
    assert len(conds._sent["ref_latents", AWAY]) == 2


@given(st.lists(st.floats(width=16), max_size=5), st.sampled_from(DTYPES))
def test_it_is_the_same_tensor_and_nobody_else_s(numbers: list[float], dtype: torch.dtype) -> None:
    value = torch.tensor(numbers)
    value = value.to(dtype) if dtype.is_floating_point else value.nan_to_num(7.0, 8.0, 9.0).to(dtype)
    conds, wanted = Conds(), bits(value).clone()
    for _ in range(3):
        found = conds.sent((None, value), {}, RENAMED)[0][1]
        assert found.dtype == dtype and found.shape == value.shape and torch.equal(bits(found), wanted)
        found.fill_(1)  # by a network that writes to it: the next call's is whole
    assert torch.equal(bits(value), wanted)


@pytest.mark.comfy
@pytest.mark.usefixtures("comfyui", "artefact_cache")
def test_steps_copy_a_prompt_and_its_guidance_once_and_are_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """By ComfyUI's own sampler, and gone with the model."""
    patcher = patcher_around(make("comfy_flux").module, flux=True)
    send = Conds.sent
    monkeypatch.setattr(Conds, "sent", lambda self, args, kwargs, _: send(self, args, kwargs, RENAMED))
    compiled = host.attach(patcher, CONFIG)
    conds = host._engines(patcher.model.diffusion_model).conds
    for number, strength in enumerate((3.5, 1.0), 1):

        def guided(*prompts: Any, strength: float = strength) -> Any:
            return tuple([[words, {**told, "guidance": strength}] for words, told in prompt] for prompt in prompts)

        assert distance(sample(patcher, edit=guided), sample(compiled, edit=guided)) < TOLERANCE
        prompts = [len(kept) for (name, _), kept in conds._sent.items() if name == 3]
        assert len(conds._sent["guidance", RENAMED]) == number and prompts == [1]
    host._release(compiled, True)
    assert not conds._sent
