# SPDX-License-Identifier: Apache-2.0
"""Conditions in main memory reach the GPU once, whatever changes, and are those that the host would have copied there.

There is no GPU here: `meta` stands for one where copies are counted, main memory by another name where numbers matter.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from backbones import make
from hypothesis import given
from hypothesis import strategies as st
from patchers import CONFIG, TOLERANCE, distance, patcher_around, sample

from nexfort_engine.cudagraphs.host_constants import bits
from nexfort_engine.hosts.comfy import conditioning
from nexfort_engine.hosts.comfy import model as host
from nexfort_engine.hosts.comfy.conditioning import Conds

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


@pytest.mark.parametrize("count", [2, 20])
def test_values_that_take_turns_are_all_kept(count: int) -> None:
    conds, values = Conds(), [{"guidance": torch.tensor([float(i)])} for i in range(count)]
    assert copies(conds, *values * 10) == count


def test_what_nobody_asks_for_any_more_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then what is beyond the most that is kept is left to the host, which copies it as it did."""
    monkeypatch.setattr(conditioning, "_MOST_BYTES", 24)
    conds, values = Conds(), [torch.full((5,), i, dtype=torch.int16) for i in range(3)]
    for name in ("one", "two"):
        assert copies(conds, *[{name: values[0]}] * 2) == 1
    assert conds.sent((), {"three": values[2]}, AWAY)[1]["three"] is values[2]
    assert copies(conds, *[{"one": values[0]}] * (conditioning._LATELY - 1)) == 0
    assert copies(conds, {"three": values[2]}, {"one": values[0]}, {"three": values[2]}) == 1, "in the place of two"
    assert conds.sent((), {"two": values[0]}, AWAY)[1]["two"] is values[0]


def test_threads_share_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditioning, "_MOST_BYTES", 2**20)
    conds, values = Conds(), [torch.full((size,), size) for size in (1, 90_000, 5, 80_000, 1000)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            calls = [values[i % 5] for i in range(2000)]
            for value, (found,) in zip(calls, pool.map(lambda x: conds.sent((x,), {}, RENAMED)[0], calls), strict=True):
                assert torch.equal(found, value)
    finally:
        sys.setswitchinterval(before)


def test_what_need_not_or_cannot_be_copied_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditioning, "_MOST_BYTES", 16)
    given = {
        "there": torch.empty(3, device=AWAY),
        "large": torch.ones(17, dtype=torch.uint8),
        "none": None,
        "text": "a",
    }
    given |= {
        "sparse": torch.eye(2).to_sparse(),
        "own": torch.nn.Parameter(torch.ones(2)),
        "options": {"a": torch.ones(1)},
    }
    given |= {"quantised": torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)}
    given |= {"learnt": torch.ones(2, requires_grad=True)}
    conds = Conds()
    for _ in range(2):
        _, found, step_invariant = conds.sent((), given, AWAY)
        assert list(found) == list(given) and all(found[name] is given[name] for name in given) and not step_invariant
    on_processor = {"guidance": torch.tensor([3.5])}
    assert conds.sent((), on_processor, CPU)[1]["guidance"] is on_processor["guidance"]


def test_tensors_in_lists_are_copied_as_the_host_does() -> None:
    """Of lists by name, and no deeper."""
    conds, inside = Conds(), torch.ones(2)
    given = {"ref_latents": [torch.ones(2), torch.zeros(3)], "nested": [[inside], (3,)]}
    (placed,), found, _ = conds.sent(([inside],), given, AWAY)
    assert placed[0] is inside and found["nested"][0][0] is inside and found["nested"][1] == (3,)
    assert [tensor.device for tensor in found["ref_latents"]] == [AWAY] * 2
    assert [len(tensor) for tensor in found["ref_latents"]] == [2, 3]


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


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from([None, torch.bfloat16, torch.float16]), st.booleans()), max_size=9
    )
)
def test_a_name_is_that_of_bits_in_a_run_and_the_prompt_has_the_dtype_that_is_asked_for(calls: list[Any]) -> None:
    conds, names, run = Conds(), dict[Any, Any](), torch.ones(2)
    prompts = [torch.randn(1, 5, 3, generator=torch.Generator().manual_seed(number)) for number in range(3)]
    for number, dtype, another in calls:
        run = torch.ones(2) if another else run
        args, _, step_invariant = conds.sent((None, None, None, prompts[number]), {}, RENAMED, dtype, run)
        tensor, name = step_invariant[id(args[3])]
        assert tensor is args[3] and torch.equal(tensor, prompts[number].to(dtype or torch.float32))
        assert names.setdefault((number, dtype, id(run)), name) == name
        names["held", id(run)] = run  # or another has its id
    told = [name for key, name in names.items() if key[0] != "held"]
    assert len(set(told)) == len(told) and not conds.sent((None,) * 3 + (prompts[0],), {}, RENAMED)[2]


@pytest.mark.comfy
@pytest.mark.usefixtures("comfyui", "artefact_cache", "quick")
def test_steps_copy_a_prompt_and_its_guidance_once_and_are_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """By ComfyUI's own sampler, and gone with the model."""
    patcher = patcher_around(make("comfy_flux").module, flux=True)
    send = Conds.sent
    monkeypatch.setattr(Conds, "sent", lambda self, args, kwargs, *_: send(self, args, kwargs, RENAMED))
    compiled = host.attach(patcher, CONFIG)
    conds = host._engines(patcher.model.diffusion_model).conds
    for number, strength in enumerate((3.5, 1.0), 1):

        def guided(*prompts: Any, strength: float = strength) -> Any:
            return tuple([[words, {**told, "guidance": strength}] for words, told in prompt] for prompt in prompts)

        assert distance(sample(patcher, edit=guided), sample(compiled, edit=guided)) < TOLERANCE
        kept = {name: len(values) for (name, _), values in conds._kept.items() if values}
        assert kept["guidance"] == number and kept[3] == 1, "the prompt is what apply_model is called with fourth"
    host._release(compiled, True)
    assert not conds._kept
