# SPDX-License-Identifier: Apache-2.0
"""Which is at fault where something failed: the artefact, or the call, which eager code refuses as well.

A call that the block's own forward raises at says nothing of other calls. Its error is the caller's, and nothing that
was made, refused or latched for it stays. An argument or an attribute whose own code raises when the engine looks at it
is eager code's matter alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ..dispatch.region import Region
    from ..engine import Engine
    from ..guards.call_spec import Flat
    from .artifact import Binding
    from .forward_context import Session


UNSEEN = "what it is called with, or holds, cannot be looked at: {}"


class HalfDone(Exception):
    """An artefact failed, and may have written to what it was given: the step has to begin anew. The text is why."""


def is_passed_on(error: BaseException, engine: Engine) -> bool:
    """Whether an error is for the host: its own stop, or what it has remedies for."""
    return isinstance(error, (torch.OutOfMemoryError, *engine.stops()))


def failed(region: Region, binding: Binding, flat: Flat, tensors: list[torch.Tensor], session: Session) -> bool:
    """Whether the step has to begin anew, as it may, after an artefact failed with these tensors.

    What it writes to is what an eager run of the block would begin with.
    """
    artefact = binding.artefact
    if region.module is region.engine.root or not region.engine.repeatable(session):
        return False
    return any(tensors[artefact.tensors[i]] is flat.tensors[artefact.tensors[i]] for i in artefact.mutated)


def instead(region: Region, plain: Any, args: Any, kwargs: Any, session: Session, reason: str) -> Any:
    """Run a block eager in the place of an artefact that failed, and from now on where that does not fail as well."""
    session.doubted.discard(region)
    region.latched = None
    result = region.inside(plain, args, kwargs, session)
    region.latch(reason)
    return result


def refused(region: Region, key: Any, plain: Any, args: Any, kwargs: Any, session: Session) -> Any:
    """Run a block eager for want of an artefact. Where that takes the call it is told, and what was refused stays."""
    reason, fresh = session.refused or ("", [])
    session.refused = None
    try:
        result = region.inside(plain, args, kwargs, session)
    except Exception as error:
        if fresh and not is_passed_on(error, region.engine):
            region.engine.builder.take_back(fresh)
            region.declined.pop(key, None)
        raise
    if reason:
        region.engine.report.eager(region.path, reason)
        session.lost.append((region, reason))
    return result
