# SPDX-License-Identifier: Apache-2.0
"""Answers wait for the engine, which one thread imports, behind what is imported ahead. A real server is asked in
test_server.py.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import served

pytest.importorskip("aiohttp")
from aiohttp.test_utils import make_mocked_request

from nexfort_engine.lowering import preload

pytestmark = pytest.mark.comfy


@pytest.fixture(scope="module")
def plugin(comfyui: Path) -> str:
    """The name of the plugin's package of nodes, beside a real comfy_api."""
    return served.plugin_nodes().__name__


def part(plugin: str, name: str) -> types.ModuleType:
    return sys.modules[f"{plugin}.{name}"]


def test_one_thread_imports_and_the_others_wait(plugin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = part(plugin, "engine_import")
    inside, most, ahead = [0], [0], threading.Event()

    def wait(*_: object) -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        assert ahead.wait(30)
        inside[0] -= 1

    monkeypatch.setattr(preload, "wait_for_import", wait)
    monkeypatch.setattr(ours, "_is_here", False)
    threads = [threading.Thread(target=ours.engine_is_here) for _ in range(4)]
    for thread in threads:
        thread.start()
    threads[0].join(0.3)
    assert all(thread.is_alive() for thread in threads), "nothing is imported beside what is imported ahead"
    ahead.set()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads) and most == [1] and ours._is_here


GETS = {"get_cache": "/nexfort/cache", "get_report": "/nexfort/report", "get_help": "/nexfort/help"}


@pytest.mark.parametrize("name", GETS)
def test_what_the_engine_answers_waits_for_it_and_the_nodes_do_not(
    plugin: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    routes = part(plugin, "routes")
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path))
    waited: list[str] = []
    monkeypatch.setattr(routes, "engine_is_here", lambda: waited.append(threading.current_thread().name))

    def ask(route: str, path: str, host: str = "127.0.0.1") -> Any:
        request = make_mocked_request("GET", path, headers={"Host": host})
        return asyncio.run(getattr(routes, route)(request)).status

    assert ask("get_nodes", "/nexfort/nodes") == 200 and waited == []
    assert ask(name, GETS[name], host="evil.example") == 403 and waited == [], "who asks is looked at before"
    assert ask(name, GETS[name]) == 200
    assert len(waited) == 1 and waited[0] != threading.main_thread().name, "beside the event loop"
