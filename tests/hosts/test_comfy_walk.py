# SPDX-License-Identifier: Apache-2.0
"""Things that users do to one model, in an order drawn at random; after each the picture is eager's.

The order of knobs and moments is hypothesis' to draw and to shrink. Every walk begins with a fresh model.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import torch
from card_memory import loaded_in_part, unload
from hypothesis import strategies as st
from hypothesis.internal.conjecture.providers import HypothesisProvider
from patchers import CONFIG, MOVES, TOLERANCE, Pair, distance, in_the_middle, nothing_new, pairs, sample
from walk import Knobs, State

from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.hosts.comfy import model as host

pytestmark = [pytest.mark.comfy, pytest.mark.slow, pytest.mark.usefixtures("comfyui", "artefact_cache")]
SHORT_SEED = 310
SEEDS = {"comfy_unet": 21, "comfy_flux": 3, "comfy_wan": 30}  # of the walks, by the families that have one
# What can be done to Wan's can be done to Flux's too: that it is a video makes no other walk. A UNet's takes
# minutes: it has the most kinds of blocks.
WALKERS = ["comfy_flux", *(pytest.param(name, marks=pytest.mark.large) for name in ("comfy_unet", "comfy_wan"))]
LENGTHS = [16, pytest.param(60, marks=pytest.mark.large)]
MOMENTS = ("undo", "all off", "unload", "load in part", "leave mid-prompt", "weights move", "new node", "other options")
CHOICES = 40  # more than a family has knobs; the number is taken modulo theirs
Step = tuple[str, int, int]


def outcome(picture: Callable[[], torch.Tensor]) -> torch.Tensor | tuple[type, str]:
    """A picture, or what was raised instead: both have to be eager's."""
    try:
        return picture()
    except Exception as error:  # combinations that ComfyUI itself does not bear
        return type(error), str(error)


class Walk:
    """One model on its way. `history` are the states it was in."""

    def __init__(self, at: Pair, knobs: Knobs) -> None:
        self.at, self.knobs = at, knobs
        self.state, self.history = knobs.off, [knobs.off]
        self.compiled, self.share, self.behind = at.clone, 1.0, True
        self.pictures: dict[State, tuple[Any, Any]] = {}
        self.told: list[str] = []
        self.moved, self.seen, self.done = Counter[bool](), Counter[str](), Counter[str]()
        self.last = self.look()

    # -- what a user does --

    def do(self, what: str, which: int, way: int) -> None:
        """One operation, and the picture after it."""
        if what == "knob":
            self.turn(which % len(self.knobs.rows), way)
        else:
            getattr(self, what.replace(" ", "_").replace("-", "_"))()
        self.done[what] += 1
        self.told.append(f"{what}: {self.knobs.told(self.state)}")
        now = self.look()
        if what == "knob":
            self.moved[differ(now, self.last)] += 1
        self.last = now

    def turn(self, which: int, way: int) -> None:
        count, before = len(self.knobs.rows[which].settings), self.state[which]
        setting = 0 if before and way >= count - 1 else (before + 1 + way % (count - 1)) % count
        self.go((*self.state[:which], setting, *self.state[which + 1 :]))

    def go(self, state: State) -> None:
        self.history.append(self.state)
        self.state = state

    def undo(self) -> None:
        self.state = self.history.pop() if len(self.history) > 1 else self.knobs.off

    def all_off(self) -> None:
        self.go(self.knobs.off)

    def unload(self) -> None:
        """As `/free` does; what is used next is loaded whole."""
        unload()
        self.share = 1.0

    def load_in_part(self) -> None:
        unload()
        self.share = {1.0: 0.4, 0.4: 0.0, 0.0: 1.0}[self.share]

    def leave_mid_prompt(self) -> None:
        """The weights leave between two steps of a prompt; its picture is eager's all the same."""
        wanted = self.eager()

        def leave() -> None:
            self.at.patcher.unpatch_model(torch.device("cpu"), unpatch_weights=False)

        same(outcome(lambda: self.draw(in_the_middle(self.patched(self.compiled), leave))), wanted, self.told)
        self.unload()

    def weights_move(self) -> None:
        """Every weight lies elsewhere, with the same numbers."""
        for weight in self.at.network.parameters():
            weight.data = weight.data.clone()

    def new_node(self) -> None:
        """The node runs once more, and the other way round: in front of the others or behind them."""
        self.behind = not self.behind
        self.compiled = host.attach(self.at.patcher, CONFIG)

    def other_options(self) -> None:
        """Another node with options of its own on the same model."""
        other = host.attach(self.at.patcher, CompileConfig.parse("jit"))
        same(outcome(lambda: self.draw(self.patched(other))), self.eager(), self.told)

    # -- what is seen --

    def patched(self, patcher: Any) -> Any:
        return self.knobs.model(self.state)(patcher)

    def draw(self, patcher: Any) -> torch.Tensor:
        with loaded_in_part(self.share) if self.share < 1.0 else contextlib.nullcontext():
            return sample(patcher, **self.knobs.call(self.state))

    def eager(self) -> Any:
        return outcome(lambda: self.draw(self.patched(self.at.patcher)))

    def ours(self) -> Any:
        if self.behind:
            return outcome(lambda: self.draw(self.patched(self.compiled)))
        return outcome(lambda: self.draw(host.attach(self.patched(self.at.patcher), CONFIG)))

    def look(self) -> Any:
        """The picture of now; assert that it is eager's, that of the same state before, and what the report says."""
        wanted, mark = self.eager(), self.at.mark()
        found, new = self.ours(), self.at.since(mark)
        same(found, wanted, [*self.told, str(self.at.report)])
        reasons = self.knobs.reasons(self.state)
        for row in new["eager"]:
            assert any(words in row["reason"] for words in reasons), (self.told, row)
        explained = {row["region"] for row in self.at.report.as_dict()["variants"]}
        assert {row["region"] for row in new["artefacts"]} <= explained, (self.told, new)
        self.seen["raised" if isinstance(wanted, tuple) else "the same" if self.state in self.pictures else "new"] += 1
        if self.share == 1.0 and not isinstance(wanted, tuple):
            if self.state in self.pictures:
                before = self.pictures[self.state]
                assert torch.equal(wanted, before[0]), ("eager is not what it was", self.told)
                assert torch.equal(found, before[1]), ("compiled is not what it was", self.told)
                assert not new["artefacts"] and not new["variants"], (self.told, new)
            self.pictures[self.state] = wanted, found
        return wanted


