# SPDX-License-Identifier: Apache-2.0
"""When compiled code may not run, or failed: whether the block alone runs eager or the step begins anew.

A step is run again only on what it was given, and where nobody else has seen a part of it.
"""

from __future__ import annotations

from typing import Any

import torch

from ..cudagraphs.host_constants import tensors_in
from ..guards.call_spec import Flat
from ..guards.option_recorder import look
from ..modules.boundaries import first_carrier
from ..runtime.artifact import Artefact
from ..runtime.engine_state import EngineState
from ..runtime.forward_context import ForwardContext
from ..system.process_group import others_speak


def has_to_begin_anew(
    state: EngineState, artefact: Artefact, flat: Flat, tensors: list[torch.Tensor], session: ForwardContext
) -> bool:
    """Whether the step has to begin anew, as it may, after an artefact failed with these tensors.

    What it writes to is what an eager run of the block would begin with.
    """
    written = any(tensors[artefact.tensors[i]] is flat.tensors[artefact.tensors[i]] for i in artefact.mutated)
    return written and is_repeatable(state, session)


def is_repeatable(state: EngineState, session: ForwardContext) -> bool:
    """Whether a step may be run again on what it was given.

    Not where code of others, which may count its calls, saw a part of it, or where it changed what it was given.
    """
    if session.outcome.changed_lists:
        return False
    backbone = session.calls.backbone
    if backbone is None or session.instead is not None or not state.is_quiet(*backbone[1:]):
        return False
    if first_carrier(state.root) is not None or others_speak():
        return False
    return written_to(backbone[1:]) == session.calls.versions


def written_to(values: Any) -> list[int]:
    """How often each tensor of a call was written to; inference tensors do not tell."""
    return [tensor._version for tensor in tensors_in(values) if not tensor.is_inference()]


def unfit_to_change(flat: Flat, artefact: Artefact) -> str:
    """Why the artefact may not change the tensors of this call, or ""."""
    if any(not flat.tensors[artefact.tensors[i]].is_contiguous() for i in artefact.by_strides):
        return "it changes a tensor that is given to it only where that is contiguous"
    held = [look(flat.mappings, path) for path in artefact.options] if flat.lists else []
    places = [t.untyped_storage().data_ptr() for t in (*flat.tensors, *held)]
    if any(places.count(places[artefact.tensors[i]]) > 1 for i in artefact.mutated):
        # compiled code reads and writes in an order of its own, which only separate tensors do not show
        return "a tensor that it changes shares memory with another of its arguments"
    return ""
