# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's caches of node outputs let go of models: after that the same prompt gives eager's picture, with no compile.

Whole prompts run in ComfyUI's own executor, under each of its caches.
"""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from large_rows import few
from patchers import MOVES, TOLERANCE, distance
from prompts import Executor, InTheMiddle, flux_prompt
from restarted import counting

from nexfort_engine.hosts.comfy import model as host

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("comfyui", "artefact_cache")]
LACKING = 1e6  # gigabytes that are asked to be free: there is always too little
OF_NEWER_ONES = "too little for what is not in use"  # a threshold that ComfyUI 0.20 has not
CACHES: dict[str, tuple[str, dict[str, float]]] = {
    "too little memory": ("RAM_PRESSURE", {"ram": LACKING, "ram_inactive": LACKING}),
    OF_NEWER_ONES: ("RAM_PRESSURE", {"ram": 0.0, "ram_inactive": LACKING}),
    "--cache-none": ("NONE", {}),
    "--cache-lru": ("LRU", {"lru": 1}),
    "--cache-classic": ("CLASSIC", {}),
}
AT_ONCE = ("too little memory", "--cache-none")  # these keep nothing beyond its use


class Loads:
    """What ComfyUI's loader gave, weakly: for each load the model, its network and its weights."""

    def __init__(self) -> None:
        self.given: list[list[weakref.ref[Any]]] = []

    def record(self, load: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            patcher = load(*args, **kwargs)
            model = patcher.model
            held = [patcher, model, model.diffusion_model, *model.diffusion_model.parameters()]
            self.given.append([weakref.ref(one) for one in held])
            return patcher

        return run

    def alive(self) -> list[bool]:
        """For each load whether anything of it is still there."""
        gc.collect()
        return [any(one() is not None for one in held) for held in self.given]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    import comfy.sd

    found = Loads()
    monkeypatch.setattr(comfy.sd, "load_diffusion_model", found.record(comfy.sd.load_diffusion_model))
    return found


@pytest.fixture(scope="module")
def eager(files: tuple[str, str]) -> dict[str, torch.Tensor]:
    """The pictures of the prompts below, each by an executor of its own; they differ."""
    found = {name: Executor("NONE").run(flux_prompt(**words, compiled=False)) for name, words in prompts(files).items()}
    rows = list(found.values())
    assert all(distance(a, b) > MOVES for i, a in enumerate(rows) for b in rows[:i])
    return found


def prompts(files: tuple[str, str]) -> dict[str, dict[str, Any]]:
    """Two checkpoints, one of them with a LoRA and with another seed."""
    first, other = files
    return {
        "first": {"file": first},
        "other": {"file": other},
        "LoRA": {"file": first, "lora": 1.0},
        "seed": {"file": first, "seed": 5},
    }


def executor_with(cache: str) -> Executor:
    from comfy_execution.caching import RAMPressureCache

    if cache == OF_NEWER_ONES and "min_entry_size" not in inspect.signature(RAMPressureCache.ram_release).parameters:
        pytest.skip("this ComfyUI has one threshold")
    kind, limits = CACHES[cache]
    return Executor(kind, **limits)


@pytest.mark.parametrize("cache", few(list(CACHES), ["--cache-none"]))  # memory that runs short is below
def test_what_is_evicted_comes_back_and_nothing_is_compiled(
    files: tuple[str, str], eager: dict[str, torch.Tensor], loads: Loads, cache: str
) -> None:
    executor, rows = executor_with(cache), prompts(files)
    assert distance(executor.run(flux_prompt(**rows["first"], compiled=True)), eager["first"]) < TOLERANCE
    told = len(host.reports())
    with counting() as counted:
        for name in ("seed", "other", "first", "LoRA", "first", "other", "seed"):
            found = executor.run(flux_prompt(**rows[name], compiled=True))
            assert distance(found, eager[name]) < TOLERANCE, name
            left = loads.alive()
            assert not any(left[:-2]), "what was evicted is kept alive"
            assert cache not in AT_ONCE or not any(left), "what was evicted is kept alive"
    assert counted.as_dict() == {"exports": 0, "lowerings": 0}
    assert len(loads.given) > 3, "nothing was evicted, so that the contract says nothing"
    assert len(host.reports()) <= told, "engines outlive their models"


def test_without_pressure_the_loader_s_output_stays(files: tuple[str, str], loads: Loads) -> None:
    """Which is why the loads above are evictions."""
    executor = Executor("RAM_PRESSURE")
    for seed in (0, 1, 2):
        executor.run(flux_prompt(files[0], compiled=True, seed=seed))
        assert not seed or {"model", "compile"} <= executor.cached
    assert loads.alive() == [True]


def test_memory_that_runs_short_in_the_middle_of_sampling(
    files: tuple[str, str], eager: dict[str, torch.Tensor], loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ComfyUI asks its cache for memory whenever it needs some; the model that samples is in it."""
    import comfy.memory_management

    executor = Executor("RAM_PRESSURE")
    outputs, freed = executor.of_comfyui.caches.outputs, []

    def run_short() -> None:
        before = len(outputs.cache)
        comfy.memory_management.extra_ram_release_callback(int(LACKING * 2**30), free_active=True)
        freed.append(before - len(outputs.cache))
        gc.collect()

    executor.run(flux_prompt(**prompts(files)["other"], compiled=True))
    with counting() as counted, monkeypatch.context() as patch:
        patch.setattr(InTheMiddle, "action", staticmethod(run_short))
        for name, words in prompts(files).items():
            found = executor.run(flux_prompt(**words, compiled=True))
            assert distance(found, eager[name]) < TOLERANCE, name
    assert len(freed) == 4 and min(freed) > 3 and counted.as_dict() == {"exports": 0, "lowerings": 0}
    executor.of_comfyui.reset()
    assert not any(loads.alive())


def test_free_lets_go_of_everything(files: tuple[str, str], eager: dict[str, torch.Tensor], loads: Loads) -> None:
    """What the server does after `/free` with both of its flags."""
    import comfy.model_management as management

    executor = Executor("CLASSIC")
    with counting() as counted:
        for name in ("first", "other", "first"):
            found = executor.run(flux_prompt(**prompts(files)[name], compiled=True))
            assert distance(found, eager[name]) < TOLERANCE
            assert loads.alive()[-1]
            management.unload_all_models()
            executor.of_comfyui.reset()
            assert not any(loads.alive())
    assert counted.as_dict() == {"exports": 0, "lowerings": 0}


@pytest.mark.parametrize("cache", few(list(CACHES), ["--cache-classic"]))
def test_switching_the_node_off_gives_eager_s_bits(
    files: tuple[str, str], eager: dict[str, torch.Tensor], cache: str
) -> None:
    executor = executor_with(cache)
    for name, words in prompts(files).items():
        executor.run(flux_prompt(**words, compiled=True))
        assert torch.equal(executor.run(flux_prompt(**words, compiled=False)), eager[name]), name
