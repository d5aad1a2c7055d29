# SPDX-License-Identifier: Apache-2.0
"""The call that is under way in this context: which engine is at work, and what its backbone was called with.

Kept in a ContextVar, so that shims act for the call that put them there and for nobody else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..system import torch_modes
from ..system.process_settings import rare_full_collections

# with a region, its plain forward, its arguments and the session; it returns the region's result
Instead = Callable[[Any, Callable[..., Any], Any, Any, "ForwardContext"], Any]
# with a module that is called, its plain forward, its arguments and the session; it returns the call's result
OnCall = Callable[[Any, Callable[..., Any], Any, Any, "ForwardContext"], Any]


@dataclass(slots=True)
class StepTrace:
    """What regions did since it was begun. A session begins with one, and each observation of its step with another.

    used: the bindings that ran. looked_up: the tensors of options that they took. ran_eager: a region did. lost: the
    regions that ran eager, for each of their calls, and why. others: an artefact called code of others. fetched: a
    region ran on weights that the host fetched for this call alone. lists: a region was given lists that its kind of
    block changes. releases_weights: weights were prepared and kept, so that from now on a region leases fewer.
    """

    used: list[Any] = field(default_factory=list)
    looked_up: list[Any] = field(default_factory=list)
    lost: list[tuple[Any, str]] = field(default_factory=list)
    ran_eager: bool = False
    others: bool = False
    fetched: bool = False
    lists: bool = False
    releases_weights: bool = False

    @property
    def unrepeatable(self) -> str:
        """Why a replay of the step would not do what it did, or "". Not for good where a region ran eager."""
        if self.ran_eager:
            return "a block ran uncompiled"
        if self.lists:
            return "a block may change a list that it is given"
        return "code of others runs inside its blocks" if self.others else ""

    def note_eager(self) -> None:
        """A region ran eager."""
        self.ran_eager = True

    def note_lost(self, region: Any, why: str) -> None:
        """A call of a region has no artefact, and why."""
        self.lost.append((region, why))

    def note_others(self) -> None:
        """An artefact calls code of others."""
        self.others = True

    def note_fetched(self) -> None:
        """A region runs on weights that the host fetched for this call alone."""
        self.fetched = True

    def note_lists(self) -> None:
        """A region was given lists that its kind of block changes."""
        self.lists = True

    def note_released_weights(self) -> None:
        """A region leases fewer weights from now on."""
        self.releases_weights = True


Called = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
Asked = tuple[Callable[..., Any] | None, tuple[Any, ...], dict[str, Any]]


@dataclass(slots=True)
class Calls:
    """What the step was called with.

    backbone: the call of the backbone. engine: the call of the engine, None where the step does not count or its
    arguments could not be noted. versions: how often the tensors of the backbone's call had been written to when it
    began. step_invariant: tensors that the backbone may be called with, by id, each with a name; equal names are equal
    bits, in any call.
    """

    backbone: Called | None = None
    engine: Asked | None = None
    versions: list[int] = field(default_factory=list)
    step_invariant: dict[int, tuple[Any, Hashable]] = field(default_factory=dict)

    def note_backbone(self, call: Called, versions: list[int]) -> None:
        """The backbone is called."""
        self.backbone, self.versions = call, versions

    def forget(self) -> None:
        """The calls cannot be noted: their arguments raise."""
        self.backbone = self.engine = None

    def name_tensors(self, names: Iterable[tuple[Any, Hashable]]) -> None:
        """Some tensors have these names; None: the tensor has none."""
        self.step_invariant = {id(tensor): (tensor, name) for tensor, name in names if name is not None}


@dataclass(slots=True)
class OthersCode:
    """Code of others that runs in the step.

    at_any_time: it may run at any moment, because options bring it along. has_run: it may have run since names were
    looked at. around_blocks: a block carries some, which runs around the block's own. uncalled: regions whose replaced
    forward has not called their own, by the ids of their modules.
    """

    at_any_time: bool = False
    has_run: bool = True
    around_blocks: bool = False
    uncalled: dict[int, Any] = field(default_factory=dict)

    def begin(self, *, at_any_time: bool) -> None:
        """The step begins."""
        self.at_any_time = self.has_run = at_any_time

    def note_run(self) -> None:
        """Some may have run."""
        self.has_run = True

    def note_run_and_expect(self, *, at_any_time: bool) -> None:
        """Some may have run. at_any_time: from now on it may at any moment."""
        self.at_any_time, self.has_run = at_any_time, True

    def note_names_seen(self) -> None:
        """Names were looked at."""
        self.has_run = self.at_any_time

    def note_around_blocks(self) -> None:
        """A block carries some."""
        self.around_blocks = True

    def expect_call(self, module: Any, region: Any) -> None:
        """The forward that replaced a region's own is expected to call that."""
        self.uncalled[id(module)] = region

    def note_call(self, module: Any) -> None:
        """A module's own forward is called."""
        self.uncalled.pop(id(module), None)


