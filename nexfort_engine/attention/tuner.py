# SPDX-License-Identifier: Apache-2.0
"""Which kernel computes an attention: measured at the first call of a kind, then remembered.

A kind is the device, torch, the kernels that may be taken, dtype, heads and their widths, how tensors lie, the mask,
and of the sizes the next powers of two: of rows (batch, heads and queries together, which is how much there is to do at
once) and of keys. Not the sizes themselves: prompts have many lengths, and each would be measured. Torch's own choice
stands where it is within `TIE` of the fastest, where nothing else takes the call, and while a CUDA graph is captured
and the kind is not known. Nothing waits for the device but the measuring of a kind.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from ..graph.layouts import memory_order
from ..reporting.report import named
from ..system.cuda_graph_pool import is_capturing
from ..system.device_timer import Clock, clocked
from .backends import OWN, Call, Kernel, own
from .tuning_cache import Row, Table, without

TIE = 1.03
_NEAR = 4  # roundings of the dtype between two kernels, of the norm: of weights and of results, by both
_QUANTISED = 0.1  # of the norm, as dispatch/verify.py has it for what is of low precision by design
_MOST = 4096  # remembered calls by exact sizes; beyond it that memory starts afresh


class Hears(Protocol):
    """Who is told what was chosen: a report."""

    def note(self, text: str) -> None:
        """Take a text that was perhaps given before."""


@dataclass(frozen=True)
class Told:
    """Of whom a call is: the folder in which choices are remembered (None: in this process alone), and its report.

    apart: entered while kernels are measured, for hosts that watch what memory a call takes.
    """

    folder: Path | None = None
    report: Hears | None = None
    apart: Callable[[], AbstractContextManager[Any]] = nullcontext


NOBODY = Told()
asked_by: ContextVar[Told] = ContextVar("nexfort_attention", default=NOBODY)  # of the step that is under way


@contextmanager
def asking(told: Told) -> Iterator[None]:
    """Inside the block, attention is asked for by a call of these."""
    token = asked_by.set(told)
    try:
        yield
    finally:
        asked_by.reset(token)


@dataclass
class _Chosen:
    """What was found for exact sizes. kernel: None for torch's own choice."""

    kernel: Kernel | None
    text: str
    told: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)

    def tell(self, report: Hears | None) -> None:
        """Note it in a report that was not told."""
        if report is not None and report not in self.told:
            self.told.add(report)
            report.note(self.text)


class _UnmeasuredError(Exception):
    """Nothing can be said of a call for now."""


class Chooser:
    """Runs attention by the kernels of its registry, which has those for a type of device by its name."""

    def __init__(self, registry: Mapping[str, Callable[[], Sequence[Kernel]]], clock: Clock | None = None) -> None:
        self._registry, self._clock = registry, clock or clocked
        self._exact: dict[Any, _Chosen] = {}
        self._tables: dict[tuple[Path | None, str], Table] = {}
        self._lock = threading.Lock()  # one measures at a time

    def run(self, call: Call, order: tuple[int, ...], quantised: bool, told: Told) -> torch.Tensor:
        """The result of a call, laid out in `order`; see `operator.attention`."""
        kernels = self._kernels(call.query.device, quantised)
        chosen = self._exact.get(key := _exactly(call, order, kernels, told.folder))
        if chosen is None:
            chosen = self._choose(call, order, kernels, told)
            if chosen is None:
                return laid(own(call), order)
            if len(self._exact) >= _MOST:
                self._exact.clear()
            self._exact[key] = chosen
        chosen.tell(told.report)
        if chosen.kernel is not None:
            try:
                return laid(chosen.kernel.run(call), order)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                if _is_captured(call.query.device):
                    raise  # the capture is over
                # it was measured at other sizes of this kind, or is a package's: the step goes on without it
                text = f"{chosen.text}; but at some sizes torch's own choice, because it failed: {named(error)}"
                chosen = self._exact[key] = _Chosen(None, text)
                chosen.tell(told.report)
        return laid(own(call), order)

    def _kernels(self, device: torch.device, quantised: bool) -> list[Kernel]:
        made = self._registry.get(device.type)
        return [k for k in made() if k.enabled() and (quantised or not k.quantises)] if made is not None else []

    def _choose(self, call: Call, order: tuple[int, ...], kernels: list[Kernel], told: Told) -> _Chosen | None:
        """What to take for a call from now on; None: torch's own choice, for this one alone."""
        problems = {kernel.name: kernel.problem(call) for kernel in kernels}
        fit = [kernel for kernel in kernels if problems[kernel.name] is None]
        left_out = {name: problem for name, problem in problems.items() if problem is not None}
        label = kind(call, order, kernels)
        if not fit:
            return _Chosen(None, f"attention of {label}: torch's own choice, for want of another{without(left_out)}")
        table = self._table(told.folder, call.query.device)
        row = table.find(label)
        if row is None:
            row = self._measured(label, table, call, order, fit, left_out, told)
            if row is None:
                return None
        kernel = next((k for k in fit if k.name == row.kernel), None)
        if kernel is None and row.kernel != OWN:
            return _Chosen(None, f"attention of {label}: torch's own choice at sizes that {row.kernel} does not take")
        return _Chosen(kernel, f"attention of {label}: {row.text()}")

    def _measured(
        self,
        label: str,
        table: Table,
        call: Call,
        order: tuple[int, ...],
        fit: list[Kernel],
        left_out: dict[str, str],
        told: Told,
    ) -> Row | None:
        """The row of a kind that was not known, measured and remembered. None: not now."""

        def tell(text: str) -> None:
            if told.report is not None:
                told.report.note(f"attention of {label}: {text}")

        if _is_captured(call.query.device):
            tell("torch's own choice in a CUDA graph, because it was not measured before")
            return None
        with self._lock:
            if (row := table.find(label)) is not None:  # another thread did it meanwhile
                return row
            try:
                with told.apart():
                    row = measure(call, order, fit, left_out, self._clock)
            except _UnmeasuredError as reason:
                tell(f"torch's own choice, because it was not measured ({reason})")
                table.rows[label] = row = Row(OWN, {}, {"": str(reason)})  # not on disk: another time it may do
                return row
            row = table.keep(label, row)
        problem, table.problem = table.problem, None
        if problem is not None and told.report is not None:
            told.report.note(problem)
        return row

    def _table(self, folder: Path | None, device: torch.device) -> Table:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        with self._lock:
            if (folder, name) not in self._tables:
                self._tables[folder, name] = Table(folder, name)
            return self._tables[folder, name]


