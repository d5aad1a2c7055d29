# SPDX-License-Identifier: Apache-2.0
"""Two networks of one build in a prompt, each for some of the steps, as Wan 2.2 has one for high noise and one for low.

ComfyUI's own loader, patchers and sampler. What is compiled for the first serves the second. Under dynamic VRAM each
keeps its graph while the other one runs, also where its pages went meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from card_memory import loaded_in_part, unload
from dynamic_vram import dynamic_vram
from loader_families import CONFIG, FAMILIES, file_of, loaded, lora_file, picture, with_lora
from patchers import MOVES, TOLERANCE, distance
from pretended_graph import Graph, pretend
from quantised import load
from subjects import graphs_as_they_are

from nexfort_engine.cudagraphs.step_graphs import StepGraphs
from nexfort_engine.hosts.comfy import model as host

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("comfyui", "artefact_cache")]
WAN = FAMILIES["wan"]
FORM = "float8_e4m3fn"
STEPS, HIGH = 6, 3  # in all, and those of the first network


@pytest.fixture(autouse=True)
def uncompiled(tmp_path: Any) -> Iterator[None]:
    with graphs_as_they_are(), pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setenv("NEXFORT_CACHE_DIR", str(tmp_path / "store"))
        yield


class Two:
    """The two networks, eager and compiled, with a LoRA each."""

    def __init__(self) -> None:
        other = {key: weight.clone() for key, weight in file_of(WAN, FORM).items()}
        for key in (name for name in other if name.endswith("weight_scale")):
            other[key] *= 1.25
        self.plain = loaded(WAN, FORM), load(other)
        self.compiled = tuple(host.attach(one, CONFIG) for one in (loaded(WAN, FORM), load(other)))
        self.files = lora_file(WAN), lora_file(WAN, 1)

    def prompt(self, both: Any, strength: float = 0.0, between: Any = lambda: None, **how: Any) -> torch.Tensor:
        """A picture whose first steps are the one's and the rest the other's. between: what happens then."""
        if strength:
            both = [with_lora(one, file, strength) for one, file in zip(both, self.files, strict=True)]
        begun = picture(WAN, both[0], steps=STEPS, last_step=HIGH, **how)
        between()
        rest = {"start_step": HIGH, "begun": begun, "disable_noise": True}
        return picture(WAN, both[1], steps=STEPS, **rest, **how)

    def same(self, strength: float = 0.0, **how: Any) -> torch.Tensor:
        wanted = self.prompt(self.plain, strength, **how)
        assert distance(self.prompt(self.compiled, strength, **how), wanted) < TOLERANCE, (strength, how)
        return wanted

    def made(self) -> list[int]:
        """Artefacts that were compiled for each. None of their regions ever ran eager."""
        found = [host.report_of(one).as_dict() for one in self.compiled]  # type: ignore[union-attr]
        assert not any(one["eager"] for one in found), [one["eager"] for one in found]
        return [one["artefacts_compiled"] for one in found]

    def codes(self) -> list[dict[str, set[int]]]:
        """For each network the code that its regions run, by region."""
        engines = [next(iter(one.model.diffusion_model.__dict__[host._ENGINES].values())) for one in self.compiled]
        return [{r.path: {id(b.code) for b in r.bindings} for r in engine.regions} for engine in engines]


@pytest.mark.large  # the test below has it with graphs
@pytest.mark.parametrize("share", [None, 0.0, 0.5])
def test_the_second_network_needs_nothing_of_its_own(share: float | None) -> None:
    two = Two()
    with loaded_in_part(share) if share is not None else contextlib.nullcontext():
        plain = two.same()
        first, second = two.made()
        assert first > 0 == second
        high, low = two.codes()
        assert high == low and high["blocks.0"] == high["blocks.1"] != set(), "they run the same code"
        for row in ({"seed": 1}, {"size": (12, 8)}, {"length": 21}):
            two.same(**row)
        assert two.made() == [first, 0]
        assert distance(two.same(1.0), plain) > MOVES
        patched = two.made()
        assert patched[1] == 0 and (patched[0] == first or share is not None)
        two.same(0.5, seed=1)
        assert torch.equal(two.same(), plain) and two.made() == patched
    unload()


def test_each_keeps_its_graph_under_dynamic_vram(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    file_of(WAN, FORM)
    looked: list[str] = []
    for name in ("_observe", "_capture"):
        own = getattr(StepGraphs, name)

        def noted(*args: Any, name: str = name, own: Any = own) -> Any:
            looked.append(name)
            return own(*args)

        monkeypatch.setattr(StepGraphs, name, noted)
    with dynamic_vram() as card:
        two = Two()
        plain = two.same()
        first, second = two.made()
        assert first > 0 == second and looked == ["_observe", "_capture"] * 2 and len(Graph.made) == 2
        high, low = [one.model.dynamic_vbars[one.load_device] for one in two.compiled]
        assert distance(two.same(seed=1), plain) > MOVES
        for gone in (low, high):  # one has the other's memory while it runs
            gone.take_away()
            assert torch.equal(two.prompt(two.compiled, between=high.take_away), two.prompt(two.compiled))
        assert distance(two.prompt(two.compiled), plain) < TOLERANCE
        two.prompt(two.plain, 1.0)
        for strength in (1.0, 0.5):
            lora = [with_lora(one, file, strength) for one, file in zip(two.plain, two.files, strict=True)]
            two.prompt(lora)  # eager takes a weight in full that it patches now, and quantised from then on
            assert distance(two.prompt(two.compiled, strength), two.prompt(lora)) < TOLERANCE
        assert looked == ["_observe", "_capture"] * 2 and len(Graph.made) == 2, looked
        assert two.made() == [first, 0] and not card.pinned()
