# SPDX-License-Identifier: Apache-2.0
"""Verifier: one step of the user's own model, eager and compiled, compared region by region.

Every region is given what it is given in an eager run, so that each is judged for itself and no error is handed on. The
step as a whole is run both ways besides. What is over the budget stays eager from then on and is listed.

The budget is the distance rule's first half, for each region: the error to a wider computation of the same block (its
weights and inputs in float32, in float64 where they are float32) at most 1.1 times eager's own. Products in fp8 are
another number by design; there the distance to eager counts, against LOW_PRECISION, and so it does where nothing wider
can be computed. Layers whose weights this engine packed (quant/quantized_linear.py) compute in full in float64, with
the weights as they are packed: eager and compiled code are both as far from that as the rounding of inputs takes them.
Not seen is what a network keeps in its own attributes from call to call.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import torch

from ..capture.shadow_module import Shadow
from ..cudagraphs.step_graphs import StepGraphs
from ..guards.call_spec import Flat, flatten_call, holds_function, of_its_own, stateful
from ..modules.containers import left_alone
from ..modules.memory_format import Unsupported, format_of
from ..quant.quantized_linear import holds_quantised
from ..reporting.report import named
from ..runtime.engine_state import EngineState
from ..runtime.forward_context import ForwardContext, StepRunner, entered
from ..system.process_settings import backend_scope
from ..system.random_state import drawn_aside
from .first_result import distance, has_narrow_products, tensors_in
from .region import Region
from .region_table import RegionTable
from .region_weights import Ineligible

log = logging.getLogger("nexfort")

EQUAL = 1e-4  # of the norm: nearer than this nothing is asked further
FACTOR = 1.1  # between our error and eager's
LOW_PRECISION = 0.1  # of the norm, for one region with products in fp8


class Verifier:
    """Compares one step of one engine's backbone."""

    def __init__(
        self,
        state: EngineState,
        table: RegionTable,
        steps: StepRunner,
        graphs: StepGraphs | None = None,
        *,
        replayed: bool = True,
        names: Sequence[Hashable] = (),
    ) -> None:
        """replayed: the user's own step may be a CUDA graph, so that the compared one may be too.

        names: of the tensors among the arguments, as in Calls; None where one has none.
        """
        self._state, self._table, self._steps, self._graphs = state, table, steps, graphs
        self._replayed, self._names = replayed, names
        self._rows: dict[str, dict[str, Any]] = {}

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Compare the call of a backbone, whose arguments are this method's own, and put the result into the report.

        None where it could not be done, which the report then says; the step itself has ended before.
        """
        began = time.perf_counter()
        problem = _stateful(args, kwargs)
        if problem is not None:
            self._state.report.note(f"a step could not be verified: {problem}")
            return None
        try:
            with _same_random_numbers(args, kwargs):
                self._regions(call, args, kwargs)
            with entered(None):  # no shim acts
                eager, eager_seconds = self._best(call, args, kwargs)
            graphs = self._replayed and self._graphs is not None and torch.cuda.is_available()
            again = functools.partial(self._again, call, graphs)
            ours, seconds = self._best(again, args, kwargs, warming=2 if graphs else 0)  # two steps make a graph
            result = {
                "eager_ms": eager_seconds * 1e3, "compiled_ms": seconds * 1e3,
                "distance": _number(distance(ours, eager)), "device": _device_name(args, kwargs),
                "sizes": [list(t.shape) for t in tensors_in((args, kwargs))], "torch": torch.__version__,
                "at": datetime.now().astimezone().isoformat(timespec="seconds"),
                "seconds": time.perf_counter() - began, "regions": [_as_json(row) for row in self._rows.values()],
            }  # fmt: skip
        except torch.OutOfMemoryError:
            self._state.report.note("there was no memory to verify a step")
            return None
        except Exception as error:
            if isinstance(error, self._state.hooks.stops()):
                raise
            # the step has its result, and what only looks at it must not take that away
            log.warning("Nexfort: a step could not be verified", exc_info=True)
            self._state.report.note(f"a step could not be verified ({named(error)})")
            return None
        self._state.report.verified(result)
        return result

    def _again(self, call: Callable[..., Any], graphs: bool, *args: Any, **kwargs: Any) -> Any:
        return self._steps.uncounted(call, args, kwargs, graphs=graphs, names=self._names)

    def _best(self, run: Callable[..., Any], args: Any, kwargs: Any, *, warming: int = 0) -> tuple[Any, float]:
        """What a step gives and the seconds of the faster of two runs, after `warming` others."""
        best, result = math.inf, None
        for turn in range(warming + 2):
            given, words = of_its_own(args), of_its_own(kwargs)
            with _same_random_numbers(args, kwargs):
                result, seconds = _clocked(functools.partial(run, *given, **words))
            best = min(best, seconds) if turn >= warming else best
        return result, best

    # -- region by region ---------------------------------------------------------------------------------

    def _regions(self, call: Any, args: Any, kwargs: Any) -> None:
        own = self._table.whole_region
        try:
            with self._steps.active(instead=self._compare) as session:
                if own is not None:
                    self._compare(own, call, of_its_own(args), of_its_own(kwargs), session)
                else:
                    call(*of_its_own(args), **of_its_own(kwargs))
        finally:
            if self._graphs is not None and any(row["over"] for row in self._rows.values()):
                self._graphs.release()  # they hold what is not to run any more

    def _compare(self, region: Region, plain: Any, args: Any, kwargs: Any, session: ForwardContext) -> Any:
        """Run a region both ways on the same inputs and go on with eager's result."""
        given, words = of_its_own(args), of_its_own(kwargs)
        copies, more = of_its_own(args), of_its_own(kwargs)
        trace = session.fresh_trace()
        with left_alone(region.module, self._state.besides):  # eager begins with what it keeps from call to call
            ours, seconds = _clocked(lambda: region.call(plain, copies, more, session))
        ran_compiled = not trace.ran_eager
        result, eager_seconds = _clocked(lambda: region.run_own_forward(plain, args, kwargs, session, in_parts=False))
        if ran_compiled:
            artefact = trace.used[-1].artefact
            row = self._rows.setdefault(region.path, _blank_row(region))
            row["calls"] += 1
            row["eager_ms"] += eager_seconds * 1e3
            row["compiled_ms"] += seconds * 1e3
            # where it changes what it is given, that is a result too
            changes = artefact.mutated or artefact.changes
            changed = ((copies, more), (args, kwargs)) if changes else ((), ())
            apart = distance((ours, changed[0]), (result, changed[1]))
            row["distance"] = max(row["distance"], apart)
            if EQUAL < apart <= LOW_PRECISION and has_narrow_products(artefact):
                row["limit"] = LOW_PRECISION
            elif apart > EQUAL:
                self._judge(region, row, apart, self._errors(region, given, words, ours, result))
        return _laid_as(result, ours)

    def _judge(self, region: Region, row: dict[str, Any], apart: float, errors: _Errors) -> None:
        """Judge one call of a region that is not equal: the worst counts. One over the budget is latched to eager."""
        if errors.why is None and (row["error"] is None or errors.ours > row["error"]):
            row["error"], row["eager_error"], row["limit"] = errors.ours, errors.eager, errors.most
        if errors.why is not None and apart <= LOW_PRECISION:
            row["unjudged"], row["limit"] = errors.why, LOW_PRECISION
        elif errors.why is not None or errors.ours > errors.most:
            row["over"] = True
            said = f"its error is {errors.ours:.2e}, uncompiled {errors.eager:.2e}"
            if errors.why is not None:
                said = f"its result is {apart:.2e} from the uncompiled one, and {errors.why}"
            region.latch(f"it was verified and is over the budget: {said}")

    def _errors(self, region: Region, args: Any, kwargs: Any, ours: Any, result: Any) -> _Errors:
        """Our error and eager's to a wider computation, or why there is none."""
        try:
            wide = _wider_result(region, args, kwargs)
        except torch.OutOfMemoryError:
            return _Errors(why="there was no memory for a run in higher precision")
        except (Unsupported, Ineligible) as reason:
            return _Errors(why=str(reason))
        except Exception as error:
            if isinstance(error, self._state.hooks.stops()):
                raise
            return _Errors(why=f"it cannot be computed in a wider type ({named(error)})")
        tensors = [t for t in tensors_in(result) if t.is_floating_point()]
        rounding = max((torch.finfo(t.dtype).eps for t in tensors), default=0.0) / 4
        eager, numbers = distance(result, wide), max(1, sum(t.numel() for t in tensors))
        # Where its code sets dtypes itself the wider computation may be none; one rounding is allowed in any case. The
        # error of n numbers is itself a sample.
        most = FACTOR * max(eager, rounding) * (1 + 3 / math.sqrt(2 * numbers))
        return _Errors(distance(ours, wide), eager, most)


