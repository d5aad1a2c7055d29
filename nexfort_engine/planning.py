# SPDX-License-Identifier: Apache-2.0
"""Planner: what every region of a network is going to be called with, learned before the first one is compiled.

The network is run once eagerly beside the real call, at batch 2 where the call has batch 1. There a batch dimension
cannot be mistaken for a constant of 1, and an artefact made for it serves every batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .dispatch import Ineligible, Region
from .report import named
from .signature import Flat, Unsupported, flatten_call, of_its_own

if TYPE_CHECKING:
    from .capture import Example
    from .engine import Engine
    from .finding import Wanted
    from .session import Session

log = logging.getLogger("nexfort")


class Planner:
    """Learns the calls of one engine's regions."""

    def __init__(self, engine: Engine, wanted: Callable[[Region, Any, Flat], Wanted]) -> None:
        """wanted: what a region needs for a call, given as (region, spec, flat)."""
        self.engine = engine
        self._wanted = wanted

    def calls(self, session: Session) -> list[Wanted]:
        """What all regions need for the call of the network that is under way; once a session, else nothing."""
        session.planned = True
        if session.root is None or not self.engine.config.dynamic:
            return []
        call, args, kwargs = session.root
        args, kwargs = self.engine.plain_call(args, kwargs)
        wants_two = _batch_of(args, kwargs) == 1
        args, kwargs = of_its_own(args, wants_two), of_its_own(kwargs, wants_two)
        try:
            further = self.engine.also(args, kwargs)  # before the call: networks take items out of what they are given
            return self._observe(call, args, kwargs) + self._observe_further(call, further)
        except torch.OutOfMemoryError:
            self.engine.report.note("there was no memory to plan ahead; regions are compiled one by one")
        except Exception as error:
            if isinstance(error, self.engine.stops()):
                raise
            # the probe is a convenience: without it the regions are captured one by one at the sizes of the call
            log.debug("Nexfort: planning failed", exc_info=True)
            self.engine.report.note(f"planning ahead failed ({named(error)})")
        return []

    def _observe(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Wanted]:
        root, region = self.engine.root, self.engine.whole_region
        if region is not None:
            flat = Flat()
            return [self._wanted(region, flatten_call(args, kwargs, flat), flat)]
        devices = sorted({p.device for p in root.parameters() if p.device.type == "cuda"}, key=str)
        with (
            torch.random.fork_rng(devices=[d.index for d in devices]),
            self.engine.active(instead=self.record) as session,
        ):
            call(*args, **kwargs)
        return session.examples

    def _observe_further(self, call: Callable[..., Any], calls: list[tuple[Any, Any]]) -> list[Wanted]:
        """What calls need that the host knows of; a network that does not take one loses nothing but that."""
        found: list[Wanted] = []
        for args, kwargs in calls:
            try:
                found += self._observe(call, args, kwargs)
            except Exception as error:
                if isinstance(error, self.engine.stops()):
                    raise
                log.debug("Nexfort: planning a further call failed", exc_info=True)
                self.engine.report.note(f"planning ahead for other sizes failed ({named(error)})")
        return found

    def record(self, region: Region, plain: Any, args: Any, kwargs: Any, session: Session) -> Any:
        """Note what a region is called with, and run it eagerly."""
        flat = Flat()
        try:
            spec = flatten_call(args, kwargs, flat)
            if not region.due():
                region.weights()
            if region.latched is None and region.carries() is None:
                wanted = self._wanted(region, spec, flat)
                wanted.flat = ghost(wanted.example)
                session.examples.append(wanted)
        except (Unsupported, Ineligible) as reason:
            log.debug("Nexfort: %s is not planned: %s", region.path, reason)
        return region.inside(plain, args, kwargs, session)


def ghost(example: Example) -> Flat:
    """The example's call without its data: sizes and options are all that the checks look at."""
    flat = Flat()
    flat.tensors = [torch.empty_strided(s, st, dtype=dt, device="meta") for s, st, dt, _ in example.tensors]
    flat.ints, flat.mappings = example.ints, example.mappings
    return flat


def _batch_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The batch of a call: the first size of its first tensor that has one; 0 if there is none."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.ndim > 1:
            return value.shape[0]
    return 0