@dataclass(slots=True)
class Outcome:
    """What is known of the step so far.

    replayed: all of it was a CUDA graph. changed_lists: a region changed a list or dictionary that it was given or
    holds, or may have. images: an artefact gave images with channels innermost. new_sizes: a region was called with
    sizes that it did not know, on a processor.
    """

    replayed: bool = False
    changed_lists: bool = False
    images: bool = False
    new_sizes: bool = False

    def note_replay(self) -> None:
        """All of the step was a CUDA graph."""
        self.replayed = True

    def note_changed_lists(self) -> None:
        """A region may have changed a list or dictionary."""
        self.changed_lists = True

    def note_images(self) -> None:
        """An artefact gives images with channels innermost."""
        self.images = True

    def forget_images(self) -> None:
        """The step begins anew, and eager code gives its images."""
        self.images = False

    def note_new_sizes(self) -> None:
        """A region is called with sizes that it does not know, on a processor."""
        self.new_sizes = True


@dataclass(slots=True)
class Planning:
    """What is found and refused for regions without an artefact.

    planned: the step was run for a plan, or did without. examples: what regions are called with, in a plan. refused:
    why the region that is called now has no artefact, and what was refused for it (Refusals.take_back). split: the
    plan split regions; the step goes on without those below them.
    """

    planned: bool = False
    split: bool = False
    examples: list[Any] = field(default_factory=list)
    refused: tuple[str, list[Any]] | None = None

    def begin(self) -> None:
        """The step is planned now, and not again."""
        self.planned = True

    def note_split(self) -> None:
        """Regions were split. Those below them act from the next step on."""
        self.split = True

    def add_example(self, wanted: Any) -> None:
        """A region is called so in the plan."""
        self.examples.append(wanted)

    def replace_example(self, example: Any, wanted: Any) -> None:
        """A region is called so instead."""
        self.examples = [wanted if one is example else one for one in self.examples]

    def note_refusal(self, reason: str, refused: list[Any]) -> None:
        """The region that is called now has no artefact."""
        self.refused = reason, refused

    def take_refusal(self) -> tuple[str, list[Any]]:
        """Why that region has none, and what was refused for it; ("", []) where nothing was noted. Asked once."""
        found, self.refused = self.refused or ("", []), None
        return found


@dataclass(slots=True)
class MissingArtefacts:
    """How the step runs where artefacts are missing.

    uncompiled: too little of it can be compiled; what is left of it runs as it would without an engine. made_beside:
    what is missing is made beside the step; what is not there yet runs eager to the step's end. held: the step's
    picture runs eager to the end, whatever is there by now. only_looked_for: and the step's regions only look for
    artefacts. begins_picture: the step is a picture's first.
    """

    uncompiled: bool = False
    made_beside: bool = False
    held: bool = False
    only_looked_for: bool = False
    begins_picture: bool = False

    def run_uncompiled(self) -> None:
        """Too little of the step can be compiled."""
        self.uncompiled = True

    def note_made_beside(self, is_so: bool) -> bool:
        """Note whether what is missing is made beside the step, and give that back."""
        self.made_beside = is_so
        return is_so

    def hold(self, *, looks: bool) -> None:
        """The step runs eager. looks: its regions look for artefacts."""
        self.held, self.only_looked_for, self.made_beside = True, looks, not looks

    def note_picture(self, *, begins: bool) -> None:
        """Note whether the step is a picture's first."""
        self.begins_picture = begins


class Watching(Protocol):
    """What looks at the operators of a step that is observed."""

    def around(self, artefact: Any, answered: Callable[[], int] = ...) -> contextlib.AbstractContextManager[None]:
        """A region's artefact runs inside the block."""


class Invariants(Protocol):
    """What keeps what a step computes of tensors that last."""

    answered: int

    def run(self, binding: Any, weights: Any, flat: Any, tensors: Any, kept: Any, *, parts: bool, whole: bool) -> Any:
        """Run a region's artefact."""


@dataclass(frozen=True, slots=True)
class Observation:
    """How what runs now is watched.

    watching: what looks at its operators. invariants: what keeps what is computed of tensors that last. capturing: it
    goes into a CUDA graph, so that what fails says nothing of the region.
    """

    watching: Watching | None = None
    invariants: Invariants | None = None
    capturing: bool = False


