# SPDX-License-Identifier: Apache-2.0
"""Which old compile nodes are told to ComfyUI as replaceable, and how, without a server.

What a real server makes of it is in test_server_routes.py and test_server.py, the command for nodes that are installed
in test_browser_nodes.py.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import served

pytestmark = pytest.mark.comfy


@pytest.fixture(scope="module")
def replacing(comfyui: Path) -> types.ModuleType:
    """nodes/replacements.py beside a real comfy_api."""
    return sys.modules[f"{served.plugin_nodes().__name__}.replacements"]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What ComfyUI's public API hands to the server."""
    found: list[Any] = []
    instance = types.SimpleNamespace(node_replace_manager=types.SimpleNamespace(register=found.append))
    server = types.ModuleType("server")
    server.PromptServer = types.SimpleNamespace(instance=instance)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "server", server)
    return found


def test_all_are_registered_through_the_public_api(replacing: types.ModuleType, registered: list[Any]) -> None:
    assert asyncio.run(replacing.register_replacements()) == len(registered) > 20
    assert [{k: v for k, v in one.as_dict().items() if v is not None} for one in registered] == [
        {k: v for k, v in one.items() if v is not None} for one in replacing.replacements()
    ]


def test_each_gives_a_node_that_lacks_nothing_and_has_our_defaults(replacing: types.ModuleType) -> None:
    schemas = {node.define_schema().node_id: node.define_schema() for node in served.plugin_nodes().NODES}
    told = replacing.replacements()
    assert len({one["old_node_id"] for one in told}) == len(told)
    for one in told:
        first, *widgets = schemas[one["new_node_id"]].inputs
        links = [entry for entry in one["input_mapping"] if "old_id" in entry]
        values = {entry["new_id"]: entry["set_value"] for entry in one["input_mapping"] if "set_value" in entry}
        assert values == {widget.id: widget.default for widget in widgets if not widget.optional}, one
        assert [entry["new_id"] for entry in links] == ([first.id] if one["output_mapping"] else []), one
        assert one["old_node_id"] not in schemas


@pytest.mark.parametrize(
    ("old", "new", "link"),
    [
        ("TorchCompileModel", "NexfortCompileModel", "model"),
        ("TorchCompileModelFluxAdvancedV2", "NexfortCompileModel", "model"),
        ("EnhancedCompileModel", "NexfortCompileModel", "model"),
        ("ModelSpeedup", "NexfortCompileModel", "model"),
        ("TorchCompileVAE", "NexfortCompileVAE", "vae"),
        ("VaeSpeedup", "NexfortCompileVAE", "vae"),
        ("TorchCompileControlNet", "NexfortCompileControlNet", "controlnet"),
        ("ControlnetSpeedup", "NexfortCompileControlNet", "control_net"),
    ],
)
def test_the_link_is_taken_from_where_the_old_node_has_it(
    replacing: types.ModuleType, old: str, new: str, link: str
) -> None:
    (found,) = [one for one in replacing.replacements() if one["old_node_id"] == old]
    assert found["new_node_id"] == new
    assert [entry["old_id"] for entry in found["input_mapping"] if "old_id" in entry] == [link]
    assert found["output_mapping"] == [{"new_idx": 0, "old_idx": 0}]


@pytest.mark.parametrize("old_id", ["OneDiffCheckpointLoaderSimple", "ApplyFBCacheOnModel", "OneFlowDeepcacheBooster"])
def test_what_does_more_than_compiling_is_left_missing(replacing: types.ModuleType, old_id: str) -> None:
    assert old_id not in {one["old_node_id"] for one in replacing.replacements()}


@pytest.mark.parametrize("lacking", ["NodeReplace", "node_replacement", "ComfyAPI"])
def test_an_older_comfyui_is_left_alone(
    replacing: types.ModuleType,
    registered: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    lacking: str,
) -> None:
    import comfy_api.latest

    if lacking == "NodeReplace":
        monkeypatch.delattr(replacing.io, "NodeReplace")
    elif lacking == "ComfyAPI":
        monkeypatch.delattr(comfy_api.latest, "ComfyAPI")
    else:
        monkeypatch.setattr(comfy_api.latest, "ComfyAPI", types.SimpleNamespace)
    with caplog.at_level(logging.DEBUG, logger="nexfort"):
        assert asyncio.run(replacing.register_replacements()) == 0
    assert registered == [] and "no list of node replacements" in caplog.text
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}
