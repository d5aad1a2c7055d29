# SPDX-License-Identifier: Apache-2.0
"""What has become of each compile node: waiting, compiling, warm, compiled or eager, for the badge on it.

A node is remembered by its workflow and its id in that when it runs, with the report of what it attached. The report
goes with its engine, and the node is then as before its first step. Changes are sent to the front end as events.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import running
from .model_files import file_above

if TYPE_CHECKING:
    from nexfort_engine.reporting.progress import Event
    from nexfort_engine.reporting.report import Report

EVENT = "nexfort.status"
BESIDE = "background"  # the phase of what is compiled while nobody waits for it
MADE = "compiled in the background"  # what the text of its last event says if it did not fail
WHOLE = "(whole module)"
# Ids of workflows that were closed stay until this many newer ones came.
MOST = 512
# A node's workflow (None for prompts that were queued without one) and its id, inside subgraphs as "12:3".
Place = tuple[str | None, str]


@dataclass(frozen=True)
class Seat:
    """One compile node of a workflow, seated in `prompt`. `report` is None where the node is switched off."""

    workflow: str | None
    node: str
    kind: str
    report: weakref.ref[Report] | None
    prompt: str | None


_lock = threading.Lock()
_seats: OrderedDict[Place, Seat] = OrderedDict()
_progress: weakref.WeakKeyDictionary[Report, Event] = weakref.WeakKeyDictionary()
_beside: weakref.WeakKeyDictionary[Report, Event] = weakref.WeakKeyDictionary()
# The ids and classes of the nodes that attached an engine, and the prompt that it ran in last.
_made_by: weakref.WeakKeyDictionary[Report, set[tuple[str, str]]] = weakref.WeakKeyDictionary()
_ran_in: weakref.WeakKeyDictionary[Report, str | None] = weakref.WeakKeyDictionary()
# The names of model files that were noted of a report.
_named: weakref.WeakKeyDictionary[Report, set[str]] = weakref.WeakKeyDictionary()
# How many artefacts a report told of when it was heard of last, and before the prompt that it ran in last.
_made: weakref.WeakKeyDictionary[Report, int] = weakref.WeakKeyDictionary()
_made_before: weakref.WeakKeyDictionary[Report, int] = weakref.WeakKeyDictionary()
# What a report had to say of its speed when its nodes were told last.
_speeds: weakref.WeakKeyDictionary[Report, tuple[int, Any]] = weakref.WeakKeyDictionary()


def remember(node: str | None, kind: str, report: Report | None) -> None:
    """Node `node` of class `kind` ran and attached an engine with this report, or none: it is switched off."""
    if node is None:  # run by code, not by a workflow
        return
    if report is not None:
        _listen()
        _made_by.setdefault(report, set()).add((node, kind))
    _send([_told(_sit(running.prompt(), node, kind, report))])


def _sit(now: running.Prompt | None, node: str, kind: str, report: Report | None) -> Seat:
    workflow, number = (None, None) if now is None else (now.workflow, now.id)
    seat = Seat(workflow, node, kind, None if report is None else weakref.ref(report), number)
    place = (workflow, node)
    with _lock:
        _seats.pop(place, None)
        _seats[place] = seat
        while len(_seats) > MOST:
            _seats.popitem(last=False)
    return seat


@functools.cache
def _listen() -> None:
    from nexfort_engine.hosts.comfy.progress import listen

    listen(watch)


def watch(report: Report, event: Event | None) -> None:
    """How far compiling is, or None at the end of a call; the nodes of this report are told where that is news."""
    if event is not None and event.phase == BESIDE:  # another prompt may run by now
        _beside[report] = event
        _send(nodes_of(report))
        return
    begins = _begins(report)
    _made[report] = report.count_compiled
    if event is None:
        # At every step: only the first one, one that compiled, and one that is faster or slower than others were, can
        # have changed what the badge says.
        before, _speeds[report] = _speeds.get(report), (report.paced, _sign(_speed(report.last_speed)))
        if _progress.pop(report, None) is None and not begins and before == _speeds[report]:
            return
    else:
        _progress[report] = event
    _send(nodes_of(report))


def _name(report: Report, now: running.Prompt) -> None:
    """Note which file the model of a report comes from, once for each, so that the cache is shown by it."""
    from nexfort_engine.cache import model_names
    from nexfort_engine.reporting.resource_shortages import begun

    known = _named.setdefault(report, set())
    made_by = [(node, kind) for node, kind in _made_by.get(report, ()) if now.has(node, kind)]
    for name, kind in {file_above(now.nodes, node): kind for node, kind in made_by}.items():
        if name is None or name in known:
            continue
        known.add(name)
        if report.models and report.cache_dir:
            begun("nexfort-names", model_names.note, Path(report.cache_dir), report.models, name, kind)


def _begins(report: Report) -> bool:
    """Whether this is the first that is heard of a report in the prompt that runs; its node then has it there too.

    ComfyUI does not run a node again whose output it kept. A copy of a workflow runs with the engine that the node of
    the first one attached, and so does a node that was set back to what it was before.
    """
    now = running.prompt()
    number = None if now is None else now.id
    if report in _ran_in and _ran_in[report] == number:
        return False
    _ran_in[report] = number
    _made_before[report] = _made.get(report, 0)
    if now is None:
        return True
    _name(report, now)
    for node, kind in _made_by.get(report, ()):
        seated = _seats.get((now.workflow, node))
        ran_itself = seated is not None and seated.prompt == now.id  # and attached what it wanted
        if now.has(node, kind) and not ran_itself:
            _sit(now, node, kind, report)
    return True


def nodes() -> list[dict[str, Any]]:
    """Every node that ran and whose engine is alive, as the front end wants it."""
    return [_told(seat) for seat in _sitting()]


def nodes_of(report: Report) -> list[dict[str, Any]]:
    """The nodes whose engine has this report."""
    return [_told(seat) for seat in _sitting() if seat.report is not None and seat.report() is report]


def files_of(report: Report) -> list[str]:
    """The names of the model files that its network came from, by the prompts that it ran in."""
    return sorted(_named.get(report, ()))


def reports_of(wanted: Callable[[Seat], bool]) -> list[tuple[str, Report]]:
    """(id, report) of the nodes that are wanted; those whose engine is gone are not among them."""
    found = [(seat.node, seat.report()) for seat in _sitting() if seat.report is not None and wanted(seat)]
    return [(node, report) for node, report in found if report is not None]


def _sitting() -> list[Seat]:
    with _lock:
        return [seat for seat in _seats.values() if seat.report is None or seat.report() is not None]


def _told(seat: Seat) -> dict[str, Any]:
    told = {"id": seat.node, "class": seat.kind, "workflow": seat.workflow}
    report = None if seat.report is None else seat.report()
    if report is None:
        return {**told, "state": "disabled" if _disabled() else "off", "eager": 0}
    before = _made_before.get(report, 0)
    return {**told, **state(report.as_dict(), _progress.get(report), _beside.get(report), before)}


def state(
    report: Mapping[str, Any], progress: Event | None, beside: Event | None = None, before: int = 0
) -> dict[str, Any]:
    """What the badge says of a report: "state", how many blocks run "eager", and while it compiles how far it is.

    "slower" is there where steps of some sizes are slower than eager's, "speed" once steps were timed, "unsaved" where
    what is compiled cannot be kept. In the "background" nobody waits for it; beside: how far that is. before: how many
    artefacts were compiled before the last prompt; "fresh" is there where some were compiled since.
    """
    eager = {row["region"] for row in report["eager"]}
    found: dict[str, Any] = {"state": "waiting", "eager": len(eager - {WHOLE})}
    if _is_slower(report):
        found["slower"] = True
    if (speed := _speed((report.get("speed") or (None,))[-1])) is not None:
        found["speed"] = speed
    if report["unsaved"] is not None:
        found["unsaved"] = True
    if report["compiling_beside"]:
        found["state"] = "background"
        found |= _how_far(beside)
    elif progress is not None and progress.done < progress.total:
        found |= {"state": "compiling", **_how_far(progress)}
    elif _made_beside(beside) and not report["artefacts_compiled"] and not _is_all(eager, report["regions"]):
        found |= {"state": "compiled", "fresh": True}  # the next picture takes it up
    elif report["artefacts_compiled"]:
        found |= {"state": "compiled"} | ({"fresh": True} if report["artefacts_compiled"] > before else {})
    elif report["artefacts_loaded"]:
        found["state"] = "warm"
    elif eager or report["calls"]:
        found["state"] = "eager"
    return found


def _how_far(event: Event | None) -> dict[str, Any]:
    """How far compiling is; nothing where it is at its end."""
    if event is None or event.done >= event.total:
        return {}
    left = None if event.seconds_left is None else round(event.seconds_left)
    return {"done": event.done, "total": event.total, "seconds_left": left}


def _made_beside(event: Event | None) -> bool:
    """Whether the last that was heard of the background is that it made what it was asked for."""
    return event is not None and event.done >= event.total and MADE in event.text


def _is_all(eager: set[str], regions: Sequence[Any]) -> bool:
    """Whether these are all blocks, as far as blocks are known."""
    return WHOLE in eager or (bool(regions) and len(eager) >= len(regions))


def _is_slower(report: Mapping[str, Any]) -> bool:
    """Whether the last row on some sizes says so, as web/report.js reads them too."""
    return any({str(row["sizes"]): row["slower"] for row in report.get("pace", ())}.values())


def _speed(row: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """How many times as fast the steps are that ran last, None where it is not known; and a likely reason if slower.

    "seconds": of a compiled step, where that is all that is known.
    """
    if row is None:
        return None
    from nexfort_engine.reporting.speed import is_slower, ratio

    found = ratio(row)
    rounded = None if found is None else round(found, 2)
    told = {"ratio": rounded, "reason": row.get("reason", "") if is_slower(row) else ""}
    return told if found is not None or not row["compiled"] else {**told, "seconds": float(f"{row['compiled']:.3g}")}


def _sign(speed: Mapping[str, Any] | None) -> Any:
    """What of a speed is news when it changes: seconds do at every step."""
    return None if speed is None else (speed["ratio"], speed["reason"], "seconds" in speed)


def _disabled() -> bool:
    from nexfort_engine.system.process_settings import disabled

    return disabled()


def _send(told: list[dict[str, Any]]) -> None:
    server = running.server()
    if server is not None and told:
        server.send_sync(EVENT, {"nodes": told})
