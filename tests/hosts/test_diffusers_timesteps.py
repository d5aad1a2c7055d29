# SPDX-License-Identifier: Apache-2.0
"""Timesteps at hand: no scheduler waits for a GPU to tell it what it was told when the run began."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from test_diffusers import image, pipeline

import nexfort_engine
from nexfort_engine.engine import Engine
from nexfort_engine.hosts.diffusers import timesteps as diffusers_timesteps
from nexfort_engine.hosts.diffusers.timesteps import at_hand

diffusers = pytest.importorskip("diffusers")
LOOKING = ("DDIMScheduler", "PNDMScheduler", "CogVideoXDDIMScheduler", "DDIMInverseScheduler")
SEARCHING = ("DDPMScheduler",)  # waits all the same: it looks for the timestep among those on the GPU
COUNTING = ("EulerDiscreteScheduler", "DPMSolverMultistepScheduler", "UniPCMultistepScheduler", "LCMScheduler")


@pytest.fixture
def _elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU count as those of another device."""
    monkeypatch.setattr(diffusers_timesteps, "HOST", "nowhere")


def sampled(scheduler: Any, device: str = "cpu", within: Any = at_hand) -> torch.Tensor:
    """A sample (1, 4, 8, 8) after six steps with random outputs of a model."""
    numbers = torch.Generator(device).manual_seed(3)
    made = {"device": device, "generator": numbers}
    sample = torch.randn(1, 4, 8, 8, **made)
    scheduler.set_timesteps(6, device=device)
    takes = inspect.signature(scheduler.step).parameters
    more = {"generator": torch.Generator(device).manual_seed(5)} if "generator" in takes else {}
    with within(scheduler):
        for t in scheduler.timesteps:
            sample = scheduler.step(torch.randn(1, 4, 8, 8, **made), t, sample, **more).prev_sample
    return sample


def left_alone(scheduler: Any) -> Any:
    return torch.no_grad()


@pytest.mark.usefixtures("_elsewhere")
@pytest.mark.parametrize("name", LOOKING + SEARCHING + COUNTING)
def test_samples_are_the_same(name: str) -> None:
    scheduler = getattr(diffusers, name)()
    assert torch.equal(sampled(scheduler), sampled(getattr(diffusers, name)(), within=left_alone))
    assert "step" not in vars(scheduler)


class Told:
    """A scheduler that notes what its step is given."""

    def __init__(self, device: str = "cpu") -> None:
        self.timesteps, self.given = torch.arange(9, -1, -3, device=device), []

    def step(self, output: Any, timestep: Any, *, eta: Any = None) -> Any:
        self.given.append(timestep)
        return output


@pytest.mark.usefixtures("_elsewhere")
def test_only_rows_of_the_timesteps_are_exchanged() -> None:
    scheduler = Told()
    with at_hand(scheduler):
        for given in scheduler.timesteps:
            scheduler.step(given, given)
            assert scheduler.given[-1] is not given and scheduler.given[-1] == given
        later = scheduler.timesteps[1:]
        scheduler.step(None, later[1])
        assert scheduler.given[-1] is not later[1] and scheduler.given[-1] == 3
        alone = scheduler.timesteps[0]
        for other in (9, None, torch.tensor(9), scheduler.timesteps[:1], alone.float(), alone.clone()):
            scheduler.step(None, other)
            assert scheduler.given[-1] is other
        with torch.inference_mode():
            scheduler.timesteps = torch.arange(4)
            given = scheduler.timesteps[0]
            scheduler.step(None, timestep=given)
        assert scheduler.given[-1] is given
    assert "step" not in vars(scheduler)


@pytest.mark.gpu
def test_timesteps_that_change_are_read_again() -> None:
    scheduler = Told("cuda")
    with at_hand(scheduler):
        scheduler.step(None, timestep=scheduler.timesteps[0])
        assert scheduler.given.pop() == 9
        scheduler.timesteps[0] = 7
        scheduler.step(None, timestep=scheduler.timesteps[0])
        assert scheduler.given.pop() == 7
        scheduler.timesteps = torch.arange(5, device="cuda")
        scheduler.step(None, timestep=scheduler.timesteps[4])
        assert scheduler.given.pop() == 4


def test_a_scheduler_is_itself_again_after_the_last_that_uses_it() -> None:
    scheduler, signature = Told(), inspect.signature(Told().step)
    with pytest.raises(KeyError), at_hand(scheduler):
        assert inspect.signature(scheduler.step) == signature
        raise KeyError
    assert "step" not in vars(scheduler)
    one, other = at_hand(scheduler), at_hand(scheduler)
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert "step" in vars(scheduler)
    other.__exit__(None, None, None)
    assert "step" not in vars(scheduler)
    own = scheduler.step = lambda output, timestep: timestep
    with at_hand(scheduler):
        assert scheduler.step is not own and scheduler.step(None, 3) == 3
    assert scheduler.step is own


def test_a_copy_made_meanwhile_steps_by_itself() -> None:
    scheduler = Told()
    with at_hand(scheduler):
        twin = copy.deepcopy(scheduler)
    twin.step(None, 3)
    assert twin.given == [3] and not scheduler.given


def test_attributes_that_are_kept_for_later_are_the_scheduler_s_own() -> None:
    """As a pipeline does that steps through several views of a picture."""
    scheduler = Told()
    with at_hand(scheduler):
        kept = copy.deepcopy(scheduler.__dict__)
        scheduler.step(None, 3)
        scheduler.__dict__.update(kept)
        assert scheduler.given == []
        scheduler.step(None, 5)
        assert scheduler.given == [5]
    assert "step" not in vars(scheduler)


@pytest.mark.parametrize("disabled", [False, True])
def test_a_compiled_pipeline_has_them_at_hand(disabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    plain = diffusers.DDIMScheduler.step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append("step" in vars(self))
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(diffusers.DDIMScheduler, "step", step)
    monkeypatch.setattr(Engine, "call", lambda self, plain, args, kwargs: plain(*args, **kwargs))
    monkeypatch.setattr(Engine, "prepare", lambda self, device: None)
    pipe = pipeline()
    compiled = nexfort_engine.compile_pipe(pipe, options={"disable": disabled})
    assert inspect.signature(type(compiled).__call__) == inspect.signature(type(pipe).__call__)
    image(compiled)
    assert seen == [not disabled] * 2
    image(pipe)
    assert seen[2:] == [False] * 2 and "step" not in vars(pipe.scheduler)


def test_a_pipeline_that_is_not_called_is_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "prepare", lambda self, device: None)

    class Custom(diffusers.DiffusionPipeline):
        def __init__(self, unet: Any) -> None:
            super().__init__()
            self.register_modules(unet=unet)

    compiled = nexfort_engine.compile_pipe(Custom(pipeline().unet))
    assert set(compiled.reports) == {"unet"} and not callable(compiled)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LOOKING + SEARCHING + COUNTING)
def test_on_a_gpu_no_step_waits(name: str) -> None:
    made = getattr(diffusers, name)
    wanted = sampled(made(), "cuda", left_alone)
    assert torch.equal(sampled(made(), "cuda"), wanted)
    if name not in LOOKING:
        return
    scheduler = made()
    scheduler.set_timesteps(6, device="cuda")
    sample = torch.randn(1, 4, 8, 8, device="cuda")
    with at_hand(scheduler):
        for i, t in enumerate(scheduler.timesteps):
            torch.cuda.set_sync_debug_mode("error" if i else "default")  # the first reads them all
            try:
                sample = scheduler.step(sample, t, sample).prev_sample
            finally:
                torch.cuda.set_sync_debug_mode("default")
