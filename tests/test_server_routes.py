# SPDX-License-Identifier: Apache-2.0
"""Every route of a real server, asked as nobody should: wrong method, foreign origin, unknown id, malformed body.

The routes are those that the server itself lists, so that a new one without a row in ROUTES fails here. The plugin it
runs is the registry's package, unpacked: what is missing there is missing here. The cache holds artefacts that are
never loaded; what routes do to real ones is tested in test_server.py.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import packed
import pytest
import raw_http
import served

from nexfort_engine.cache.store import Store
from nexfort_engine.cli.comfy_server import ComfyServer

pytestmark = pytest.mark.comfy

UNKNOWN = "0123456789abcdef01234567"
RESULT = {"workflow": "w", "mode": "O2", "size": "8x8", "steps": 8, "runs": [[True, 1.0], [False, 2.0]]}
# (method, path) -> bodies that change something or are answered, for one id. GET takes none.
ROUTES: dict[tuple[str, str], tuple[dict[str, Any], ...]] = {
    ("GET", "/nexfort/cache"): (),
    ("GET", "/nexfort/help"): (),
    ("GET", "/nexfort/nodes"): (),
    ("GET", "/nexfort/report"): (),
    ("POST", "/nexfort/benchmark"): (RESULT,),
    ("POST", "/nexfort/cache/place"): ({},),
    ("POST", "/nexfort/options"): ({"text": "max-aut"}, {"text": ""}),
    ("POST", "/nexfort/verify"): ({"nodes": ["12"]}, {"nodes": ["12"], "workflow": "0-1"}, {"workflow": None}, {}),
    ("POST", "/nexfort/cache/prune"): ({"max_bytes": 0}, {"ids": [UNKNOWN]}),
    ("POST", "/nexfort/cache/clear"): ({"confirm": True}, {"ids": [UNKNOWN]}),
    ("POST", "/nexfort/cache/pin"): ({"ids": [UNKNOWN]}, {"ids": [UNKNOWN], "pinned": False}),
}
GETS = [path for method, path in ROUTES if method == "GET"]
POSTS = [path for method, path in ROUTES if method == "POST"]
TAKING_IDS = [path for (_, path), bodies in ROUTES.items() if any("ids" in body for body in bodies)]
ABOVE = ["", "/api"]  # ComfyUI hands out each route under both
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")  # ComfyUI answers OPTIONS itself, before any route
FOREIGN = [
    {"Origin": "http://evil.example"},
    {"Origin": "http://evil.example", "Host": "comfy.example"},  # what ComfyUI itself lets through
    {"Origin": "null"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Host": "evil.example"},  # a name that leads here, as that of a page whose owner changed where it leads
    {"Host": "evil.example", "Origin": "http://evil.example"},
    {"Host": "127.0.0.1.evil.example:8188"},
]
JSON = "application/json"
MALFORMED: list[tuple[bytes, str, int]] = [
    (b"", JSON, 400),
    (b"{", JSON, 400),
    (b"\xff\xfe", JSON, 400),
    (b"[]", JSON, 400),
    (b"null", JSON, 400),
    (b'"ids"', JSON, 400),
    (b'{"path": "/"}', JSON, 400),
    (b'{"url": "http://localhost/bundle"}', JSON, 400),
    (b'{"file": "bundle"}', JSON, 400),
    (b"[" * 3000, JSON, 400),
    (b" " * 5000, JSON, 413),
    (b"{}", "text/plain", 415),
    (b'{"ids": ["%s"], "confirm": true, "max_bytes": 0}' % UNKNOWN.encode(), "text/plain", 415),
    (b"max_bytes=0&confirm=true", "application/x-www-form-urlencoded", 415),
]
NO_IDS: list[Any] = [
    "0123456789abcdef01234567", [], {}, None, [1], [None], ["01234567"], ["/etc/passwd"], ["C:\\Windows"],
    ["../0123456789abcdef01234567"], ["http://localhost/0123456789abcdef"], [UNKNOWN.upper()], [UNKNOWN, "x"],
]  # fmt: skip
NO_NODES: list[Any] = ["12", [], {}, None, [12], [None], [""], ["1" * 129], [["12"]]]


@pytest.fixture(scope="module")
def comfyui() -> Path:
    """The ComfyUI of this machine."""
    return served.comfyui_or_skip()


@pytest.fixture(scope="module")
def server(comfyui: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    """A server with the packed plugin, two artefacts that nobody uses, and the pack that lists the routes."""
    folder = tmp_path_factory.mktemp("routes")
    base, cache = served.base_folder(folder / "base", comfyui), folder / "cache"
    (base / "custom_nodes" / "testing_routes").symlink_to(packed.ROOT / "tests" / "support" / "testing_routes")
    cache.mkdir(mode=0o700)
    fill(cache)
    with served.server(comfyui, base, cache, plugin=packed.unpack(folder / "plugin")) as running:
        yield running


def fill(cache: Path) -> None:
    """Two artefacts."""
    store = Store(cache)
    for number in range(2):
        with store.stage() as staged:
            (staged / "payload").mkdir(exist_ok=True)
            (staged / "payload" / "code.py").write_text(f"x = {number}\n")
            info = {"region": f"blocks.{number}", "kind": "Block", "family": "Flux"}
            store.commit("0" * 32, staged, {"inputs": number, "info": info})


def ask(
    server: ComfyServer, method: str, path: str, data: bytes | None = None, kind: str = JSON, **headers: str
) -> tuple[int, Any]:
    """(status, answer) of a request, refused or not."""
    return served.request(server, path, data, method=method, headers={"Content-Type": kind, **headers})


@pytest.fixture
def unchanged(server: ComfyServer) -> Iterator[None]:
    """The cache is the same after the test."""
    before = server.get("/nexfort/cache")
    assert before["count"] == 2 and not [entry for entry in before["entries"] if entry["pinned"]]
    yield
    assert server.get("/nexfort/cache") == before


# ---- what there is -----------------------------------------------------------------------------------------


def test_every_route_is_tested_here(server: ComfyServer) -> None:
    listed = {(method, path) for method, path in server.get("/testing/routes")}
    ours = {(method, path) for method, path in listed if "/nexfort/" in path and not path.startswith("/extensions")}
    gets = {("HEAD", path) for method, path in ROUTES if method == "GET"}  # aiohttp's, for each GET
    assert ours == {(method, above + path) for method, path in {*ROUTES, *gets} for above in ABOVE}


def test_the_packed_plugin_is_whole(server: ComfyServer) -> None:
    log = [line for line in server.log.splitlines() if "nexfort" in line.lower()]
    assert not [line for line in log if "IMPORT FAILED" in line or "WARNING" in line or "ERROR" in line]
    named = json.loads((packed.ROOT / "locales" / "en" / "nodeDefs.json").read_text(encoding="utf-8"))
    assert named.keys() <= server.get("/object_info").keys()
    assert server.get_bytes("/extensions/nexfort/nexfort.js").startswith(b"// SPDX")
    assert server.get_bytes("/extensions/nexfort/docs/NexfortCompileModel.md")
    assert "fr" in server.get("/i18n") and "nexfort" in server.get("/i18n")["fr"]
    assert any("Z-Image-Turbo" in names for names in server.get("/workflow_templates").values())
    assert any(one["name"] == "Load and compile" for one in server.get("/global_subgraphs").values())


# ---- old workflows -----------------------------------------------------------------------------------------


def errors(server: ComfyServer, prompt: dict[str, Any]) -> dict[str, tuple[str, set[str]]]:
    """What the server says of a prompt that cannot run: node -> (its class, the inputs that are wrong)."""
    status, answer = ask(server, "POST", "/prompt", json.dumps({"prompt": prompt}).encode())
    assert status == 400, answer
    return {
        number: (told["class_type"], {one["extra_info"]["input_name"] for one in told["errors"]})
        for number, told in answer["node_errors"].items()
    }


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    """A node of a prompt, with the title that front ends save and the server's replacements need."""
    return {"class_type": kind, "inputs": inputs, "_meta": {"title": kind}}


