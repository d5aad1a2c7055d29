# SPDX-License-Identifier: Apache-2.0
"""The HTTP routes under /nexfort: what the cache holds, what the live engines did, and taking away and pinning by id.

GET changes nothing. No route takes a path, an address or a file from the client. One tells where something lies on this
machine, POST /nexfort/cache/place, and tells it to the server's own page alone. What is asked for, and by whom, is
checked in `requests.py`.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from aiohttp import web

from . import help_text, options_text, status
from .cache_manager import listing
from .engine_import import engine_is_here
from .requests import Answer, RefusedError, answered, ids_in, node_ids_in, read_body, workflow_in
from .told import without_paths

if TYPE_CHECKING:
    from nexfort_engine.cache.store import Removed, Store

IDS = '{"ids": ["0123456789abcdef01234567"]}'
RESULT = '{"workflow": null, "mode": "O2", "size": "1024x1024", "steps": 8, "runs": [[false, 41.5], [true, 23.2]]}'
T = TypeVar("T")


def register_routes() -> bool:
    """Add the routes to the running server; False where there is none (ComfyUI as a library)."""
    from server import PromptServer

    server = getattr(PromptServer, "instance", None)
    if server is None:
        return False
    server.routes.get("/nexfort/cache")(get_cache)
    server.routes.get("/nexfort/nodes")(get_nodes)
    server.routes.get("/nexfort/report")(get_report)
    server.routes.get("/nexfort/help")(get_help)
    server.routes.post("/nexfort/options")(post_options)
    server.routes.post("/nexfort/verify")(post_verify)
    server.routes.post("/nexfort/benchmark")(post_benchmark)
    server.routes.post("/nexfort/cache/place")(post_place)
    server.routes.post("/nexfort/cache/prune")(post_prune)
    server.routes.post("/nexfort/cache/clear")(post_clear)
    server.routes.post("/nexfort/cache/pin")(post_pin)
    return True


def by_the_engine(handler: Callable[[web.Request], Awaitable[Answer]]) -> Callable[..., Awaitable[web.Response]]:
    """A route whose answer the engine gives: it waits for that to be imported, but not before it is known who asks."""

    @functools.wraps(handler)
    async def respond(request: web.Request) -> Answer:
        await asyncio.to_thread(engine_is_here)
        return await handler(request)

    return answered(respond)


@by_the_engine
async def get_cache(request: web.Request) -> dict[str, Any]:
    """GET /nexfort/cache: {"count", "size", "limit", "entries"}, the entries as the Cache Manager node lists them.

    "limit" is how many bytes the cache may grow to.
    """
    from nexfort_engine.cache.paths import default_limit

    rows = await asyncio.to_thread(listing)
    return {"count": len(rows), "size": sum(row["size"] for row in rows), "limit": default_limit(), "entries": rows}


@answered
async def get_nodes(request: web.Request) -> dict[str, Any]:
    """GET /nexfort/nodes: {"nodes": [{"id", "class", "workflow", "state", "eager"}]}, the compile nodes that ran.

    "workflow" is the id of the workflow that ran, null for a prompt that was queued without one. "state" is waiting,
    compiling (with "done", "total", "seconds_left"), warm, compiled, eager, off or disabled (NEXFORT_DISABLE). "speed"
    is there once steps were timed: {"ratio", "reason"}, with "seconds" of a compiled step while there is no ratio.
    "fresh": some was compiled in its last prompt. "unsaved": what is compiled cannot be kept.
    """
    return {"nodes": await asyncio.to_thread(status.nodes)}


@by_the_engine
async def get_report(request: web.Request) -> dict[str, Any]:
    """GET /nexfort/report: {"engines": [{"name", "files", "nodes", "report"}], "cache", "memory", "benchmarks", "lost"}

    One engine a network alive. "files" are the names of its network's files, "nodes" the compile nodes it belongs to,
    {"id", "class", "workflow"} each. "cache" says where artefacts are kept, without the path, "memory" how much of
    the device is in use: {"device", "used", "total"}, in bytes. "benchmarks" are kept results, the newest last, "lost"
    is why earlier ones cannot be read, or "".
    """
    from nexfort_engine.cache import benchmark_record
    from nexfort_engine.cache.paths import chosen_root
    from nexfort_engine.hosts.comfy.model import memory, reports

    found = await asyncio.to_thread(reports)
    engines = [
        {
            "name": name,
            "files": without_paths(status.files_of(report)),
            "nodes": [{name: node[name] for name in ("id", "class", "workflow")} for node in status.nodes_of(report)],
            "report": without_paths(report.as_dict()),
        }
        for name, report in found
    ]
    used = await asyncio.to_thread(memory)
    kept, lost = await asyncio.to_thread(benchmark_record.read, _store().root)
    place = "user" if chosen_root() is None else "chosen"
    return {"engines": engines, "cache": place, "memory": used, "benchmarks": kept, "lost": lost}


@by_the_engine
async def get_help(request: web.Request) -> dict[str, Any]:
    """GET /nexfort/help: {"markdown", "issues", "page"}: what somebody who can help needs, without paths, and where to
    take it."""
    return await asyncio.to_thread(help_text.told)


@by_the_engine
async def post_options(request: web.Request) -> dict[str, Any]:
    """POST /nexfort/options {"text": "max-aut"}: what is wrong with an options text, and how its last word may go on.

    {"problem", "words", "typed"}, the last being how many characters a word takes the place of.
    """
    body = await read_body(request, ("text",), '{"text": "max-aut"}')
    if not isinstance(text := body.get("text"), str):
        raise RefusedError(400, f"text is a {type(text).__name__}; expected the text of an options field.")
    return await asyncio.to_thread(options_text.told, text)


@by_the_engine
async def post_verify(request: web.Request) -> dict[str, Any]:
    """POST /nexfort/verify {"nodes": ["12"]}: compare the next step of these compile nodes' models with eager.

    {}: of all. "workflow": the id of the only workflow whose nodes are meant, null for prompts without one. Tells which
    "nodes"; without a next step, such as one whose result is cached, nothing happens.
    """
    from nexfort_engine.hosts.comfy.model import verify_next

    body = await read_body(request, ("nodes", "workflow"), '{"nodes": ["12"]}')
    ids = node_ids_in(body) if "nodes" in body else None
    workflow = workflow_in(body)

    def wanted(seat: status.Seat) -> bool:
        return (ids is None or seat.node in ids) and ("workflow" not in body or seat.workflow == workflow)

    reports = status.reports_of(wanted)
    for one in ids or ():
        if one not in {node for node, _ in reports}:
            raise RefusedError(
                404, f"No compiled model belongs to node {one}; expected one that ran: GET /nexfort/nodes."
            )
    return {"nodes": list(dict.fromkeys(node for node, report in reports if verify_next(report)))}


@by_the_engine
async def post_benchmark(request: web.Request) -> dict[str, Any]:
    """POST /nexfort/benchmark {"workflow", "mode", "size", "steps", "runs"}: keep a result, with its moment and device.

    "runs": [compiled?, milliseconds a step] each. Tells the "benchmark" as it is kept, and whether it is "kept".
    """
    from nexfort_engine.cache import benchmark_record
    from nexfort_engine.hosts.comfy.model import memory, reports

    body = await read_body(request, ("workflow", "mode", "size", "steps", "runs"), RESULT)
    rows = [row for _, report in await asyncio.to_thread(reports) for row in report.as_dict()["speed"]]
    device = str(rows[-1]["device"]) if rows else (await asyncio.to_thread(memory))["device"]
    made = {**body, "workflow": workflow_in(body) or "", "device": device[:100], "at": time.time()}
    if not benchmark_record.is_result(made):
        raise RefusedError(400, f"The body is no result of a benchmark; expected one such as {RESULT}.")
    kept = await asyncio.to_thread(benchmark_record.add, _store().root, made)
    return {"benchmark": made, "kept": kept}


@by_the_engine
async def post_place(request: web.Request) -> dict[str, Any]:
    """POST /nexfort/cache/place {}: {"path", "problem"}: where the cache lies, and why it cannot be written, or null.

    The one answer with a whole path. A browser names the page that posts, so a request that names none is refused.
    """
    await read_body(request, (), "{}")
    if "Origin" not in request.headers:
        raise RefusedError(403, "The place of the cache is told to a page of this server; expected its Origin header.")
    store = _store()
    can = await asyncio.to_thread(lambda: store.writable)
    return {"path": str(store.root), "problem": None if can else store.problem}


@by_the_engine
async def post_prune(request: web.Request) -> dict[str, Any]:
    """POST /nexfort/cache/prune {"max_bytes": n}: drop the least recently used until the rest fits in n.

    {"ids": [...]}: drop these, but for pinned ones, which are told as "kept".
    """
    body = await read_body(request, ("max_bytes", "ids"), '{"max_bytes": 1000000000}')
    limit = body.get("max_bytes")
    if limit is not None and "ids" in body:
        raise RefusedError(400, "The body has both max_bytes and ids; expected one of them.")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
        raise RefusedError(400, f"max_bytes is {limit!r}; expected a whole number of bytes, 0 or more.")
    if "ids" not in body:
        return await _remove(lambda store: store.prune(limit))
    ids = ids_in(body)
    kept: list[str] = []

    def prune(store: Store) -> Removed:
        rows = _rows_of(store, ids)
        kept.extend(one for one in ids if rows[one]["pinned"])
        return store.remove([one for one in ids if one not in kept])

    return {**await _remove(prune), "kept": kept}


@by_the_engine
async def post_clear(request: web.Request) -> dict[str, Any]:
    """POST /nexfort/cache/clear {"confirm": true}: drop every artefact that is not pinned.

    {"ids": [...]}: drop exactly these, pinned or not. What is dropped is compiled again when it is needed.
    """
    body = await read_body(request, ("confirm", "ids"), '{"confirm": true}')
    if "ids" in body:
        ids = ids_in(body)
        return await _remove(lambda store: store.remove(list(_rows_of(store, ids))))
    if body.get("confirm") is not True:
        raise RefusedError(400, 'Clearing removes all that is compiled; expected {"confirm": true} to go on.')
    return await _remove(lambda store: store.clear())


@by_the_engine
async def post_pin(request: web.Request) -> dict[str, Any]:
    """POST /nexfort/cache/pin {"ids": [...], "pinned": true}: keep these, or with false no longer."""
    body = await read_body(request, ("ids", "pinned"), IDS)
    ids, pinned = ids_in(body), body.get("pinned", True)
    if not isinstance(pinned, bool):
        raise RefusedError(400, f"pinned is {pinned!r}; expected true or false.")
    return {"ids": await _changed(lambda store: _pin(store, ids, pinned)), "pinned": pinned}


def _pin(store: Store, ids: list[str], pinned: bool) -> list[str]:
    return [store.pin(one, pinned).id for one in _rows_of(store, ids)]


def _rows_of(store: Store, ids: list[str]) -> dict[str, dict[str, Any]]:
    """The rows with these ids; RefusedError before anything is changed if there is none, or it cannot be changed."""
    rows = {row["id"]: row for row in store.rows()}
    for one in ids:
        if one not in rows:
            raise RefusedError(404, f"Nothing compiled has the id {one}; expected one as GET /nexfort/cache tells it.")
        if rows[one]["base"]:
            raise RefusedError(409, f"{one} lies in the read-only base cache; expected one above it.")
    return {one: rows[one] for one in ids}


async def _remove(action: Callable[[Store], Removed]) -> dict[str, Any]:
    """Run a removal; what went and what is left, in entries and bytes."""
    removed = await _changed(action)
    rows = await asyncio.to_thread(_store().rows)
    size = sum(row["size"] for row in rows)
    return {"removed": removed.entries, "freed": removed.bytes, "count": len(rows), "size": size}


async def _changed(action: Callable[[Store], T]) -> T:
    """Run a change of the live store beside the event loop."""
    from nexfort_engine.cache.lock import LockTimeout

    try:
        return await asyncio.to_thread(action, _store())
    except LookupError as error:
        raise RefusedError(404, f"What was compiled is gone: {without_paths(str(error))}") from error
    except LockTimeout as error:
        raise RefusedError(
            409, "Another process is changing the cache right now; expected it free, try again."
        ) from error
    except OSError as error:
        raise RefusedError(
            500,
            f"The cache cannot be changed ({without_paths(str(error.strerror))}); expected a directory this server may "
            "write.",
        ) from error


def _store() -> Store:
    """The live one: what engines use now stays."""
    from nexfort_engine.api import store_at
    from nexfort_engine.hosts.comfy.model import cache_root

    return store_at(cache_root())
