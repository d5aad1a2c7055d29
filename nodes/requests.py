# SPDX-License-Identifier: Apache-2.0
"""Which requests the routes answer: those of the server's own pages and of programs, with a small JSON body.

A page of another site can make a browser send requests to a server on this machine. Browsers say where a request
comes from, and that is compared here; a program such as curl says nothing, and is answered. Nothing here knows what a
route does.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

BODY_LIMIT = 4096
# What a browser tells of a request that this server's own page made, or that the user typed.
OWN_SITES = ("same-origin", "none")
_ID = re.compile(r"[0-9a-f]{16,64}")
_LONGEST_WORKFLOW_ID = 128
_LONGEST_NODE_ID = 128  # inside subgraphs they hold those of the nodes around
_PORTS = {"http": 80, "https": 443}

Answer = Mapping[str, Any]


class RefusedError(Exception):
    """A request that is answered with `status` and one sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


def answered(handler: Callable[[web.Request], Awaitable[Answer]]) -> Callable[[web.Request], Awaitable[web.Response]]:
    """A route from a function that returns JSON-able data: same-origin only, refusals as one sentence."""

    @functools.wraps(handler)
    async def respond(request: web.Request) -> web.Response:
        try:
            refuse_other_origins(request.headers)
            return web.json_response(await handler(request))
        except RefusedError as refused:
            return web.json_response({"error": str(refused)}, status=refused.status)

    return respond


def refuse_other_origins(headers: Any) -> None:
    """RefusedError for what a page of another origin sent. `headers` is a mapping with several values a name."""
    site = headers.get("Sec-Fetch-Site")
    if site is not None and site not in OWN_SITES:
        raise RefusedError(403, f"The request comes from another site ({site[:40]!r}); expected one of this server.")
    for origin in headers.getall("Origin", ()):
        if _place(origin) is None or _place(origin) != _place(origin, headers.get("Host", "")):
            raise RefusedError(403, f"The request comes from {origin[:80]!r}; expected a page of this server.")


def _place(origin: str, host: str | None = None) -> tuple[str, int] | None:
    """(host, port) of an origin, or of a Host header as it reads under that origin's scheme; None if it has none."""
    try:
        parts = urlsplit(origin)
        scheme = parts.scheme
        if host is not None:
            parts = urlsplit(f"//{host}")
        if scheme not in _PORTS or not parts.hostname:
            return None
        return parts.hostname, parts.port or _PORTS[scheme]
    except ValueError:  # no port, no address: nothing that a browser would send
        return None


async def read_body(request: web.Request, keys: tuple[str, ...], example: str) -> dict[str, Any]:
    """The JSON object of a request, which may hold `keys` and nothing else; RefusedError otherwise."""
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
    unknown = sorted(set(body) - set(keys))
    if unknown:
        known = " or ".join(map(repr, keys))
        raise RefusedError(400, f"The body has the unknown key {unknown[0]!r}; expected only {known}, as {example}.")
    return body


def ids_in(body: Mapping[str, Any]) -> list[str]:
    """The whole ids under "ids", each once; RefusedError for anything that is not one, such as a path."""
    ids = body.get("ids")
    if not isinstance(ids, list) or not ids:
        raise RefusedError(400, f"ids is {_short(ids)}; expected a list of ids as GET /nexfort/cache tells them.")
    for one in ids:
        if not isinstance(one, str) or _ID.fullmatch(one) is None:
            raise RefusedError(400, f"ids holds {_short(one)}; expected whole ids as GET /nexfort/cache tells them.")
    return list(dict.fromkeys(ids))


def node_ids_in(body: Mapping[str, Any]) -> list[str]:
    """The ids of nodes under "nodes", each once; RefusedError for anything that is not one."""
    ids = body.get("nodes")
    if not isinstance(ids, list) or not ids:
        raise RefusedError(400, f"nodes is {_short(ids)}; expected a list of ids as GET /nexfort/nodes tells them.")
    for one in ids:
        if not isinstance(one, str) or not 0 < len(one) <= _LONGEST_NODE_ID:
            raise RefusedError(400, f"nodes holds {_short(one)}; expected ids as GET /nexfort/nodes tells them.")
    return list(dict.fromkeys(ids))


def workflow_in(body: Mapping[str, Any]) -> str | None:
    """The id under "workflow", None where it is null or missing; RefusedError for anything else."""
    workflow = body.get("workflow")
    if workflow is None or (isinstance(workflow, str) and 0 < len(workflow) <= _LONGEST_WORKFLOW_ID):
        return workflow
    raise RefusedError(400, f"workflow is {_short(workflow)}; expected an id as GET /nexfort/nodes tells it, or null.")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