def measure(
    call: Call, order: tuple[int, ...], fit: Sequence[Kernel], left_out: Mapping[str, str], clock: Clock
) -> Row:
    """The row of what is fastest for a call. Raises _UnmeasuredError where that cannot be said now."""
    runs: dict[str, Callable[[], torch.Tensor]] = {OWN: lambda: laid(own(call), order)}
    reasons = dict(left_out)
    try:
        wanted = runs[OWN]()
        for kernel in fit:
            run = _run_of(kernel, call, order)
            try:
                reason = _other(run(), wanted, kernel.quantises)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                # of a package or of torch, which may fail in any way: it is no candidate, and the reason is kept
                reason = named(error)
            if reason is None:
                runs[kernel.name] = run
            else:
                reasons[kernel.name] = reason
        del wanted
        took = clock(list(runs.values()), call.query.device)
    except torch.OutOfMemoryError:
        raise _UnmeasuredError("there was no memory for it") from None
    microseconds = dict(zip(runs, took, strict=True))
    best = min(microseconds, key=microseconds.__getitem__)
    if microseconds[OWN] <= TIE * microseconds[best]:
        best = OWN
    return Row(best, {name: round(value, 2) for name, value in microseconds.items()}, reasons)


def _run_of(kernel: Kernel, call: Call, order: tuple[int, ...]) -> Callable[[], torch.Tensor]:
    return lambda: laid(kernel.run(call), order)


def _other(found: torch.Tensor, wanted: torch.Tensor, quantised: bool) -> str | None:
    """Why a result is not that of torch's own choice, but for roundings; or None."""
    if found.dtype != wanted.dtype:
        return f"its result is in {found.dtype}"
    norm = torch.linalg.vector_norm
    most = _QUANTISED if quantised else _NEAR * torch.finfo(wanted.dtype).eps
    whole = norm(wanted, dtype=torch.float32)
    apart = float(norm(found - wanted, dtype=torch.float32) / whole) if float(whole) else float(norm(found))
    return None if apart <= most else f"its result is {apart:.1e} of the norm from torch's own"


def laid(result: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """A tensor with its dimensions in this order in memory, the outermost first; itself where it lies so."""
    step, sizes, strides = 1, result.shape, result.stride()
    for dim in reversed(order):
        if sizes[dim] != 1 and strides[dim] != step:
            wanted = torch.empty_permuted(sizes, order, dtype=result.dtype, device=result.device)
            return wanted.copy_(result)
        step *= sizes[dim]
    return result


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and (is_capturing() or torch.cuda.is_current_stream_capturing())


def _exactly(call: Call, order: tuple[int, ...], kernels: list[Kernel], folder: Path | None) -> Any:
    """All that a choice depends on."""
    query, key, value, mask, is_causal, _, enable_gqa = call
    lies = tuple([(t.shape, t.stride()) for t in (query, key, value)])
    masked = None if mask is None else (mask.dtype, mask.shape, mask.stride())
    return (
        query.device,
        query.dtype,
        lies,
        masked,
        is_causal,
        enable_gqa,
        order,
        tuple([k.name for k in kernels]),
        folder,
    )


def kind(call: Call, order: tuple[int, ...], kernels: Sequence[Kernel]) -> str:
    """What is measured once, as a text."""
    query, key, value, mask, is_causal, _, _ = call
    (batch, heads, rows, width), (_, groups, keys, _) = query.shape, key.shape
    dtype = str(query.dtype).removeprefix("torch.")
    lies = " ".join(_order_text(memory_order(t.shape, t.stride())) for t in (query, key, value))
    more = ", causal" if is_causal else ""
    if mask is not None:
        spread = "".join("1" if mask.shape[i] == 1 or not mask.stride(i) else name for i, name in enumerate("BHLS"))
        more += f", mask {str(mask.dtype).removeprefix('torch.')} {spread}"
    among = " ".join(f"{k.name}-{k.version}" if k.version else k.name for k in kernels)
    return (
        f"{dtype}, {heads} heads of {width} ({groups} of {value.shape[-1]}), up to {_power(batch * heads * rows)} rows "
        f"and {_power(keys)} keys, {lies} to {_order_text(order)}{more}, among {among}"
    )


def _order_text(order: Sequence[int]) -> str:
    return "".join("BHLE"[i] for i in order)


def _power(number: int) -> int:
    """The smallest power of 2 that is no smaller."""
    return 1 << max(0, number - 1).bit_length()
