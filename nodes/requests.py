# SPDX-License-Identifier: Apache-2.0
"""Which requests the routes answer: those of the server's own pages and of programs, with a small JSON body.

A page of another site can make a browser send requests to a server on this machine. Browsers say where a request
comes from, and that is compared here; a program such as curl says nothing, and is answered. That does not stop a site
whose name leads to this machine (DNS rebinding): to the browser its page is one of this server. What such a request
cannot hide is the name, so the name must be known: an address, `localhost`, this machine's own, one that ComfyUI was
started with, or one that the user allowed. What a browser sent over https needs none of it, because a certificate
proved the name. Nothing here knows what a route does.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import json
import logging
import os
import re
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from aiohttp import ClientError, web

log = logging.getLogger("nexfort")

BODY_LIMIT = 4096
BODY_SECONDS = 10.0  # within which a body has to be here
ALLOWED_HOSTS = "NEXFORT_ALLOWED_HOSTS"  # names, separated by commas; one that begins with a dot is a whole domain
# What a browser tells of a request that this server's own page made, or that the user typed.
OWN_SITES = ("same-origin", "none")
FAULT = (
    "Nexfort could not answer ({kind}), and nothing was lost; try again, and if it stays so, report it with the lines "
    "of the server's log."
)
_ID = re.compile(r"[0-9a-f]{16,64}")
_LONGEST_WORKFLOW_ID = 128
_LONGEST_NODE_ID = 128  # inside subgraphs they hold those of the nodes around
_PORTS = {"http": 80, "https": 443}
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/?#@\[\]\\]+)(?::\d{0,5})?")
# What browsers tell, all of it, over https and on this machine's own names; a page can neither set nor remove it.
_TOLD_OVER_HTTPS = ("Sec-Fetch-Site", "Sec-Fetch-Mode", "Sec-Fetch-Dest")

Answer = Mapping[str, Any]


class RefusedError(Exception):
    """A request that is answered with `status` and one sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


def answered(handler: Callable[[web.Request], Awaitable[Answer]]) -> Callable[[web.Request], Awaitable[web.Response]]:
    """A route from a function that returns JSON-able data: same-origin only, refusals as one sentence.

    So is a fault of ours, whose whole story is in the server's log: what it says may name places on this machine.
    """

    @functools.wraps(handler)
    async def respond(request: web.Request) -> web.Response:
        try:
            refuse_other_hosts(request.headers)
            refuse_other_origins(request.headers)
            return web.json_response(await handler(request))
        except RefusedError as refused:
            return web.json_response({"error": str(refused)}, status=refused.status)
        except web.HTTPException:  # aiohttp's own answer
            raise
        except Exception as error:
            log.exception("Nexfort: %s %s could not be answered", request.method, request.path)
            return web.json_response({"error": FAULT.format(kind=type(error).__name__)}, status=500)

    return respond


def refuse_other_hosts(headers: Any) -> None:
    """RefusedError for what is not known to be meant for this server. `headers` has several values a name."""
    hosts = headers.getall("Host", ())
    name = name_in(hosts[0]) if len(hosts) == 1 else None
    if name is None:
        raise RefusedError(400, f"The request has the Host {', '.join(hosts)[:80]!r}; expected one name or address.")
    if is_own_name(name) or is_allowed(name) or name in {place[0] for place in _origins_of_comfyui()}:
        return
    origins = headers.getall("Origin", ())
    over_https = [origin.startswith("https://") for origin in origins]
    if all(over_https) if origins else all(headers.get(one) for one in _TOLD_OVER_HTTPS):
        return
    raise RefusedError(
        403,
        f"The request is for the host {name[:80]!r}, which is not known to be this server; expected an address, "
        f"localhost, or a name that {ALLOWED_HOSTS} in the server's environment holds.",
    )


def name_in(host: str) -> str | None:
    """The name or address of a Host header, in lower case and without the port; None for what is no such header."""
    found = _HOST.fullmatch(host)
    return None if found is None else found[1].strip("[]").removesuffix(".").lower() or None


