# SPDX-License-Identifier: Apache-2.0
"""Which requests the routes answer: origins and bodies, without a server; test_server.py asks a real one."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import types
from collections.abc import Callable
from pathlib import Path

import by_path
import pytest

multidict = pytest.importorskip("multidict")

FILE = Path(__file__).resolve().parents[2] / "nodes" / "requests.py"


@pytest.fixture(scope="module")
def requests() -> types.ModuleType:
    """The module by itself: it needs aiohttp, which comes with ComfyUI, and neither ComfyUI nor the engine."""
    pytest.importorskip("aiohttp")
    return by_path.load("nexfort_requests_alone", FILE)


def refused(requests: types.ModuleType, *headers: tuple[str, str]) -> bool:
    """Whether a request with these headers is refused."""
    try:
        requests.refuse_other_origins(multidict.CIMultiDict(headers))
    except requests.RefusedError as error:
        assert error.status == 403 and "expected" in str(error)
        return True
    return False


HOST = ("Host", "127.0.0.1:8188")


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [HOST],
        [HOST, ("Origin", "http://127.0.0.1:8188")],
        [HOST, ("Origin", "http://127.0.0.1:8188"), ("Sec-Fetch-Site", "same-origin")],
        [HOST, ("Sec-Fetch-Site", "none")],
        [("Host", "Comfy.Example"), ("Origin", "https://comfy.example")],
        [("Host", "comfy.example:443"), ("Origin", "https://comfy.example")],
        [("Host", "[::1]:8188"), ("Origin", "http://[::1]:8188")],
    ],
)
def test_own_pages_and_programs_are_answered(requests: types.ModuleType, headers: list[tuple[str, str]]) -> None:
    assert not refused(requests, *headers)


@pytest.mark.parametrize(
    "headers",
    [
        [HOST, ("Origin", "http://evil.example")],
        [HOST, ("Origin", "http://127.0.0.1:3000")],
        [HOST, ("Origin", "http://localhost:8188")],
        [HOST, ("Origin", "null")],
        [HOST, ("Origin", "")],
        [HOST, ("Origin", "file://")],
        [HOST, ("Origin", "http://127.0.0.1:99999")],
        [HOST, ("Origin", "http://[::1")],
        [HOST, ("Origin", "http://127.0.0.1:8188.evil.example")],
        [HOST, ("Origin", "http://evil.example/127.0.0.1:8188")],
        [HOST, ("Origin", "http://127.0.0.1:8188"), ("Origin", "http://evil.example")],
        [("Origin", "http://evil.example")],
        [("Host", "comfy.example"), ("Origin", "http://comfy.example.evil")],
        [HOST, ("Sec-Fetch-Site", "cross-site")],
        [HOST, ("Sec-Fetch-Site", "same-site")],
        [HOST, ("Origin", "http://127.0.0.1:8188"), ("Sec-Fetch-Site", "cross-site")],
    ],
)
def test_pages_of_others_are_refused(requests: types.ModuleType, headers: list[tuple[str, str]]) -> None:
    assert refused(requests, *headers)


HTTPS = [("Sec-Fetch-Site", "same-origin"), ("Sec-Fetch-Mode", "cors"), ("Sec-Fetch-Dest", "empty")]


def host_status(requests: types.ModuleType, *headers: tuple[str, str]) -> int:
    """The status with which a request with these headers is refused for its host; 200 where it is not."""
    try:
        requests.refuse_other_hosts(multidict.CIMultiDict(headers))
    except requests.RefusedError as error:
        assert "expected" in str(error)
        return int(error.status)
    return 200


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets ComfyUI's arguments and the names that are allowed."""

    def configure(allowed: str = "", **arguments: str) -> None:
        monkeypatch.setitem(
            sys.modules, "comfy.cli_args", types.SimpleNamespace(args=types.SimpleNamespace(**arguments))
        )
        monkeypatch.setenv("NEXFORT_ALLOWED_HOSTS", allowed)

    return configure


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "10.0.0.7:8188", "[::1]:8188", "[fd00::7]", "localhost", "LocalHost.:80", "a.localhost", ""],
)
def test_addresses_and_names_of_this_machine_are_known(requests: types.ModuleType, host: str) -> None:
    assert host_status(requests, ("Host", host or socket.gethostname())) == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8188", "localhost.evil.example", "127.0.0.1.evil.example", "evillocalhost"),
        *("evil", "1.2.3", "[::1].evil.example", "127.0.0.1:8188.evil.example"),
    ],
)
def test_other_names_are_refused(requests: types.ModuleType, host: str) -> None:
    for headers in ([], [("Origin", f"http://{host}")], HTTPS[:1], [*HTTPS, ("Origin", f"http://{host}")]):
        assert host_status(requests, ("Host", host), *headers) in (400, 403), headers


