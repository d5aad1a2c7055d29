# SPDX-License-Identifier: Apache-2.0
"""A block runs eager in the place of an artefact: because it failed, or because there is none.

Whose fault that is (runtime/fault_attribution.py) is known once eager has run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..runtime.fault_attribution import is_passed_on

if TYPE_CHECKING:
    from ..guards.call_spec import Flat
    from ..runtime.artifact import Binding
    from ..runtime.forward_context import Session
    from .region import Region


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
        if fresh and not is_passed_on(error, region.engine.stops()):
            region.engine.builder.refusals.take_back(fresh)
            region.declined.pop(key, None)
        raise
    if reason:
        region.engine.report.eager(region.path, reason)
        session.lost.append((region, reason))
    return result