def is_own_name(name: str) -> bool:
    """Whether no page of others can have this name: an address, a name of this machine, one that ComfyUI listens on."""
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    if name == "localhost" or name.endswith(".localhost") or name in _own_names():
        return True
    return name in [word.strip().lower() for word in str(_argument("listen") or "").split(",")]


def is_allowed(name: str) -> bool:
    """Whether the user allowed the name."""
    words = [word.strip().lower() for word in os.environ.get(ALLOWED_HOSTS, "").split(",")]
    return any(name == word or (len(word) > 1 and word[0] == "." and name.endswith(word)) for word in words)


@functools.cache
def _own_names() -> frozenset[str]:
    """This machine's name, and what it is called on a local network."""
    own = socket.gethostname().lower()
    return frozenset((own, f"{own.partition('.')[0]}.local")) if own else frozenset()


def _origins_of_comfyui() -> set[tuple[str, int]]:
    """The origin whose pages may use ComfyUI, where it was started with one; "*" names none."""
    place = _place(str(_argument("enable_cors_header") or ""))
    return set() if place is None else {place}


def _argument(name: str) -> Any:
    """An argument of ComfyUI's command line; None where there is none."""
    return getattr(getattr(sys.modules.get("comfy.cli_args"), "args", None), name, None)


def refuse_other_origins(headers: Any) -> None:
    """RefusedError for what a page of another origin sent. `headers` is a mapping with several values a name."""
    origins, trusted = headers.getall("Origin", ()), _origins_of_comfyui()
    site = headers.get("Sec-Fetch-Site")
    if site is not None and site not in OWN_SITES and not (origins and all(_place(one) in trusted for one in origins)):
        raise RefusedError(403, f"The request comes from another site ({site[:40]!r}); expected one of this server.")
    for origin in origins:
        place, own = _place(origin), _place(origin, headers.get("Host", ""))
        # a proxy may have put this server's address in the place of the name that the page has
        if place is None or not (place == own or place in trusted or is_allowed(place[0])):
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
    try:
        body = json.loads(await _whole_body(request, example))
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"The body is not valid JSON ({error}); expected for example {example}.") from error
    if not isinstance(body, dict):
        raise RefusedError(400, f"The body is a JSON {type(body).__name__}; expected an object such as {example}.")
    unknown = sorted(set(body) - set(keys))
    if unknown:
        known = " or ".join(map(repr, keys)) or "no key"
        raise RefusedError(400, f"The body has the unknown key {unknown[0]!r}; expected only {known}, as {example}.")
    return body


async def _whole_body(request: web.Request, example: str) -> bytes:
    """All bytes of a body, in however many parts they come; RefusedError for too many, too late or packed."""
    if packed := request.headers.get("Content-Encoding"):  # a few bytes could stand for gigabytes
        raise RefusedError(415, f"The body is encoded as {packed[:40]!r}; expected it as it is, such as {example}.")
    if (request.content_length or 0) > BODY_LIMIT:
        raise RefusedError(413, f"The body has {request.content_length} bytes; expected at most {BODY_LIMIT}.")
    try:
        return await asyncio.wait_for(_read(request, example), BODY_SECONDS)
    except asyncio.TimeoutError:
        raise RefusedError(
            408, f"The body did not come to its end within {BODY_SECONDS:g} s; expected one such as {example}."
        ) from None
    except (ClientError, web.RequestPayloadError) as error:
        raise RefusedError(400, f"The body cannot be read ({error}); expected one such as {example}.") from error


async def _read(request: web.Request, example: str) -> bytes:
    text = b""
    while part := await request.content.read(BODY_LIMIT + 1 - len(text)):
        text += part
        if len(text) > BODY_LIMIT:
            raise RefusedError(413, f"The body has more than {BODY_LIMIT} bytes; expected one such as {example}.")
    return text


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
