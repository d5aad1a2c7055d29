# SPDX-License-Identifier: Apache-2.0
"""What is made of a prompt is made once for it, and is never that of another: on the CPU, with pretended graphs."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from attending import TEXT, WIDE, Attending
from hypothesis import HealthCheck, given, settings
from prepared_weights import Host
from pretended_graph import Graph, pretend
from torch import nn

from nexfort_engine.cache.store import Store
from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.cudagraphs import step_graphs
from nexfort_engine.engine import Engine
from nexfort_engine.modules.tree import ABSENT
from nexfort_engine.runtime.forward_context import Calls

T = torch.Tensor
ALL = 5  # calls of a step on its prompt: the projection, two to make it longer, and a part of each block


class Network(nn.Module):
    """A projection of the prompt, code of its own that a test gives, and two blocks that attend to what comes of it."""

    def __init__(self, own: Callable[[T, T], T]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Sequential(nn.Linear(64, WIDE), nn.SiLU(), nn.Linear(WIDE, WIDE))
        self.blocks = nn.ModuleList(Attending() for _ in range(2))
        self.__dict__["own"] = own

    def forward(self, x: T, time: T, prompt: T) -> T:
        prompt = self.own(self.project(prompt), x)
        for block in self.blocks:
            x = block(x, prompt, time)
        return x


def joined(prompt: T, _: T) -> T:
    return torch.cat([prompt, prompt.new_zeros(prompt.shape[0], 2, WIDE)], 1)


class Steps:
    """Steps of a network on prompts by number, each compared with eager."""

    def __init__(self, store: Store, own: Callable[[T, T], T] = joined, *, device: str = "cpu", **options: Any) -> None:
        self.device, self.host = device, Host()
        self.root = Network(own).eval().requires_grad_(False).to(device)
        config = CompileConfig.parse({"options": options})
        self.engine = Engine(self.root, config, store, provider=self.host)  # type: ignore[arg-type]
        self.seeds = itertools.count()

    def __call__(self, prompt: int, *, tokens: int = 6, text: int = TEXT, named: bool = True) -> None:
        generator = torch.Generator().manual_seed(next(self.seeds))
        x, time = (torch.randn(2, *size, WIDE, generator=generator).to(self.device) for size in ((tokens,), ()))
        words = torch.randn(2, text, 64, generator=torch.Generator().manual_seed(prompt)).to(self.device)
        with torch.inference_mode():
            wanted = self.root(x, time, words.clone())
            calls = Calls(step_invariant={id(words): (words, (prompt, text))} if named else {})
            with self.engine.active(watch_root=True, calls=calls):
                found = self.root(x, time, words)
        assert torch.allclose(found, wanted, atol=1e-4), float((found - wanted).abs().max())

    def kept(self) -> list[int]:
        """How many calls are kept for each graph."""
        steps = self.engine.graphs._steps.values()  # type: ignore[union-attr]
        return [step.invariants.count if step.invariants is not None else 0 for step in steps if step.graph is not None]

    def notes(self) -> str:
        data = self.engine.report.as_dict()
        assert not data["eager"], data["eager"]
        return "; ".join(data["notes"])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """What one of the engines compiles, the others load."""
    return Store(tmp_path_factory.mktemp("store"))


@pytest.fixture(autouse=True)
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Graph]]:
    """The graphs in the order in which they were replayed."""
    pretend(monkeypatch)
    own, replay, found = CompileConfig.lowering_options, Graph.replay, []
    # as on a GPU
    monkeypatch.setattr(
        CompileConfig,
        "lowering_options",
        lambda self, device: {**own(self, device), "nexfort.prompt_once": self.prompt_once},
    )

    def noted(self: Graph) -> None:
        found.append(self)
        replay(self)

    monkeypatch.setattr(Graph, "replay", noted)
    return found


def test_a_region_that_was_answered_is_watched_when_it_runs(store: Store) -> None:
    """All of it is in main memory here, which no graph bears."""
    steps = Steps(store)
    for prompt, named in ((1, True), (1, True), (1, True), (2, True), (3, False), (3, False), (3, False)):
        steps(prompt, named=named)
        assert not any(binding.artefact.unwatched for region in steps.engine.regions for binding in region.bindings)


def test_it_is_made_once_for_a_prompt(store: Store, replays: list[Graph]) -> None:
    steps = Steps(store)
    for _ in range(6):
        steps(1)
    assert len(Graph.made) == 2 and steps.kept() == [ALL] and not steps.notes()
    of_prompt, whole = Graph.made
    assert replays == [whole] * 5, "what the observed step made of the prompt is what is kept"
    steps(2)
    assert replays[5:] == [of_prompt, whole]
    for prompt in (2, 1, 1):
        steps(prompt)
    assert replays[7:] == [whole, of_prompt, whole, whole] and len(Graph.made) == 2


def test_a_prompt_without_a_name_is_made_in_each_step(store: Store) -> None:
    steps = Steps(store)
    for prompt in (1, 1, 2, 1):
        steps(prompt, named=False)
    assert steps.kept() == [0] and len(Graph.made) == 1
    for prompt in (1, 1, 2, 2, 1):
        steps(prompt)
    assert sorted(steps.kept()) == [0, ALL]


def test_it_can_be_switched_off(store: Store) -> None:
    steps = Steps(store, **{"compile.prompt_once": False})
    for prompt in (1, 1, 1, 2):
        steps(prompt)
    assert steps.kept() == [0] and len(Graph.made) == 1


def test_it_is_made_anew_of_other_weights(store: Store, replays: list[Graph]) -> None:
    steps = Steps(store)
    for _ in range(3):
        steps(1)
    for said in ("two", "three"):
        with torch.no_grad():
            steps.root.blocks[1].k.weight.data.mul_(1.5)  # type: ignore[union-attr,index]
            steps.root.project[0].weight.data.neg_()
        steps.host.said = said
        steps(1)
        steps(1)
    assert steps.kept() == [ALL] and replays.count(Graph.made[0]) == 2


def test_where_the_host_cannot_say_what_its_weights_are_nothing_is_kept(store: Store) -> None:
    steps = Steps(store)
    steps.host.said = None
    for _ in range(4):
        steps(1)
        with torch.no_grad():
            steps.root.blocks[0].v.weight.data.neg_()  # type: ignore[union-attr,index]
    assert steps.kept() == [0]
    steps.host.said = "one"
    for _ in range(3):
        steps(1)
    assert ALL in steps.kept()


def doubled(prompt: T, _: T) -> T:
    return prompt.mul_(2)


def filled(prompt: T, x: T) -> T:
    longer = joined(prompt, x)
    longer[:, -1] = x.mean(1)
    return longer


def made_again(prompt: T, _: T) -> T:
    first = prompt * 2
    prompt.mul_(3)
    return first + prompt * 2


def made_twice(prompt: T, _: T) -> T:
    first, second = torch.zeros_like(prompt), torch.zeros_like(prompt)
    first[:, ::2], second[:, 1::2] = prompt[:, ::2], prompt[:, 1::2] * 3
    return first - second


def of_both(prompt: T, _: T) -> T:
    z = torch.view_as_complex(prompt.unflatten(-1, (-1, 2)))
    both = torch.bmm(z, z.transpose(1, 2)), torch.bmm(z.conj(), z.transpose(1, 2))
    return prompt + (both[0].real - both[1].real).mean(-1, keepdim=True) / 100


def mixed(prompt: T, x: T) -> T:
    return prompt + x.mean(1, keepdim=True)


def viewed(prompt: T, _: T) -> T:
    return prompt.transpose(0, 1).flip(1).transpose(0, 1)[:, 1:]


@pytest.mark.parametrize(
    ("own", "note"),
    [
        *((doubled, "its code writes to it (aten::mul_)"), (filled, "writes to it (aten::copy_)")),
        *((made_again, "(aten::mul_)"), (made_twice, "(aten::copy_)")),
        *((of_both, ""), (mixed, ""), (viewed, "")),
    ],
)
@pytest.mark.parametrize("latched", [False, True])
def test_what_the_networks_own_code_does_with_it(store: Store, own: Any, note: str, latched: bool) -> None:
    """Each step is compared with eager, that in which something is found out too, and those that are never captured."""
    steps = Steps(store, own)
    if latched:
        steps.engine.regions[-1].latch("for a test")
    for prompt in (1, 1, 1, 2, 1, 2, 2):
        steps(prompt)
    notes = "; ".join(steps.engine.report.as_dict()["notes"])
    assert note in notes and ("made in each step" in notes) is bool(note)
    assert latched or bool(steps.kept()[-1]) is not bool(note)


def test_kernels_of_others_may_write_anywhere(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of an operator, which says what it writes to."""
    triton = pytest.importorskip("triton", reason="Triton missing")
    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", lambda self, tensor: tensor.numpy().__iadd__(1))
    kernel = object.__new__(triton.runtime.jit.JITFunction)
    kernel.__name__ = "theirs"

    def launching(prompt: T, _: T) -> T:
        made = prompt * 2
        kernel.run(made)
        return made

    steps = Steps(store, launching)
    for prompt in (1, 1, 1, 2, 1):
        steps(prompt)
    assert "launches a Triton kernel" in steps.notes() and steps.kept() == [0]


