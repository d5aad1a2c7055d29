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


@dataclass
class StepTrace:
    """What regions did since it was begun. A session begins with one, and each observation of its step with another.

    used: the bindings that ran. looked_up: the tensors of options that they took. ran_eager: a region did. lost: the
    regions that ran eager, for each of their calls, and why. others: an artefact called code of others. fetched: a
    region ran on weights that the host fetched for this call alone. lists: a region was given lists that its kind of
    block changes. spares: weights were prepared and kept, so that
    from now on a region leases fewer.
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


class ForwardContext:
    """One call of a backbone.

    on_call: what is done where the backbone or a block is called in it. instead: what is done with each region's call
    in the place of running it compiled.
    """

    def __init__(self, on_call: OnCall, *, instead: Instead | None = None) -> None:
        self.on_call, self.instead = on_call, instead
        # of the call that is made: what the backbone is called with, and what the engine was called with
        self.root: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None = None
        self.asked: tuple[Callable[..., Any] | None, tuple[Any, ...], dict[str, Any]] | None = None
        self.written: list[int] = []  # how often the tensors of that call had been written to when it began
        # tensors that the root may be called with, by id, each with a name: equal names are equal bits, in any call
        self.step_invariant: dict[int, tuple[Any, Hashable]] = {}
        # of the step, which the engine begins
        self.modes, self.fingerprint = torch_modes.current(), torch_modes.fingerprint()
        self.wary = False  # code of others may run at any moment: options bring it along
        self.others_ran = True  # and may have run since names were looked at
        self.unmet: dict[int, Any] = {}  # regions whose replaced forward has not called their own, by their modules
        self.others_around = False  # a block carries code of others, which runs around the block's own
        self.replayed = False  # all of it was a CUDA graph
        self.changed_lists = False  # a region changed a list or dictionary that it was given or holds, or may have
        # of regions that run
        self.trace = StepTrace()
        self.inside = False  # a block runs its own forward: nothing below it is a region
        self.doubted: set[Any] = set()  # regions whose artefacts failed in it, before it was run again
        self.images = False  # an artefact gave images with channels innermost
        # of what finds and makes artefacts
        self.planned = False
        self.examples: list[Any] = []  # what regions are called with, in a plan
        # why the region that is called now has no artefact, and what was refused for it (Refusals.take_back)
        self.refused: tuple[str, list[Any]] | None = None
        self.aside = False  # too little of it can be compiled: what is left of it runs as it would without an engine
        self.behind = False  # what it lacks is being made beside it: whatever is not there yet runs eager to its end
        self.held = False  # its picture runs eager to the end, whatever is there by now
        self.looks = False  # and its regions only look for artefacts
        self.begins_picture = False  # it is a picture's first step
        self.new_sizes = False  # a region was called with sizes that it did not know, on a processor
        self.until_end: contextlib.ExitStack | None = None  # what ends with the step, once something does
        # of `observed`
        self.watching: Any = None  # what looks at its operators
        self.invariants: Any = None  # what keeps what is computed of tensors that last
        self.capturing = False  # it goes into a CUDA graph: what fails says nothing of the region

    def begin(self, *, wary: bool) -> None:
        """The step begins, in the modes of torch that are there now. wary: options bring code of others along."""
        self.modes, self.fingerprint = torch_modes.current(), torch_modes.fingerprint()
        self.wary = self.others_ran = wary

    def hold(self, *, looks: bool = False) -> None:
        """From its beginning on the step runs eager, whatever is there. looks: its regions look for artefacts."""
        self.held, self.looks, self.behind = True, looks, not looks
        self.images = False
        self.fresh_trace()

    def with_rare_collections(self) -> None:
        """From now on to its end all objects are seldom looked through for garbage."""
        if self.until_end is None:
            self.until_end = contextlib.ExitStack()
            self.until_end.enter_context(rare_full_collections())

    def ended(self) -> None:
        """The step has ended, and with it what was begun for it."""
        if self.until_end is not None:
            self.until_end.close()

    def fresh_trace(self) -> StepTrace:
        """Begin a fresh trace: what ran before says nothing of what runs now."""
        self.trace = StepTrace()
        return self.trace

    @contextlib.contextmanager
    def observed(self, watching: Any, invariants: Any, *, capturing: bool = False) -> Iterator[StepTrace]:
        """Inside the block what runs is watched, and leaves its marks in a fresh trace, which stays."""
        self.watching, self.invariants, self.capturing = watching, invariants, capturing
        try:
            yield self.fresh_trace()
        finally:
            self.watching, self.invariants, self.capturing = None, None, False


def to_come(call: Callable[..., Any], args: tuple[Any, ...]) -> ForwardContext:
    """The session of a call that is still to come. It is planned, and never entered."""
    session = ForwardContext(lambda module, plain, given, words, session: plain(*given, **words))
    session.root = (call, args, {})
    return session


class StepRunner(Protocol):
    """What runs the backbone: the engine, for its parts that need the backbone run."""

    def active(self, *, instead: Instead | None = None) -> contextlib.AbstractContextManager[ForwardContext]:
        """Regions stand in the blocks' places inside the block; `instead` is done in the place of running them."""

    def uncounted(
        self, plain: Callable[..., Any], args: Any, kwargs: Any, *, graphs: bool, names: Iterable[Hashable] = ()
    ) -> Any:
        """One more step that nobody asked for; the report does not count it.

        graphs: it may be replayed as one. names: of its arguments' tensors, as in ForwardContext; None: one has none.
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
