# SPDX-License-Identifier: Apache-2.0
"""HTTP as bytes on a connection: what no well-behaved client sends. No test lives here."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Sequence
from typing import Any

PAUSE = 0.02  # between two parts: loopback hands each over by itself

Headers = dict[str, str]


def head(path: str, headers: Headers | Sequence[tuple[str, str]], method: str = "POST") -> bytes:
    """The head of a request; headers may be named twice."""
    pairs = headers.items() if isinstance(headers, dict) else headers
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in pairs)]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def posted(port: int, path: str, body: bytes, **headers: str) -> bytes:
    """The head of a POST with a JSON body; `headers` come besides, or in the place of those."""
    told = {"Host": f"127.0.0.1:{port}", "Content-Type": "application/json", "Content-Length": str(len(body))}
    return head(path, told | {name.replace("_", "-"): value for name, value in headers.items()})


def chunk(data: bytes) -> bytes:
    """One chunk of a body whose length nobody knows; of nothing: the last one."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def ask(port: int, *parts: bytes, pause: float = PAUSE, timeout: float = 30.0) -> tuple[int, Any]:
    """(status, JSON or text) of the first answer to a request that is sent in these parts, one after another."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number, part in enumerate(parts):
            if number:
                time.sleep(pause)
            try:
                connection.sendall(part)
            except (BrokenPipeError, ConnectionResetError):  # refused before it was told all
                break
        return _answer(connection)


def _answer(connection: socket.socket) -> tuple[int, Any]:
    found = b""
    while b"\r\n\r\n" not in found and (more := connection.recv(65536)):
        found += more
    begin, _, text = found.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: *(\d+)", begin)
    while len(text) < int(length[1] if length else 0) and (more := connection.recv(65536)):
        text += more
    status = int(begin.split(b" ", 2)[1])
    return status, json.loads(text) if text[:1] == b"{" else text.decode("utf-8", "replace")