_UNOBSERVED = Observation()


class ForwardContext:
    """One call of a backbone. Each part of its state is changed by the methods that the part has.

    on_call: what is done where the backbone or a block is called in it. instead: what is done with each region's call
    in the place of running it compiled. calls: what the engine was called with, where the caller knows it.
    """

    def __init__(self, on_call: OnCall, *, instead: Instead | None = None, calls: Calls | None = None) -> None:
        self.on_call, self.instead = on_call, instead
        self.calls = Calls() if calls is None else calls
        self.modes, self.fingerprint = torch_modes.current(), torch_modes.fingerprint()  # of the step
        self.others_code, self.outcome, self.trace = OthersCode(), Outcome(), StepTrace()
        self.inside = False  # a block runs its own forward: nothing below it is a region
        self.doubted: set[Any] = set()  # regions whose artefacts failed in it, before it was run again
        self.planning, self.missing = Planning(), MissingArtefacts()
        self.observation = _UNOBSERVED
        self._until_end: contextlib.ExitStack | None = None  # what ends with the step, once something does

    def begin(self, *, brings_code: bool) -> None:
        """The step begins, in the modes of torch that are there now. brings_code: code of others, with options."""
        self.modes, self.fingerprint = torch_modes.current(), torch_modes.fingerprint()
        self.others_code.begin(at_any_time=brings_code)

    def hold(self, *, looks: bool = False) -> None:
        """From its beginning on the step runs eager, whatever is there. looks: its regions look for artefacts."""
        self.missing.hold(looks=looks)
        self.outcome.forget_images()
        self.fresh_trace()

    def enter_block(self, in_parts: bool = False) -> tuple[bool, bool]:
        """A block runs its own forward. What `leave_block` is to be given.

        in_parts: regions below it are called. Its code may then change names, and objects that it was given, before
        each of them.
        """
        before = self.inside, self.others_code.at_any_time
        self.inside = self.inside or not in_parts
        if in_parts:
            self.others_code.note_run_and_expect(at_any_time=True)
            self.outcome.note_changed_lists()
        return before

    def leave_block(self, before: tuple[bool, bool]) -> None:
        """The block's own forward has ended."""
        self.inside, at_any_time = before
        self.others_code.note_run_and_expect(at_any_time=at_any_time)

    def with_rare_collections(self) -> None:
        """From now on to its end all objects are seldom looked through for garbage."""
        if self._until_end is None:
            self._until_end = contextlib.ExitStack()
            self._until_end.enter_context(rare_full_collections())

    def ended(self) -> None:
        """The step has ended, and with it what was begun for it."""
        if self._until_end is not None:
            self._until_end.close()

    def fresh_trace(self) -> StepTrace:
        """Begin a fresh trace: what ran before says nothing of what runs now."""
        self.trace = StepTrace()
        return self.trace

    @contextlib.contextmanager
    def observed(
        self, watching: Watching | None, invariants: Invariants | None, *, capturing: bool = False
    ) -> Iterator[StepTrace]:
        """Inside the block what runs is watched, and leaves its marks in a fresh trace, which stays."""
        self.observation = Observation(watching, invariants, capturing)
        try:
            yield self.fresh_trace()
        finally:
            self.observation = _UNOBSERVED


def to_come(call: Callable[..., Any], args: tuple[Any, ...]) -> ForwardContext:
    """The session of a call that is still to come. It is planned, and never entered."""
    return ForwardContext(
        lambda module, plain, given, words, session: plain(*given, **words), calls=Calls(backbone=(call, args, {}))
    )


class StepRunner(Protocol):
    """What runs the backbone: the engine, for its parts that need the backbone run."""

    def active(self, *, instead: Instead | None = None) -> contextlib.AbstractContextManager[ForwardContext]:
        """Regions stand in the blocks' places inside the block; `instead` is done in the place of running them."""

    def uncounted(
        self, plain: Callable[..., Any], args: Any, kwargs: Any, *, graphs: bool, names: Iterable[Hashable] = ()
    ) -> Any:
        """One more step that nobody asked for; the report does not count it.

        graphs: it may be replayed as one. names: of its arguments' tensors, as in Calls; None: one has none.
        """


current: ContextVar[ForwardContext | None] = ContextVar("nexfort_session", default=None)


@contextlib.contextmanager
def entered(session: ForwardContext | None) -> Iterator[None]:
    """Make a session (or none) the current one inside the block."""
    token = current.set(session)
    try:
        yield
    finally:
        current.reset(token)