def test_the_server_knows_every_replacement(server: ComfyServer) -> None:
    shown = server.get("/object_info")
    told = [one for rules in server.get("/node_replacements").values() for one in rules]
    ours = [one for one in told if one["new_node_id"].startswith("Nexfort")]
    assert {"TorchCompileModel", "TorchCompileVAE", "ModelSpeedup"} <= {one["old_node_id"] for one in ours}
    for rule in ours:
        required = shown[rule["new_node_id"]]["input"]["required"]
        for entry in rule["input_mapping"]:
            kind, options = required[entry["new_id"]]
            if "set_value" in entry:
                assert entry["set_value"] == options["default"], rule
                assert kind != "COMBO" or entry["set_value"] in options["options"], rule
        missing = required.keys() - {entry["new_id"] for entry in rule["input_mapping"]}
        assert not missing or not rule["output_mapping"], "the server would refuse what it made itself"


def test_a_missing_node_is_replaced_and_an_installed_one_is_not(server: ComfyServer) -> None:
    """Each has a link of the wrong type or a wrong value, by which the server tells the class that it looked at."""
    prompt = {
        "1": node("CheckpointLoaderSimple", ckpt_name="none.safetensors"),
        "2": node("TorchCompileModel", model=["1", 0], backend="of nobody"),
        "3": node("TorchCompileModelAdvanced", model=["1", 2], backend="inductor", mode="default", dynamic="false"),
        "4": node("TorchCompileVAE", vae=["1", 0], backend="inductor"),
        "5": node("TorchCompileControlNet", controlnet=["1", 0], backend="inductor"),
        "6": node("NexfortCacheManager", after=["2", 0]),
        "7": node("NexfortCacheManager", after=["3", 0]),
        "8": node("NexfortCacheManager", after=["4", 0]),
        "9": node("NexfortCacheManager", after=["5", 0]),
    }
    told = errors(server, prompt)
    assert told["2"] == ("TorchCompileModel", {"backend"})
    assert told["3"] == ("NexfortCompileModel", {"model"})
    assert told["4"] == ("NexfortCompileVAE", {"vae"})
    assert told["5"] == ("NexfortCompileControlNet", {"control_net"})


