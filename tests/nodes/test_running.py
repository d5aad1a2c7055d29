# SPDX-License-Identifier: Apache-2.0
"""What the nodes read of ComfyUI's queue."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import served


@pytest.mark.comfy
def test_nothing_ran_until_a_prompt_came_or_a_model_was_loaded(comfyui: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import execution
    from comfy import model_management

    running = sys.modules[f"{served.plugin_nodes().__name__}.running"]
    monkeypatch.setattr(running, "server", lambda: None)
    assert not running.nothing_ran(), "no server"
    queue = execution.PromptQueue(types.SimpleNamespace(queue_updated=lambda: None))
    monkeypatch.setattr(running, "server", lambda: types.SimpleNamespace(prompt_queue=queue))
    monkeypatch.setattr(model_management, "current_loaded_models", [object()])
    assert not running.nothing_ran(), "code loaded a model"
    monkeypatch.setattr(model_management, "current_loaded_models", [])
    assert running.nothing_ran()
    queue.put((0, "id", {}, {}, [], {}))
    assert not running.nothing_ran(), "a prompt waits"
    _, number = queue.get()
    assert not running.nothing_ran(), "it runs"
    queue.task_done(number, {}, None)
    assert not running.nothing_ran(), "it ran"


@pytest.mark.comfy
def test_a_prompt_runs_from_its_beginning_to_its_end(comfyui: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import execution

    from nexfort_engine.hosts.comfy.progress import running_prompt

    monkeypatch.setitem(sys.modules, "server", types.SimpleNamespace())
    assert running_prompt() is None, "no server"
    queue = execution.PromptQueue(types.SimpleNamespace(queue_updated=lambda: None))
    server = types.SimpleNamespace(
        PromptServer=types.SimpleNamespace(instance=types.SimpleNamespace(prompt_queue=queue))
    )
    monkeypatch.setitem(sys.modules, "server", server)
    queue.put((0, "id", {}, {}, [], {}))
    assert running_prompt() is None, "it waits"
    _, number = queue.get()
    assert running_prompt() == number
    queue.task_done(number, {}, None)
    assert running_prompt() is None