@pytest.mark.parametrize(
    "hosts",
    [[], ["127.0.0.1", "127.0.0.1"], [""], [":8188"], ["a b"], ["evil.example@127.0.0.1"], ["127.0.0.1/x"], ["[::1"]],
)
def test_what_is_no_host_is_refused(requests: types.ModuleType, hosts: list[str]) -> None:
    assert host_status(requests, *(("Host", host) for host in hosts), *HTTPS) == 400


def test_a_name_that_was_reached_over_https_is_known(requests: types.ModuleType) -> None:
    """Behind a proxy. No page of others is reached so: nobody has a certificate of a name that leads here."""
    assert host_status(requests, ("Host", "comfy.example"), *HTTPS) == 200
    assert host_status(requests, ("Host", "comfy.example"), *HTTPS, ("Origin", "https://comfy.example")) == 200


def test_the_user_s_own_names_are_known(requests: types.ModuleType, configured: Callable[..., None]) -> None:
    named, other, below = (("Host", name) for name in ("comfy.example:8188", "evil.example", "a.comfy.example"))
    configured()
    assert [host_status(requests, host) for host in (named, other, below)] == [403, 403, 403]
    configured("studio, Comfy.Example")
    assert [host_status(requests, host) for host in (named, other, below)] == [200, 403, 403]
    configured(".comfy.example,.")
    assert [host_status(requests, host) for host in (named, other, below)] == [403, 403, 200]
    configured(listen="127.0.0.1,comfy.example")
    assert [host_status(requests, host) for host in (named, other, below)] == [200, 403, 403]
    configured(enable_cors_header="http://comfy.example:8188")
    assert [host_status(requests, host) for host in (named, other, below)] == [200, 403, 403]
    configured(enable_cors_header="*")
    assert [host_status(requests, host) for host in (named, other, below)] == [403, 403, 403]


def test_pages_that_the_user_named_are_answered(requests: types.ModuleType, configured: Callable[..., None]) -> None:
    """Where a proxy puts this server's address in the place of its own name, or a page of another server asks."""
    page, port, other = (
        [HOST, ("Origin", origin), ("Sec-Fetch-Site", site)]
        for origin, site in (
            ("https://comfy.example", "same-origin"),
            ("http://comfy.example:3000", "cross-site"),
            ("https://evil.example", "cross-site"),
        )
    )
    configured()
    assert [refused(requests, *headers) for headers in (page, port, other)] == [True, True, True]
    configured("comfy.example")
    assert [refused(requests, *headers) for headers in (page, port, other)] == [False, True, True]
    configured(enable_cors_header="http://comfy.example:3000")
    assert [refused(requests, *headers) for headers in (page, port, other)] == [True, False, True]
    configured(enable_cors_header="*")
    assert [refused(requests, *headers) for headers in (page, port, other)] == [True, True, True]


def test_ids_are_whole_and_each_counts_once(requests: types.ModuleType) -> None:
    assert requests.ids_in({"ids": ["a" * 24, "b" * 24, "a" * 24]}) == ["a" * 24, "b" * 24]


@pytest.mark.parametrize(
    "ids",
    [
        None, "a" * 24, [], {}, [1], [None], [["a" * 24]], ["a" * 8], ["A" * 24], ["a" * 24 + "\n"], ["a" * 65],
        ["/etc/passwd"], ["../../" + "a" * 24], ["http://evil.example/" + "a" * 24], ["file:///etc/passwd"],
        ["a" * 23 + "/"],
    ],
)  # fmt: skip
def test_anything_else_is_no_id(requests: types.ModuleType, ids: object) -> None:
    with pytest.raises(requests.RefusedError, match="expected") as error:
        requests.ids_in({"ids": ids})
    assert error.value.status == 400 and len(str(error.value)) < 200


def test_a_fault_is_one_sentence_without_a_place_and_the_log_has_the_rest(
    requests: types.ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    from aiohttp import web
    from aiohttp.test_utils import make_mocked_request

    async def fails(_: object) -> dict[str, object]:
        raise FileNotFoundError(2, "No such file", "/home/somebody/cache/entry")

    async def refuses(_: object) -> dict[str, object]:
        raise web.HTTPNotFound

    request = make_mocked_request("GET", "/nexfort/cache", headers={"Host": "127.0.0.1:8188"})
    answer = asyncio.run(requests.answered(fails)(request))
    said = json.loads(answer.text)["error"]
    assert answer.status == 500 and "FileNotFoundError" in said and "try again" in said and "/home" not in said
    assert "GET /nexfort/cache could not be answered" in caplog.text and "/home/somebody/cache/entry" in caplog.text
    with pytest.raises(web.HTTPNotFound):
        asyncio.run(requests.answered(refuses)(request))