# ---- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("above", ABOVE)
@pytest.mark.parametrize("path", [*GETS, *POSTS])
def test_wrong_methods_are_refused(server: ComfyServer, path: str, above: str) -> None:
    right = {method for method, one in ROUTES if one == path}
    right |= {"HEAD"} if "GET" in right else set()
    for method in METHODS:
        # What no route takes may go to ComfyUI's static files, which hold nothing of that name.
        found = ask(server, method, above + path, b"{}" if method in ("POST", "PUT", "PATCH") else None)[0]
        assert (found in (404, 405)) == (method not in right), (method, found)


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("headers", FOREIGN, ids=lambda headers: " ".join(headers.values()))
def test_pages_of_other_origins_are_refused(server: ComfyServer, headers: dict[str, str]) -> None:
    ids = [entry["id"] for entry in server.get("/nexfort/cache")["entries"]]
    for (method, path), bodies in ROUTES.items():
        for above in ABOVE:
            if method == "GET":
                assert ask(server, "GET", above + path, **headers)[0] == 403, path
                assert ask(server, "HEAD", above + path, **headers)[0] == 403, path
            for body in bodies:
                data = json.dumps({**body, **({"ids": ids} if "ids" in body else {})}).encode()
                assert ask(server, "POST", above + path, data, **headers)[0] == 403, (path, body)


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("path", POSTS)
def test_malformed_bodies_are_refused(server: ComfyServer, path: str) -> None:
    for data, kind, status in MALFORMED:
        found, answer = ask(server, "POST", path, data, kind)
        assert found == status, (data[:40], kind, answer)
        assert "expected" in answer["error"], answer


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("path", TAKING_IDS)
def test_unknown_ids_are_refused(server: ComfyServer, path: str) -> None:
    known = server.get("/nexfort/cache")["entries"][0]["id"]
    for ids in ([UNKNOWN], [known, UNKNOWN], [known[:-1] + ("0" if known[-1] != "0" else "1")]):
        status, answer = ask(server, "POST", path, json.dumps({"ids": ids}).encode())
        assert status == 404 and "expected" in answer["error"], answer
    for ids in NO_IDS:
        status, answer = ask(server, "POST", path, json.dumps({"ids": ids}).encode())
        assert status == 400 and "expected" in answer["error"], (ids, answer)


@pytest.mark.usefixtures("unchanged")
def test_unknown_nodes_are_refused(server: ComfyServer) -> None:
    for nodes, status in [(nodes, 400) for nodes in NO_NODES] + [(["12"], 404), (["12", "12:3"], 404)]:
        found, answer = ask(server, "POST", "/nexfort/verify", json.dumps({"nodes": nodes}).encode())
        assert found == status and "expected" in answer["error"], (nodes, answer)
    for workflow in ("", 12, [], {}, True, "1" * 129):
        found, answer = ask(server, "POST", "/nexfort/verify", json.dumps({"workflow": workflow}).encode())
        assert found == 400 and "expected" in answer["error"], (workflow, answer)
    assert ask(server, "POST", "/nexfort/verify", b"{}") == (200, {"nodes": []}), "nothing has run"


