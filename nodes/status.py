# SPDX-License-Identifier: Apache-2.0
"""What has become of each compile node: waiting, compiling, warm, compiled or eager, for the badge on it.

A node is remembered by its id in the workflow when it runs, with the report of what it attached. The report goes
with its engine, and the node is then as before its first step. Changes are sent to the front end as events.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nexfort_engine.progress import Event
    from nexfort_engine.report import Report

EVENT = "nexfort.status"
WHOLE = "(whole module)"
# Ids of workflows that were closed stay until this many newer ones came.
MOST = 512


@dataclass(frozen=True)
class Seat:
    """One compile node of a workflow. `report` is None where the node is switched off."""

    node: str
    kind: str
    report: weakref.ref[Report] | None


_lock = threading.Lock()
_seats: OrderedDict[str, Seat] = OrderedDict()
_progress: weakref.WeakKeyDictionary[Report, Event] = weakref.WeakKeyDictionary()
_begun: weakref.WeakSet[Report] = weakref.WeakSet()


def remember(node: str | None, kind: str, report: Report | None) -> None:
    """Node `node` of class `kind` ran and attached an engine with this report, or none: it is switched off."""
    if node is None:  # run by code, not by a workflow
        return
    if report is not None:
        _listen()
    with _lock:
        _seats.pop(node, None)
        _seats[node] = Seat(node, kind, None if report is None else weakref.ref(report))
        while len(_seats) > MOST:
            _seats.popitem(last=False)
    _send(nodes_of(report) if report is not None else [_told(_seats[node])])


@functools.cache
def _listen() -> None:
    from nexfort_engine.hosts.comfy_progress import listen

    listen(watch)


def watch(report: Report, event: Event | None) -> None:
    """How far compiling is, or None at the end of a call; the nodes of this report are told where that is news."""
    if event is None:
        # At every step: only the first one, and one that compiled, can have changed what the badge says.
        if _progress.pop(report, None) is None and report in _begun:
            return
        _begun.add(report)
    else:
        _progress[report] = event
    _send(nodes_of(report))


def nodes() -> list[dict[str, Any]]:
    """Every node that ran and whose engine is alive, as the front end wants it."""
    return [_told(seat) for seat in _sitting()]


def nodes_of(report: Report) -> list[dict[str, Any]]:
    """The nodes whose engine has this report."""
    return [_told(seat) for seat in _sitting() if seat.report is not None and seat.report() is report]


def reports_of(ids: list[str] | None) -> dict[str, Report]:
    """Id -> report of the nodes with these ids, or of all; those whose engine is gone are not among them."""
    found = {seat.node: seat.report() for seat in _sitting() if seat.report is not None}
    return {node: report for node, report in found.items() if report is not None and (ids is None or node in ids)}


def _sitting() -> list[Seat]:
    with _lock:
        return [seat for seat in _seats.values() if seat.report is None or seat.report() is not None]


def _told(seat: Seat) -> dict[str, Any]:
    report = None if seat.report is None else seat.report()
    if report is None:
        return {"id": seat.node, "class": seat.kind, "state": "off", "eager": 0}
    return {"id": seat.node, "class": seat.kind, **state(report.as_dict(), _progress.get(report))}


def state(report: Mapping[str, Any], progress: Event | None) -> dict[str, Any]:
    """What the badge says of a report: "state", how many blocks run "eager", and while it compiles how far it is."""
    eager = {row["region"] for row in report["eager"]}
    found: dict[str, Any] = {"state": "waiting", "eager": len(eager - {WHOLE})}
    if progress is not None and progress.done < progress.total:
        left = progress.seconds_left
        found |= {"state": "compiling", "done": progress.done, "total": progress.total}
        found["seconds_left"] = None if left is None else round(left)
    elif report["artefacts_compiled"]:
        found["state"] = "compiled"
    elif report["artefacts_loaded"]:
        found["state"] = "warm"
    elif eager or report["calls"]:
        found["state"] = "eager"
    return found


def front_end() -> Any | None:
    """ComfyUI's server, through which front ends are told; None where there is none."""
    module = sys.modules.get("server")  # not imported here: where nobody has, nobody listens
    return getattr(getattr(module, "PromptServer", None), "instance", None)


def _send(told: list[dict[str, Any]]) -> None:
    server = front_end()
    if server is not None and told:
        server.send_sync(EVENT, {"nodes": told})