class Scaled(Attending):
    """A block that multiplies its prompt by numbers that are no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(WIDE))

    def forward(self, x: T, prompt: T, time: T) -> T:
        return super().forward(x, prompt * self.factor, time)


def test_what_is_made_of_a_buffer_is_made_in_each_step(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host says nothing of it."""
    monkeypatch.setattr(sys.modules[__name__], "Attending", Scaled)
    steps = Steps(store)
    for prompt in (1, 1, 1, 2, 1):
        steps(prompt)
        for block in steps.root.blocks:
            block.factor.mul_(1.5)
    assert steps.kept() == [ALL - 2]


class Returning(Network):
    """A network that also returns what it makes of the prompt, whose caller writes to it."""

    def forward(self, x: T, time: T, prompt: T) -> T:
        made = self.project(prompt)
        out = super().forward(x, time, prompt)
        return out, made  # type: ignore[return-value]


def test_what_a_caller_is_given_is_his(store: Store) -> None:
    steps = Steps(store)
    steps.root.__class__ = Returning
    for number, prompt in enumerate((1, 1, 1, 2, 1)):
        x, time = torch.randn(2, 6, WIDE), torch.randn(2, WIDE)
        words = torch.randn(2, TEXT, 64, generator=torch.Generator().manual_seed(prompt))
        with torch.inference_mode():
            wanted = steps.root(x, time, words.clone())
            calls = Calls(step_invariant={id(words): (words, prompt)})
            with steps.engine.active(watch_root=True, calls=calls):
                found = steps.root(x, time, words)
            for one, other in zip(wanted, found, strict=True):
                assert torch.allclose(one, other, atol=1e-4), number
            found[1].zero_()
    assert "returns some of it" in steps.notes() and steps.kept() == [0]


