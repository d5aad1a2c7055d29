# SPDX-License-Identifier: Apache-2.0
"""What a graph makes of a prompt: taken out as a part of its own, lowered beside the rest, the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attending import TEXT, WIDE, Attending, inputs
from probe import Probe

from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.lowering import inductor
from nexfort_engine.lowering.prompt_subgraph import take_out_prompts

T = torch.Tensor


def test_a_graph_computes_the_same_with_its_prompts_part_by_itself(tmp_path: Path) -> None:
    block = Attending().eval().requires_grad_(False)
    probe = Probe(block, *inputs())
    options = {**CompileConfig.parse("O2").lowering_options("cpu"), "nexfort.prompt_once": True}
    inductor.lower(probe.captured, tmp_path, options)
    code = inductor.load(tmp_path, options, [], len(probe.captured.weights))
    assert type(getattr(code, "__closure__", [None])[0].cell_contents).__name__ == "PromptedCode"
    for sizes in ((6, TEXT), (9, 40), (6, 1)):
        given = inputs(*sizes)
        found = code([*probe.weights, *given])[0]
        assert torch.allclose(found, block(*given), atol=1e-5)


class Both(Attending):
    """A block that attends to two prompts, each of its own length."""

    def forward(self, x: T, prompt: T, time: T, other: T) -> T:  # type: ignore[override]
        return super().forward(super().forward(x, prompt, time), other, time)


def test_each_of_several_prompts_has_a_part(tmp_path: Path) -> None:
    block = Both().eval().requires_grad_(False)
    probe = Probe(block, *inputs(), torch.randn(2, 30, WIDE))
    options = {**CompileConfig.parse("O2").lowering_options("cpu"), "nexfort.prompt_once": True}
    inductor.lower(probe.captured, tmp_path, options)
    assert sorted(place.name for place in tmp_path.glob("prompt_*")) == ["prompt_0", "prompt_1"]
    code = inductor.load(tmp_path, options, [], len(probe.captured.weights))
    for text in (TEXT, 50):
        given = [*inputs(9, text), torch.randn(2, 70, WIDE)]
        assert torch.allclose(code([*probe.weights, *given])[0], block(*given), atol=1e-5)


class Elsewhere(Attending):
    """A block that reads its prompt for more than layers."""

    def forward(self, x: T, prompt: T, time: T) -> T:
        return super().forward(x, prompt, time) + prompt[:, :1] * x


class Also(Attending):
    """A block that reads its prompt for more, which is the prompt's alone."""

    def forward(self, x: T, prompt: T, time: T) -> T:
        return super().forward(x, prompt, time) + prompt.mean(1, keepdim=True) * x


class Keeping(Attending):
    """A block that hands what it makes of a prompt to its caller, who may write to it."""

    def forward(self, x: T, prompt: T, time: T) -> Any:  # type: ignore[override]
        return super().forward(x, prompt, time), self.v(prompt)


class Self(Attending):
    """A block that attends to an image, which has a sum with what becomes of it."""

    def forward(self, x: T, prompt: T, time: T) -> T:
        return super().forward(x, self.norm(x), time) + prompt.shape[1]


class Unsummed(Attending):
    """A block that reads nothing but layers of its image, and returns one of as many tokens."""

    def forward(self, x: T, prompt: T, time: T) -> T:
        x = self.out(self.norm(x)) * self.time(time)[:, None]
        return self.q(x) + prompt.mean(1, keepdim=True)


@pytest.mark.parametrize(
    ("block", "text", "results"),
    [
        (Attending, TEXT, 2),
        (Attending, 4, 0),
        (Elsewhere, TEXT, 0),
        (Also, TEXT, 2),
        (Keeping, TEXT, 0),
        (Self, TEXT, 0),
        (Unsummed, TEXT, 0),
    ],
)
def test_a_prompt_is_told_by_who_reads_it(block: Any, text: int, results: int) -> None:
    captured = Probe(block().eval().requires_grad_(False), *inputs(text=text)).captured
    found = take_out_prompts(captured.graph, captured.lasting)
    given = [part.graph.graph.find_nodes(op="output")[0].args[0] for part in found.parts] if found else []
    assert [len(one) for one in given] == ([results] if results else [])
