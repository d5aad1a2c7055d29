# SPDX-License-Identifier: Apache-2.0
"""The HTTP routes under /nexfort: what the cache holds, what the live engines did, pruning and clearing.

GET changes nothing. POST wants a JSON body, which keeps another site's page from sending one unasked. No
route takes a path from the client and none tells where anything lies on this machine.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from aiohttp import web

from .cache_manager import listing

if TYPE_CHECKING:
    from nexfort_engine.cache.store import Removed, Store

BODY_LIMIT = 4096
# An absolute path of two parts or more, on any system. Region names are dotted and hold no slash.
_PATH = re.compile(r"(?<![\w.])(?:[A-Za-z]:)?(?:[\\/]+[^\\/\s:'\"<>|,;()\[\]]+){2,}[\\/]?")


class RefusedError(Exception):
    """A request that is answered with `status` and one sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


def register_routes() -> bool:
    """Add the routes to the running server; False where there is none (ComfyUI as a library)."""
    from server import PromptServer

    server = getattr(PromptServer, "instance", None)
    if server is None:
        return False
    server.routes.get("/nexfort/cache")(get_cache)
    server.routes.get("/nexfort/report")(get_report)
    server.routes.post("/nexfort/cache/prune")(post_prune)
    server.routes.post("/nexfort/cache/clear")(post_clear)
    return True


async def get_cache(request: web.Request) -> web.Response:
    """GET /nexfort/cache: {"count", "size", "entries": [{id, region, kind, size, created, last_used}]}."""
    rows = await asyncio.to_thread(listing)
    return web.json_response({"count": len(rows), "size": sum(row["size"] for row in rows), "entries": rows})


async def get_report(request: web.Request) -> web.Response:
    """GET /nexfort/report: {"engines": [{"name", "report"}]}, one for each compiled model or VAE alive."""
    from nexfort_engine.hosts.comfy import reports

    found = await asyncio.to_thread(reports)
    engines = [{"name": name, "report": without_paths(report.as_dict())} for name, report in found]
    return web.json_response({"engines": engines})


async def post_prune(request: web.Request) -> web.Response:
    """POST /nexfort/cache/prune {"max_bytes": n}: drop the least recently used until the rest fits in n."""
    try:
        body = await _body(request, "max_bytes", '{"max_bytes": 1000000000}')
        limit = body.get("max_bytes")
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
            raise RefusedError(400, f"max_bytes is {limit!r}; expected a whole number of bytes, 0 or more.")
        return web.json_response(await _remove(lambda store: store.prune(limit)))
    except RefusedError as refused:
        return _refusal(refused)


async def post_clear(request: web.Request) -> web.Response:
    """POST /nexfort/cache/clear {"confirm": true}: drop every artefact, to be compiled again when needed."""
    try:
        body = await _body(request, "confirm", '{"confirm": true}')
        if body.get("confirm") is not True:
            raise RefusedError(400, 'Clearing removes every artefact; expected {"confirm": true} to go on.')
        return web.json_response(await _remove(lambda store: store.clear()))
    except RefusedError as refused:
        return _refusal(refused)


def without_paths(value: Any) -> Any:
    """A copy of JSON-able data in which no absolute path is left: only its last part stays, after "…/"."""
    if isinstance(value, str):
        return _PATH.sub(lambda found: "…/" + re.split(r"[\\/]", found[0].rstrip("\\/"))[-1], value)
    if isinstance(value, Mapping):
        return {key: without_paths(inner) for key, inner in value.items() if key != "cache_dir"}
    if isinstance(value, (list, tuple)):
        return [without_paths(inner) for inner in value]
    return value


async def _body(request: web.Request, key: str, example: str) -> dict[str, Any]:
    """The JSON object of a request, which may hold `key` and nothing else; RefusedError otherwise."""
    if request.content_type != "application/json":
        raise RefusedError(
            415,
            f"The content type is {request.content_type!r}; expected application/json with {example}.",
        )
    if (request.content_length or 0) > BODY_LIMIT:
        raise RefusedError(413, f"The body has {request.content_length} bytes; expected at most {BODY_LIMIT}.")
    text = await request.content.read(BODY_LIMIT + 1)
    if len(text) > BODY_LIMIT:
        raise RefusedError(413, f"The body has more than {BODY_LIMIT} bytes; expected one such as {example}.")
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"The body is not valid JSON ({error}); expected for example {example}.") from error
    if not isinstance(body, dict):
        raise RefusedError(400, f"The body is a JSON {type(body).__name__}; expected an object such as {example}.")
    unknown = sorted(set(body) - {key})
    if unknown:
        raise RefusedError(400, f"The body has the unknown key {unknown[0]!r}; expected only {key!r}, as {example}.")
    return body


async def _remove(action: Callable[[Store], Removed]) -> dict[str, int]:
    """Run a removal beside the event loop; what went and what is left, in entries and bytes."""
    from nexfort_engine.cache.lock import LockTimeout
    from nexfort_engine.compiled import store_at
    from nexfort_engine.hosts.comfy import cache_root

    store = store_at(cache_root())  # the live one: what engines use now stays
    try:
        removed = await asyncio.to_thread(action, store)
    except LockTimeout as error:
        raise RefusedError(
            409, "Another process is changing the cache right now; expected it free, try again."
        ) from error
    except OSError as error:
        raise RefusedError(
            500,
            f"The cache cannot be changed ({error.strerror}); expected a directory this server may write.",
        ) from error
    rows = await asyncio.to_thread(store.rows)
    return {
        "removed": removed.entries,
        "freed": removed.bytes,
        "count": len(rows),
        "size": sum(row["size"] for row in rows),
    }


def _refusal(refused: RefusedError) -> web.Response:
    return web.json_response({"error": str(refused)}, status=refused.status)