class OneBuffer(Host):
    """A weight provider that has every block's weights in the same memory, one after another."""

    signs, copies, hidden = ("away",), frozenset(), {"away": ABSENT}  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.buffer = torch.empty(1 << 22)

    def can_lease(self, layer: nn.Module) -> bool:
        return isinstance(layer, nn.Linear)

    needs_host_forward = covers = can_lease

    def dtype(self, layer: nn.Module, name: str) -> torch.dtype:
        return getattr(layer, name).dtype

    def acquire(self, layers: list[nn.Module], _: torch.device) -> Any:
        at, rows = 0, []
        for layer in layers:
            rows.append({})
            for name, weight in layer.named_parameters():
                rows[-1][name] = self.buffer[at : at + weight.numel()].view(weight.shape).copy_(weight)
                at += weight.numel()
        return SimpleNamespace(tensors=rows, kept=False, release=lambda: None, reacquire=lambda: False)


def test_weights_that_are_fetched_where_others_were_are_no_others(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "Host", OneBuffer)
    steps = Steps(store)
    for layer in steps.root.modules():
        if isinstance(layer, nn.Linear):
            layer.__dict__["away"] = True
    for prompt in (1, 1, 2):
        steps(prompt)
    assert not steps.kept()


def test_a_verified_step_is_one_that_reads_what_is_kept(store: Store) -> None:
    steps = Steps(store)
    for _ in range(3):
        steps(1)
    steps.engine.verify_next()
    steps(2)
    (found,) = steps.engine.report.as_dict()["verifications"]
    assert found["distance"] < 1e-5 and steps.kept() == [ALL]


def test_it_takes_no_more_memory_than_it_may(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is beyond is made in each step; all sizes together have the same room."""
    one = 2 * (TEXT + 2) * WIDE * 4
    monkeypatch.setattr(step_graphs, "_LEAST_KEPT", 4 * one)
    monkeypatch.setattr(step_graphs, "_PART_KEPT", 1 << 20)
    steps = Steps(store)
    for tokens in (6, 9):
        for prompt in (1, 1, 1, 2, 1):
            steps(prompt, tokens=tokens)
    held = [step.invariants.bytes if step.invariants is not None else 0 for step in steps.engine.graphs._steps.values()]  # type: ignore[union-attr]
    assert held == [4 * one, 0] and steps.kept() == [4, 0]


def test_it_goes_with_the_graphs(store: Store) -> None:
    steps = Steps(store)
    for _ in range(3):
        steps(1)
    assert steps.engine.release() and not steps.kept()
    for prompt in (2, 2, 2, 1):
        steps(prompt)
    assert steps.kept() == [ALL]


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.sampled_from([6, 9]), st.sampled_from([TEXT, 33]), st.booleans(), st.integers(0, 5)
        ),
        max_size=14,
    )
)
def test_whatever_changes_a_step_is_that_of_its_prompt(store: Store, calls: list[Any]) -> None:
    steps = Steps(store)
    for number, (prompt, tokens, text, named, what) in enumerate(calls):
        if what == 0:
            with torch.no_grad():
                steps.root.blocks[number % 2].v.weight.data.mul_(-1)  # type: ignore[union-attr,index]
            steps.host.said = number
        elif what == 1:
            layer = steps.root.project[0]
            layer.weight = nn.Parameter(layer.weight.detach() * 0.5, requires_grad=False)
            steps.host.said = number
        elif what == 2:
            steps.engine.release()
        steps(prompt, tokens=tokens, text=text, named=named)
