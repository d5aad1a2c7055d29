# SPDX-License-Identifier: Apache-2.0
"""A LoRA on a quantised model under ComfyUI's dynamic VRAM: what is done beside the blocks' code, as often as in eager.

ComfyUI's own loader, patcher and layers run, on pretended memory; steps are pretended CUDA graphs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from dynamic_vram import Card, dynamic_vram
from large_rows import few
from loader_families import CONFIG, FAMILIES, FORMS, Family, file_of, loaded, lora_file, picture, with_lora
from patchers import TOLERANCE, distance
from pretended_graph import Graph, pretend
from subjects import graphs_as_they_are
from torch.utils._python_dispatch import _get_current_dispatch_mode

from nexfort_engine.cudagraphs.step_graphs import StepGraphs
from nexfort_engine.hosts.comfy import model as host
from nexfort_engine.hosts.comfy.weights import ComfyWeights

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("comfyui", "artefact_cache")]
STEPS = 3
LEAST = 10 * TOLERANCE  # what a change moves a picture by at least
FIRST, LATER = {"cast": 2, "fault": 2}, {"cast": 0, "fault": 1}  # how often for each time that eager does it


class Pair:
    """A model twice, eager and compiled. card: of both. looked: steps that were observed or captured, in turn."""

    def __init__(self, family: Family, form: str, card: Card) -> None:
        self.family, self.card = family, card
        self.patcher, self.clone = loaded(family, form), host.attach(loaded(family, form), CONFIG)
        self.looked: list[str] = []

    def run(self, change: Callable[[Any], Any] = lambda patcher: patcher, **how: Any) -> torch.Tensor:
        """Each step of a picture with a change is eager's, and is not more work. What eager gives.

        A first step asks for each page once more at its end, for the graph of the next one, while the device works.
        Eager is asked twice: where products are computed in full, its first step takes a patched weight that is not
        quantised yet, and all others take it quantised.
        """
        changed = change(self.patcher)
        (_, eager), (found, ours) = self._steps(changed, **how), self._steps(change(self.clone), **how)
        wanted, _ = self._steps(changed, **how)
        assert distance(found, wanted) < TOLERANCE and not self.card.pinned()
        for step, (theirs, mine) in enumerate(zip(eager, ours, strict=True)):
            for name, most in {"patched": 1, "quantised": 1, **(LATER if step else FIRST)}.items():
                assert mine[name] <= most * theirs[name], (step, name, theirs, mine)
        return wanted

    def _steps(self, patcher: Any, **how: Any) -> tuple[torch.Tensor, list[Counter[str]]]:
        self.card.counted()
        rows: list[Counter[str]] = []
        found = picture(self.family, patcher, steps=STEPS, after=lambda *_: rows.append(self.card.counted()), **how)
        return found, rows


@pytest.fixture
def pair(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Pair]]:
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path))
    with graphs_as_they_are(), torch.inference_mode():
        monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path))
        made: list[Any] = []

        def make(name: str, form: str) -> Pair:
            pretend(monkeypatch)
            file_of(FAMILIES[name], form)
            made.append(dynamic_vram())
            pair = Pair(FAMILIES[name], form, made[-1].__enter__())
            for method in ("_observe", "_capture"):
                _note(monkeypatch, method, pair.looked)
            return pair

        yield make
        for one in made:
            one.__exit__(None, None, None)


def _note(patch: pytest.MonkeyPatch, name: str, noted: list[str]) -> None:
    own = getattr(StepGraphs, name)

    def call(*args: Any) -> Any:
        noted.append(name)
        return own(*args)

    patch.setattr(StepGraphs, name, call)


MOST = [("wan", "float8_e4m3fn")]
EVERY = [(name, form) for name in FAMILIES for form in FORMS if name != "h3"]  # of which no step is a graph
ROWS = few(EVERY, MOST)


@pytest.mark.parametrize(("name", "form"), ROWS)
def test_a_graph_is_captured_once_for_all_pictures_and_strengths(
    pair: Callable[[str, str], Pair], name: str, form: str
) -> None:
    both = pair(name, form)
    first, other = (lora_file(both.family, seed) for seed in (0, 1))
    plain = both._steps(both.patcher)[0]
    assert distance(both._steps(both.clone)[0], plain) < TOLERANCE
    assert both.looked == ["_observe", "_capture"]
    mark, graphs = host.report_of(both.clone).mark(), len(Graph.made)  # type: ignore[union-attr]
    assert distance(both.run(seed=1), plain) > LEAST
    pictures = [
        both.run(lambda patcher, file=file, strength=strength: with_lora(patcher, file, strength))
        for file, strength in ((first, 1.0), (first, 1.0), (first, 0.5), (other, 1.0))
    ]
    assert torch.equal(pictures[0], pictures[1])
    assert all(distance(one, pictures[0]) > LEAST for one in (plain, *pictures[2:]))
    assert torch.equal(both.run(), plain), "the LoRA is felt after it was taken off"
    new = host.report_of(both.clone).since(mark)  # type: ignore[union-attr]
    assert not new["artefacts"] and not new["variants"] and not new["eager"], new
    assert both.looked == ["_observe", "_capture"] and len(Graph.made) == graphs, both.looked


def test_what_a_first_step_fetches_is_no_reason_against_a_graph(
    pair: Callable[[str, str], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An observed step is watched for copies from main memory, and those of weights are ComfyUI's."""
    both, watched = pair("z_image", "int8_convrot"), list[bool]()
    acquire = ComfyWeights.acquire

    def noted(self: Any, layers: list[Any], device: torch.device) -> Any:
        watched.append(_get_current_dispatch_mode() is not None)
        return acquire(self, layers, device)

    monkeypatch.setattr(ComfyWeights, "acquire", noted)
    picture(both.family, both.clone, steps=STEPS)
    assert both.looked == ["_observe", "_capture"] and watched and not any(watched)