def differ(now: Any, before: Any) -> bool:
    """Whether two outcomes are different pictures."""
    if isinstance(now, tuple) or isinstance(before, tuple) or now.shape != before.shape:
        return now is not before
    return distance(now, before) > MOVES


def same(found: Any, wanted: Any, told: list[str]) -> None:
    """Assert that compiled gave what eager gave, picture or failure."""
    if isinstance(wanted, tuple) or isinstance(found, tuple):
        assert isinstance(found, tuple) and isinstance(wanted, tuple) and found == wanted, (told, found, wanted)
    else:
        assert distance(found, wanted) < TOLERANCE, (distance(found, wanted), told)


@pytest.fixture(scope="module")
def make_pair() -> Iterator[Callable[[str], Pair]]:
    with pairs() as make:
        yield make


@functools.cache
def knobs_of(name: str) -> Knobs:
    from backbones import make
    from patchers import FAMILIES, patcher_around

    return Knobs(name, patcher_around(make(name).module, family=FAMILIES[name]))


@pytest.mark.large  # about the knobs, not about what is compiled
@pytest.mark.parametrize("name", list(SEEDS))
def test_every_setting_makes_another_picture(name: str) -> None:
    from backbones import make
    from patchers import FAMILIES, patcher_around

    patcher, knobs = patcher_around(make(name).module, family=FAMILIES[name]), knobs_of(name)
    assert len(knobs.rows) <= CHOICES
    alike = []
    for i, knob in enumerate(knobs.rows):
        seen = [sample(patcher, **knob.where)]
        for setting in range(1, len(knob.settings)):
            state = (*knobs.off[:i], setting, *knobs.off[i + 1 :])
            now = sample(knobs.model(state)(patcher), **{**knob.where, **knobs.call(state)})
            alike += [
                (knob.name, setting, i, distance(now, other)) for i, other in enumerate(seen) if not differ(now, other)
            ]
            seen.append(now)
    assert not alike


REST = ("knob", 0, 0)  # the simplest draw, to which hypothesis shrinks what does not matter
KINDS = ("knob",) * 20 + MOMENTS + ("undo",) * 3 + ("all off",)
STEPS = st.tuples(st.sampled_from(KINDS), st.integers(0, CHOICES - 1), st.integers(0, 5))


@pytest.fixture(autouse=True)
def _one_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed draws the same in each process: hypothesis would mix in constants of the modules that are loaded there."""
    monkeypatch.setattr(HypothesisProvider, "_maybe_draw_constant", lambda *_, **__: None)


def with_every_moment(steps: list[Step]) -> list[Step]:
    """The steps, and in between each moment that was not drawn: another hypothesis draws others from a seed."""
    drawn = {what for what, _, _ in steps}
    missing = [(moment, 0, 0) for moment in MOMENTS if moment not in drawn]
    gap = len(steps) // (len(missing) + 1)
    for i, moment in enumerate(missing, start=1):
        steps.insert(i * gap + i - 1, moment)
    return steps


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", WALKERS)
def test_a_walk_of_many_operations(make_pair: Callable[[str], Pair], name: str, length: int) -> None:
    done: list[Walk] = []

    @hypothesis.seed(SHORT_SEED if length < 60 else SEEDS[name])
    @hypothesis.settings(
        max_examples=2,  # the first is the simplest there is: nothing but rests
        database=None,
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(steps=st.lists(STEPS, min_size=length, max_size=length))
    def walked(steps: list[Step]) -> None:
        steps = [step for step in steps if step != REST]
        if not steps:
            return
        at = make_pair(name)
        first = sample(at.clone)
        walk = Walk(at, knobs_of(name))
        for step in with_every_moment(steps):
            walk.do(*step)
        unload()
        mark = at.mark()
        assert torch.equal(sample(at.clone), first), walk.told
        nothing_new(at.since(mark))
        done.append(walk)

    walked()
    walk = done[-1]
    assert len(walk.told) > length - 3 and set(walk.done) == {"knob", *MOMENTS}
    assert walk.moved[True] > 5 * walk.moved[False], "most of what is changed has to be seen"
    assert walk.seen["the same"] > length // 6 and not walk.seen["raised"]