@pytest.mark.usefixtures("unchanged")
def test_values_of_another_kind_are_refused(server: ComfyServer) -> None:
    known = server.get("/nexfort/cache")["entries"][0]["id"]
    for route, key, values, says in (
        ("prune", "max_bytes", ["1", 1.5, True, -1, [1]], "whole number"),
        ("pin", "pinned", ["yes", 1, None], "true or false"),
        ("clear", "confirm", [False, "yes", 1, None], "to go on"),
    ):
        for value in values:
            body = {key: value, **({"ids": [known]} if route == "pin" else {})}
            status, answer = ask(server, "POST", f"/nexfort/cache/{route}", json.dumps(body).encode())
            assert status == 400 and says in answer["error"], (route, value, answer)
    both = json.dumps({"max_bytes": 0, "ids": [known]}).encode()
    assert ask(server, "POST", "/nexfort/cache/prune", both)[0] == 400


# ---- what comes as no client of ours sends it --------------------------------------------------------------

PRUNE = "/nexfort/cache/prune"
NOTHING = b'{"max_bytes": 1000000000000}'  # drops nothing


@pytest.mark.usefixtures("unchanged")
def test_a_body_may_come_in_any_parts(server: ComfyServer) -> None:
    begin = raw_http.posted(server.port, PRUNE, NOTHING)
    for at in range(len(NOTHING) + 1):
        assert raw_http.ask(server.port, begin, NOTHING[:at], NOTHING[at:])[0] == 200, at
    whole = begin + NOTHING
    for at in (1, len(begin) - 3, len(begin) - 1):  # the head in parts
        assert raw_http.ask(server.port, whole[:at], whole[at:])[0] == 200, at
    assert raw_http.ask(server.port, begin, *(bytes([one]) for one in NOTHING))[0] == 200
    chunked = raw_http.posted(server.port, PRUNE, b"", Transfer_Encoding="chunked").replace(
        b"Content-Length: 0\r\n", b""
    )
    parts = [raw_http.chunk(NOTHING[:9]), raw_http.chunk(NOTHING[9:]), raw_http.chunk(b"")]
    assert raw_http.ask(server.port, chunked + b"".join(parts))[0] == 200
    assert raw_http.ask(server.port, chunked, *parts)[0] == 200


@pytest.mark.usefixtures("unchanged")
def test_a_body_is_read_to_its_end_before_it_is_believed(server: ComfyServer) -> None:
    """What begins as a sound body and goes on as something else is refused, wherever it was parted."""
    clear = b'{"confirm": true}'
    for more in (b"x", b"{}", b'{"ids": []}', b"\x00", clear):
        begin = raw_http.posted(server.port, "/nexfort/cache/clear", clear + more)
        for parts in ((clear + more,), (clear, more), (clear[:5], clear[5:], more)):
            assert raw_http.ask(server.port, begin, *parts)[0] == 400, (more, parts)
        chunked = begin.replace(b"Content-Length: %d" % len(clear + more), b"Transfer-Encoding: chunked")
        parts = (raw_http.chunk(clear), raw_http.chunk(more), raw_http.chunk(b""))
        assert raw_http.ask(server.port, chunked, *parts)[0] == 400, more


@pytest.mark.usefixtures("unchanged")
def test_large_bodies_are_refused_however_they_come(server: ComfyServer) -> None:
    large = b" " * 5000 + NOTHING
    assert raw_http.ask(server.port, raw_http.posted(server.port, PRUNE, large), large[:100], large[100:])[0] == 413
    claimed = raw_http.posted(server.port, PRUNE, b"", Content_Length=str(10**12))
    assert raw_http.ask(server.port, claimed)[0] == 413
    chunked = raw_http.posted(server.port, PRUNE, b"", Transfer_Encoding="chunked").replace(
        b"Content-Length: 0\r\n", b""
    )
    parts = [raw_http.chunk(b" " * 1000)] * 6
    assert raw_http.ask(server.port, chunked, *parts)[0] == 413


@pytest.mark.usefixtures("unchanged")
def test_packed_bodies_are_refused(server: ComfyServer) -> None:
    for kind, bits in (("gzip", 31), ("deflate", 15)):
        for what in (NOTHING, b" " * 50_000_000):
            body = _packed(what, bits)
            begin = raw_http.posted(server.port, PRUNE, body, Content_Encoding=kind)
            status, answer = raw_http.ask(server.port, begin, body)
            assert status == 415 and "expected" in answer["error"], (kind, answer)


def _packed(what: bytes, bits: int) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, bits)
    return packer.compress(what) + packer.flush()


@pytest.mark.usefixtures("unchanged")
def test_a_body_that_does_not_come_is_not_waited_for_without_end(server: ComfyServer) -> None:
    begin = raw_http.posted(server.port, PRUNE, NOTHING, Content_Length="100")
    status, answer = raw_http.ask(server.port, begin, NOTHING)
    assert status == 408 and "expected" in answer["error"]
    assert ask(server, "GET", "/nexfort/nodes")[0] == 200


