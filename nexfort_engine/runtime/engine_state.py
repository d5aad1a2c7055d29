# SPDX-License-Identifier: Apache-2.0
"""EngineState: what the parts of one engine share. It is handed to each of them, and knows none of them.

It holds the network, its config, the store, the report, what the host is asked, and three flags that change while the
engine lives. A part that needs another part is handed that one too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..cache.store import Store
from ..config.compile_config import CompileConfig
from ..reporting.report import Report, named
from ..weights.lease import WeightProvider
from ..weights.prepack_entry import Version
from .fault_attribution import UNSEEN, is_passed_on
from .shared_state import Known

Also = Callable[[tuple[Any, ...], dict[str, Any]], list[tuple[tuple[Any, ...], dict[str, Any]]]]


def callables_in(options: dict[Any, Any]) -> str | None:
    """Without a host that knows better: any callable among the options is code of others."""
    for key, value in options.items():
        if callable(value):
            return f"the option {key!r} is code of others"
        if isinstance(value, dict) and (reason := callables_in(value)):
            return reason
    return None


@dataclass(frozen=True)
class Picture:
    """What a call is a step of, as the host knows it: one run of a sampler, or one node that runs.

    name: one object for all calls of it, and for no other. steps: how many there are, 0 where it is unknown. ended: how
    many of them have ended when the call begins; asking may wait for the device.
    """

    name: object
    steps: int = 0
    ended: Callable[[], int] = lambda: 0

    def reference(self) -> Callable[[], object]:
        """What gives the name as long as that lives; names that nothing can be told of are kept."""
        try:
            return weakref.ref(self.name)
        except TypeError:
            return lambda: self.name


@dataclass(frozen=True)
class HostHooks:
    """What an engine asks its host.

    cancel: called several times a second while artefacts are made, and before each region runs; raises to stop (the
        host's interrupt).
    stops: what `cancel` raises, and what the host's own code raises to the same end; it always passes through.
    apart: entered where memory is taken that outlives the call, for hosts that watch what a call takes.
    plain_call: the backbone's arguments without what others added to them (wrappers, patches), for planning.
    others_code: why the options it is called with bring code of others along, or None.
    weights_name: which patches the weights carry, by a name that they have in every process; None where that cannot be
        told.
    also: for the arguments of a first call, those of further calls that later steps may make in another way; what they
        need is planned with it.
    picture: which picture a call is a step of; None where nobody says.
    works_on: what the host works on now, a prompt for example; None for nothing. Asked by other threads.
    accounts: the modules in which it counts the memory that it manages. What a plan does there is done for good.
    """

    cancel: Callable[[], None] = lambda: None
    stops: Callable[[], tuple[type[BaseException], ...]] = tuple
    apart: Callable[[], AbstractContextManager[Any]] = nullcontext
    plain_call: Callable[[Any, Any], tuple[Any, Any]] = lambda args, kwargs: (args, kwargs)
    others_code: Callable[[dict[Any, Any]], str | None] = callables_in
    weights_name: Callable[[], str | None] = lambda: ""
    also: Also = lambda args, kwargs: []
    picture: Callable[[tuple[Any, ...], dict[str, Any]], Picture | None] = lambda args, kwargs: None
    works_on: Callable[[], Hashable] = lambda: None
    accounts: tuple[str, ...] = ()


class EngineState:
    """One backbone under one config.

    lowering: the config that artefacts are lowered with. besides: names of attributes that belong to the host.
    provider: where the host keeps weights elsewhere; they are leased for each call. known: what engines of networks
    alike share.
    """

    def __init__(
        self,
        root: nn.Module,
        config: CompileConfig,
        store: Store,
        *,
        name: str = "",
        provider: WeightProvider | None = None,
        known: Known | None = None,
        report: Report | None = None,
        hooks: HostHooks | None = None,
    ) -> None:
        self.root, self.config, self.store, self.provider = root, config, store, provider
        self.name, self.hooks = name or type(root).__name__, hooks or HostHooks()
        self.known = known if known is not None else Known()
        self.besides = provider.copies if provider is not None else frozenset()
        # nothing is kept where nobody says that weights changed
        self.lowering = (
            config if provider is not None and provider.reports_versions else config.without_weight_versions()
        )
        self.report = report if report is not None else Report(self.lowering, str(store.root))
        # the flags; each is changed by its method below, and by nothing else
        self.images = config.lays_out and self.known.images  # they lie with channels innermost, where regions hold some
        self.keeps = True  # prepared weights, where there is room
        self.held_twice = False  # perhaps: the host still holds what was prepared here, since a step made it so

    # -- the flags ---------------------------------------------------------------------------------------

    def lay_images(self, innermost: bool) -> None:
        """Have images lie with channels innermost from now on, or as eager code leaves them."""
        self.images = innermost

    def stop_keeping(self) -> None:
        """Keep no prepared weights from now on: memory was short."""
        self.keeps = False

    def hold_twice(self, perhaps: bool = True) -> None:
        """A step asked the host for weights that are kept prepared. perhaps: False once the host gave them back."""
        self.held_twice = perhaps

    # -- what the host says ------------------------------------------------------------------------------

    def version(self) -> Version:
        """What tells that no weight was changed since; None where nobody can say."""
        return self.provider.weights_version() if self.provider is not None else None

    def room(self, device: torch.device) -> int:
        """Bytes of a device that the host would give up at once to who asks for memory, besides what is free."""
        return self.provider.room(device) if self.provider is not None else 0

    def can_release(self, device: torch.device) -> bool:
        """Whether weights that the host keeps on a device make room there once they are kept prepared."""
        return self.provider is not None and self.provider.can_release(device)

    def unquiet(self, mappings: list[dict[Any, Any]]) -> str | None:
        """Why a whole step cannot be replayed with these options: code of others would run in it."""
        try:
            return next((reason for m in mappings if (reason := self.hooks.others_code(m))), None)
        except Exception as error:  # an option's own code
            return UNSEEN.format(named(error))

    def picture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Picture | None:
        """What a call is a step of, as the host says it; None where an argument's own code fails, which is noted."""
        try:
            return self.hooks.picture(args, kwargs)
        except Exception as error:
            if is_passed_on(error, self.hooks.stops()):
                raise
            self.report.note(UNSEEN.format(named(error)))
            return None

    def is_quiet(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether no option of a call brings code of others along."""
        return self.unquiet([value for value in (*args, *kwargs.values()) if isinstance(value, dict)]) is None
