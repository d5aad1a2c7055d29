# SPDX-License-Identifier: Apache-2.0
"""Prompts that fail in ComfyUI's own executor: the user reads what eager would say, and the next prompt is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from patchers import MOVES, TOLERANCE, distance
from prompts import Executor, Failed, InTheMiddle, flux_prompt
from restarted import counting

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("comfyui", "artefact_cache")]


class At:
    """An executor after eager's and the compiled picture of one prompt. patch: what makes others fail."""

    def __init__(self, file: str, patch: pytest.MonkeyPatch) -> None:
        self.executor, self.file, self.patch = Executor("CLASSIC"), file, patch
        self.wanted = self.run(compiled=False)
        assert distance(self.run(compiled=False, seed=1), self.wanted) > MOVES
        self.found = self.run(compiled=True)
        assert distance(self.found, self.wanted) < TOLERANCE

    def run(self, **words: Any) -> torch.Tensor:
        """The latent of a prompt, sampled now: not what the executor kept of it."""
        self.executor.of_comfyui.reset()
        return self.executor.run(flux_prompt(self.file, **words))

    def told(self, **words: Any) -> str:
        """What a prompt that fails tells the user."""
        with pytest.raises(Failed) as failed:
            self.run(**words)
        return str(failed.value)


@pytest.fixture
def at(files: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[At]:
    """Afterwards the next prompts are asserted to be as before, with nothing compiled."""
    with monkeypatch.context() as patch:
        yield (made := At(files[0], patch))
    made.file = files[0]
    with counting() as counted:
        assert torch.equal(made.run(compiled=True), made.found)
        assert torch.equal(made.run(compiled=False), made.wanted)
    assert counted.as_dict() == {"exports": 0, "lowerings": 0}


def in_the_middle(at: At, action: Callable[[], None]) -> None:
    at.patch.setattr(InTheMiddle, "action", staticmethod(action))


def test_an_error_between_two_steps(at: At) -> None:
    def fail() -> None:
        raise ValueError("of another pack")

    in_the_middle(at, fail)
    assert at.told(compiled=True) == at.told(compiled=False) == "KSampler: ValueError: of another pack\n"


def test_a_cancel_between_two_steps(at: At) -> None:
    import comfy.model_management

    in_the_middle(at, comfy.model_management.interrupt_current_processing)
    assert at.told(compiled=True) == at.told(compiled=False) == "KSampler was interrupted"


def test_no_memory_in_compiled_code_has_comfyui_unload_its_models(at: At) -> None:
    import comfy.model_management as management

    from nexfort_engine.runtime.artifact import Binding

    run, calls, loaded = Binding.run, [], []

    def alive() -> list[Any]:
        """Without those whose patcher is gone and whose weights still wait for the collector: nobody unloads them."""
        return [held for held in management.current_loaded_models if not held.is_dead()]

    def full(self: Binding, *args: Any) -> Any:
        calls.append(self)
        if len(calls) > 5:
            loaded[:] = alive()
            raise torch.OutOfMemoryError("no memory left on the device")
        return run(self, *args)

    at.patch.setattr(Binding, "run", full)
    told = at.told(compiled=True)
    assert "OutOfMemoryError: no memory left on the device" in told and "ran out of memory on your GPU" in told
    assert loaded, "none was loaded"
    assert not alive(), "they are still loaded"
    at.patch.undo()

    def fail() -> None:
        raise torch.OutOfMemoryError("no memory left on the device")

    in_the_middle(at, fail)
    assert at.told(compiled=False) == told


@pytest.mark.parametrize("first", [False, True], ids=["later", "in the first prompt"])
def test_prompts_of_another_text_encoder(at: At, first: bool, files: tuple[str, str]) -> None:
    """Vectors of another width, as with the wrong CLIP loader: ComfyUI's own words, with its own tip."""
    if first:
        at.file = files[1]
    told = at.told(compiled=True, width=24)
    assert told == at.told(compiled=False, width=24)
    assert "mat1 and mat2 shapes cannot be multiplied" in told and "CLIP" in told