@pytest.mark.usefixtures("unchanged")
def test_a_request_has_one_host(server: ComfyServer) -> None:
    here = f"127.0.0.1:{server.port}"
    for hosts in ([], [here, "evil.example"], ["evil.example", here], [here, here], [""], ["evil.example@127.0.0.1"]):
        for path in GETS:
            status, _ = raw_http.ask(server.port, raw_http.head(path, [("Host", host) for host in hosts], "GET"))
            assert status == 400, (hosts, path)


def test_no_answer_tells_a_place(server: ComfyServer, comfyui: Path) -> None:
    said = [ask(server, "GET", path) for path in GETS]
    said += [ask(server, "POST", path, data, kind) for path in POSTS for data, kind, _ in MALFORMED]
    said += [ask(server, "POST", "/nexfort/cache/place", b"{}", **headers) for headers in ({}, *FOREIGN)]
    text = json.dumps(said)
    for place in (comfyui, packed.ROOT, Path.home(), server.cache_dir):
        assert str(place) not in text


def test_the_place_of_the_cache_is_told_to_the_servers_own_page_alone(server: ComfyServer) -> None:
    told = ask(server, "POST", "/nexfort/cache/place", b"{}", Origin=server.url)
    assert told == (200, {"path": str(server.cache_dir), "problem": None})
    status, answer = ask(server, "POST", "/nexfort/cache/place", b"{}")
    assert status == 403 and "expected its Origin" in answer["error"]
    for path in ("/nexfort/report", "/nexfort/help"):
        assert str(server.cache_dir) not in json.dumps(server.get(path)), "what is copied holds no path"


def test_a_result_is_kept_and_anything_else_is_refused(server: ComfyServer) -> None:
    for wrong in ({**RESULT, "runs": []}, {**RESULT, "steps": "8"}, {"mode": "O2"}, {**RESULT, "mode": "x" * 500}):
        status, answer = ask(server, "POST", "/nexfort/benchmark", json.dumps(wrong).encode())
        assert status == 400 and "expected" in answer["error"], wrong
    assert server.get("/nexfort/report")["benchmarks"] == []
    status, answer = ask(server, "POST", "/nexfort/benchmark", json.dumps(RESULT).encode())
    assert status == 200 and answer["kept"] and answer["benchmark"]["device"]
    assert server.get("/nexfort/report")["benchmarks"] == [answer["benchmark"]]


# ---- what is answered --------------------------------------------------------------------------------------


def test_own_pages_and_programs_are_answered(server: ComfyServer) -> None:
    own = {"Origin": server.url, "Sec-Fetch-Site": "same-origin"}
    for headers in (own, {}, {"Sec-Fetch-Site": "none"}):
        for path in GETS:
            assert ask(server, "GET", path, **headers)[0] == 200
        status, answer = ask(server, "POST", "/nexfort/cache/prune", b'{"max_bytes": 1000000000000}', **headers)
        assert (status, answer["removed"]) == (200, 0)


def test_each_name_of_this_server_is_answered(server: ComfyServer) -> None:
    over_https = {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors", "Sec-Fetch-Dest": "empty"}
    for name in ("localhost", "LOCALHOST", "[::1]", "192.168.1.7", "[2001:db8::7]", "studio.localhost"):
        for port in ("", ":8188"):
            for headers in ({}, {"Origin": f"http://{name}{port}"}):
                assert ask(server, "GET", "/nexfort/nodes", Host=name + port, **headers)[0] == 200, (name, headers)
                status, answer = ask(server, "POST", PRUNE, NOTHING, Host=name + port, **headers)
                assert status == 200, (name, headers, answer)
    proxied = {"Host": "comfy.example", **over_https}
    assert ask(server, "GET", "/nexfort/nodes", **proxied)[0] == 200
    assert ask(server, "POST", PRUNE, NOTHING, Origin="https://comfy.example", **proxied)[0] == 200


def test_each_change_is_made(server: ComfyServer) -> None:
    """Last, because it empties the cache: every body of every POST route, with an id that is there."""
    entries = server.get("/nexfort/cache")["entries"]
    for path, body in (
        ("pin", {"ids": [entries[0]["id"]]}),
        ("pin", {"ids": [entries[0]["id"]], "pinned": False}),
        ("prune", {"ids": [entries[0]["id"]]}),
        ("clear", {"ids": [entries[1]["id"]]}),
        ("clear", {"confirm": True}),
        ("prune", {"max_bytes": 0}),
    ):
        assert ask(server, "POST", f"/api/nexfort/cache/{path}", json.dumps(body).encode())[0] == 200, (path, body)
    assert server.get("/nexfort/cache")["count"] == 0
