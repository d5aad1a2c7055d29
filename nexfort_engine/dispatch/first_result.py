# SPDX-License-Identifier: Apache-2.0
"""The first result of a new artefact beside eager's: what a capture did not see shows there.

A block's code may ask for what a trace answers otherwise than a call does, such as the class of a module that stands in
for its own, or draw and count by means that torch knows nothing of. So the first call of an artefact that was compiled
in this process runs both ways. Where the results are far apart, the step goes on with eager's, and the artefact is used
no more. One block of each kind runs twice so, once; that takes a small part of what compiling it took.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from ..cudagraphs.host_constants import unwatched
from ..guards.sentinels import ValueUsed
from ..reporting.report import counted, named
from ..runtime.artifact import Artefact
from ..runtime.engine_state import EngineState
from ..runtime.fault_attribution import is_passed_on
from ..runtime.forward_context import ForwardContext

APART = 0.1  # of the norm; rounding takes a block a hundredth of it at most
APART_IN_8_BITS = 0.3
_SMALL = 1e-3  # of the norm of the inputs: what is smaller is a difference of large numbers
_BELOW_NORMAL = 1e-30
_CHUNK = 1 << 24  # numbers that are brought to float64 at once


def can_be_compared(artefact: Artefact, session: ForwardContext) -> bool:
    """Whether the call may be made again: nobody counts it, and it changes nothing that it is given or holds."""
    others = artefact.others or artefact.by_modules or artefact.boundaries
    changes = artefact.mutated or artefact.changes or artefact.writes
    return not (others or changes or session.observation.capturing)


def differs(
    artefact: Artefact, ours: Any, call: Any, session: ForwardContext, state: EngineState, path: str
) -> tuple[Any, str]:
    """Eager's result and how far ours is from it; (ours, "") where it is near, or eager gives no result.

    call: the block's own forward and its arguments. path: of the block, for the report. What the host raises to stop
    goes through; another error of eager's code is told in the report, and the step has its result.
    """
    plain, args, kwargs = call
    before = session.enter_block()
    try:
        with unwatched():
            wanted = plain(*args, **kwargs)
            apart = distance(ours, wanted)
            if apart <= (APART_IN_8_BITS if _is_in_8_bits(artefact) else APART) or _is_small(ours, wanted, args):
                return ours, ""
    except (torch.OutOfMemoryError, ValueUsed):
        # memory for both results; or an observed step shows eager code what stands for a number, which it may not use
        return ours, ""
    except Exception as error:
        if is_passed_on(error, state.hooks.stops()):
            raise
        state.report.note(f"{path} ran compiled, and its uncompiled code raised {named(error)} where both are compared")
        return ours, ""
    finally:
        session.leave_block(before)
    far = f"{apart:.2g} of its norm away from" if math.isfinite(apart) else "of other sizes than"
    return wanted, f"its compiled code gave a result that is {far} the uncompiled one"


def _is_in_8_bits(artefact: Artefact) -> bool:
    return has_narrow_products(artefact) or (artefact.entry is not None and bool(artefact.entry.info.get("attention")))


def has_narrow_products(artefact: Artefact) -> bool:
    """Whether it computes a product in fp8 or int8."""
    products = artefact.entry.info.get("products") if artefact.entry is not None else None
    return counted(products or [])[0] > 0


def _is_small(ours: Any, wanted: Any, args: Any) -> bool:
    """Whether both results are next to nothing beside the inputs, of which they are differences."""
    norms = [max((float(_double(t).norm()) for t in tensors_in(one)), default=0.0) for one in (ours, wanted, args)]
    return max(norms[:2]) <= _SMALL * norms[2]


def distance(found: Any, wanted: Any) -> float:
    """||found - wanted|| / ||wanted|| over the tensors of two results; infinite where they do not fit.

    Infinities and NaN have to stand in the same places, and do not count otherwise: masks are made of them. Formula:
    the relative Frobenius norm, summed in float64.
    """
    ours, theirs = list(tensors_in(found)), list(tensors_in(wanted))
    if [t.shape for t in ours] != [t.shape for t in theirs]:
        return math.inf
    apart = norm = 0.0
    for a, b in zip(ours, theirs, strict=True):
        for one, other in zip(a.reshape(-1).split(_CHUNK), b.reshape(-1).split(_CHUNK), strict=True):
            one, other = _double(one), _double(other)
            finite = other.isfinite()
            if not bool(finite.all()):
                if not torch.equal(one[~finite].nan_to_num(), other[~finite].nan_to_num()):
                    return math.inf
                one, other = one[finite], other[finite]
            apart += float((one - other).square().sum())
            norm += float(other.square().sum())
    result = math.sqrt(apart / max(norm, _BELOW_NORMAL))
    return result if math.isfinite(result) else math.inf


def _double(tensor: torch.Tensor) -> torch.Tensor:
    """In float64, on the CPU where the device has none."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor).reshape(-1)
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a result or of arguments, through lists, tuples, mappings and plain objects that hold some."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif is_dataclass(value):
        yield from tensors_in([getattr(value, field.name) for field in fields(value)])
    elif not isinstance(value, torch.nn.Module) and not callable(value):
        yield from tensors_in(getattr(value, "__dict__", {}))
