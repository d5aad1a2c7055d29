# SPDX-License-Identifier: Apache-2.0
"""Which requests the routes answer: origins and bodies, without a server; test_server.py asks a real one."""

from __future__ import annotations

import types
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