def _laid_as(result: Any, other: Any) -> Any:
    """A result in the memory format of another, so that what follows is asked of the artefact that runs in a step."""
    both = [result, other]
    if any(type(t) is not torch.Tensor for t in both) or result.shape != other.shape:
        return result
    return result if format_of(result) == format_of(other) else torch.empty_like(other).copy_(result)


@dataclass(frozen=True)
class _Errors:
    """Relative norms: our error and eager's to a wider computation, and the most that ours may be; or why none."""

    ours: float = 0.0
    eager: float = 0.0
    most: float = math.inf
    why: str | None = None


def _wider_result(region: Region, args: Any, kwargs: Any) -> Any:
    """The block's result with weights and inputs in a wider type; the block itself is not touched.

    Raises Unsupported or Ineligible with the reason where that says nothing, and whatever its code raises.
    """
    flat = Flat()
    if holds_function(flatten_call(args, kwargs, flat)):
        raise Ineligible("it is called with a function, whose own tensors would stay as they are")
    with region.weights.resident(flat.tensors) as weights:
        if region.weights.parts is not None:
            raise Ineligible("its weights are quantised, and a wider type does not undo that")
        found = {t.dtype for t in (*weights, *flat.tensors) if t.is_floating_point()}
        # layers with packed weights compute in full in float64 alone
        exact = found <= {torch.float32, torch.float64} or holds_quantised([region.module])
        wide = torch.float64 if exact else torch.float32
        shadow = Shadow(region.module, [_widened(w, wide) for w in weights], region.weights.hidden())
        with entered(None), backend_scope(matmul_allow_tf32=False, conv_allow_tf32=False):
            return shadow.module(*_widened(args, wide), **_widened(kwargs, wide))


def _widened(value: Any, wide: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to(wide) if value.is_floating_point() else value
    if type(value) in (list, tuple):
        return type(value)(_widened(v, wide) for v in value)
    if isinstance(value, dict):
        return {k: _widened(v, wide) for k, v in value.items()}
    return value


def _stateful(args: Any, kwargs: Any) -> str | None:
    """Why a call cannot be made again: it is handed an object, such as a cache, that it may change. Or None."""
    try:
        return stateful(flatten_call(args, kwargs, Flat()))
    except Unsupported as reason:
        return f"it is called with {reason}"


def _number(value: float | None) -> float | None:
    """As JSON holds it: None for what is no number."""
    return value if value is not None and math.isfinite(value) else None


def _as_json(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, **{name: _number(row[name]) for name in ("distance", "error", "eager_error", "limit")}}


def _blank_row(region: Region) -> dict[str, Any]:
    return {
        "region": region.path, "kind": region.kind, "calls": 0, "eager_ms": 0.0, "compiled_ms": 0.0, "distance": 0.0,
        "error": None, "eager_error": None, "limit": EQUAL, "over": False, "unjudged": None,
    }  # fmt: skip


def _device_name(*given: Any) -> str:
    device = next((t.device for t in tensors_in(given)), torch.device("cpu"))
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _clocked(run: Callable[[], Any]) -> tuple[Any, float]:
    """A result and the seconds until the device has it."""
    _wait()
    began = time.perf_counter()
    result = run()
    _wait()
    return result, time.perf_counter() - began


def _wait() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


@contextlib.contextmanager
def _same_random_numbers(*given: Any) -> Iterator[None]:
    """Random numbers inside the block are the caller's next ones, and after it as if there had been no block."""
    devices = sorted({t.device.index or 0 for t in tensors_in(given) if t.device.type == "cuda"})
    with drawn_aside(devices):
        yield
