# SPDX-License-Identifier: Apache-2.0
"""Numbers in containers of a block: factors become inputs; what is used otherwise is noticed when it changes."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from probe import Probe, block_of, x
from torch import nn

import nexfort_engine
from nexfort_engine.guards.module_guards import matches_text
from nexfort_engine.guards.scalar_inputs import Strength, StrengthUsed, fits

ROOT = Path(__file__).resolve().parent.parent.parent
FACTORS = {
    "on the right": lambda b, h: b.linear(h) * b.scale[0],
    "on the left": lambda b, h: b.scale[0] * b.linear(h),
    "a function": lambda b, h: torch.mul(b.linear(h), b.scale[0]),
    "a method": lambda b, h: b.linear(h).mul(b.scale[0]),
    "with an assignment": lambda b, h: _assigned(b.linear(h), b.scale[0]),
    "a pair": lambda b, h: sum(part * s for part, s in zip(b.linear(h).chunk(1, -1), b.scale, strict=True)),
    "after a question": lambda b, h: h if isinstance(b.scale[0], list) or b.scale[0] == 0 else h * b.scale[0],
    "if it is any": lambda b, h: h + b.linear(h) * b.scale[0] if b.scale[0] else h,
}
OTHERS = {
    "added": lambda b, h: h + b.scale[0],
    "divided by": lambda b, h: h / b.scale[0],
    "a power": lambda b, h: h.abs() ** b.scale[0],
    "doubled": lambda b, h: h * (b.scale[0] * 2),
    "negated": lambda b, h: h * -b.scale[0],
    "in C": lambda b, h: h * math.sqrt(b.scale[0]),
    "rounded": lambda b, h: h * round(b.scale[0], 1),
    "an epsilon": lambda b, h: nn.functional.layer_norm(h, (8,), eps=b.scale[0]),
    "a keyword": lambda b, h: torch.add(h, h, alpha=b.scale[0]),
    "a tensor of it": lambda b, h: h * torch.tensor(b.scale[0]),
    "the sum": lambda b, h: h * sum(b.scale),
    "its text": lambda b, h: h * float(str(b.scale[0])),
    "a key": lambda b, h: h * {0.5: 2.0}.get(b.scale[0], 3.0),
    "swallowed": lambda b, h: h * _swallowed(b.scale[0]),
    "its exact type": lambda b, h: h * (2.0 if type(b.scale[0]) is float else 3.0) * (b.scale[0] + 1),
    "into double": lambda b, h: (h.double() * b.scale[0]).float(),
    "with another": lambda b, h: h * (2.0 if b.scale[0] < max(b.scale) else 3.0),
}


def _assigned(h: torch.Tensor, scale: Any) -> torch.Tensor:
    h *= scale
    return h


def _swallowed(scale: Any) -> float:
    try:
        return math.exp(scale)
    except Exception:  # as code does that is careful about what it is given
        return 1.0


def served(probe: Probe, value: Any) -> bool:
    """Whether the graph serves the block with another number, and gives what the block gives."""
    probe.block.scale[0] = value
    if not matches_text(probe.block, probe.artefact.reads):
        return False
    assert probe.agrees(x(3)), "the same as the block"
    return True


@pytest.mark.parametrize("use", FACTORS)
def test_a_factor_is_an_input(use: str) -> None:
    probe = Probe(block_of(FACTORS[use], scale=[0.5]), x())
    assert probe.captured.strengths == [("", "scale", (0,))]
    assert json.loads(json.dumps(probe.captured.reads)) == probe.captured.reads
    before = probe.block(x())
    assert all(served(probe, value) for value in (0.7, -3.0, 1e-3, 2))
    assert not torch.allclose(probe.block(x()), before), "it matters"


@pytest.mark.parametrize("use", OTHERS)
def test_any_other_use_is_compared(use: str) -> None:
    block = block_of(OTHERS[use], scale=[0.5])
    wanted = block(x())
    probe = Probe(block, x())
    assert probe.captured.strengths == []
    assert torch.equal(probe.graph(x()), wanted) and served(probe, 0.5)
    assert not served(probe, 0.25), "it is part of the graph"


def test_a_number_that_nobody_reads_is_nobody_s_business() -> None:
    probe = Probe(block_of(lambda b, h: h * b.scale["used"], scale={"used": 0.5, "other": 1.0}), x())
    assert probe.captured.strengths == [("", "scale", ("used",))]
    probe.block.scale["other"] = 9.0
    assert matches_text(probe.block, probe.artefact.reads) and probe.agrees(x())
    del probe.block.scale["other"]
    assert not matches_text(probe.block, probe.artefact.reads), "its code could have counted them"


@pytest.mark.parametrize("value", [0.0, "0.7", None, [0.7], True, math.nan])
def test_what_compares_otherwise_or_is_no_number_is_another_block(value: Any) -> None:
    probe = Probe(block_of(FACTORS["after a question"], scale=[0.5]), x())
    probe.block.scale[0] = value
    assert matches_text(probe.block, probe.artefact.reads) is (value != value), "only NaN is no zero, as before"


def test_numbers_deep_inside_and_in_submodules_are_found() -> None:
    inner = block_of(lambda b, h: h * b.by_name["one"]["gain"], by_name={"one": {"gain": 0.5}})
    probe = Probe(block_of(lambda b, h: b.inner(h) * b.scale[0][1], inner=inner, scale=[[9, 0.25]]), x())
    assert sorted(probe.captured.strengths) == [("", "scale", (0, 1)), ("inner", "by_name", ("one", "gain"))]
    inner.by_name["one"]["gain"], probe.block.scale[0][1] = 3.0, -1.0
    assert matches_text(probe.block, probe.artefact.reads) and probe.agrees(x())
    probe.block.scale[0][0] = 8
    assert not matches_text(probe.block, probe.artefact.reads), "an int is a count, and counts are compared"


def test_a_plain_attribute_is_a_setting() -> None:
    probe = Probe(block_of(lambda b, h: h * b.scale, scale=0.5), x())
    assert probe.captured.strengths == []
    probe.block.scale = 0.7
    assert not matches_text(probe.block, probe.artefact.reads)


@given(
    value=st.floats(-1e4, 1e4, allow_subnormal=False),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    seed=st.integers(0, 99),
)
def test_a_product_is_what_torch_makes_of_it(value: float, dtype: torch.dtype, seed: int) -> None:
    number = Strength(("", "scale", (0,)), value, torch.tensor(value, dtype=torch.float32))
    h = x(seed=seed).to(dtype)
    for found in (h * number, number * h, torch.mul(h, number), h.mul(number)):  # type: ignore[operator, arg-type]
        assert found.dtype == dtype and torch.equal(found, h * value)


@given(value=st.floats(allow_nan=False), other=st.one_of(st.floats(allow_nan=False), st.integers(-9, 9)))
def test_a_comparison_is_answered_as_by_the_number_and_holds_later(value: float, other: float) -> None:
    number: Any = Strength(("", "scale", (0,)), value, torch.tensor(0.0))
    answers = [number < other, number <= other, number == other, number != other, number > other, bool(number)]
    assert answers == [value < other, value <= other, value == other, value != other, value > other, bool(value)]
    row = json.loads(json.dumps(["strength", number.asked]))
    assert fits(["float", value.hex()], row)
    assert fits(["float", float(other).hex()], row) is (value == other and bool(value) == bool(other))


def test_it_is_a_number_to_those_who_ask_and_nothing_else_to_those_who_compute() -> None:
    number: Any = Strength(("a", "b", (0,)), 0.5, torch.tensor(0.5))
    assert isinstance(number, float) and not isinstance(number, (int, list, torch.Tensor))
    assert copy.deepcopy([number])[0] is number
    with pytest.raises(StrengthUsed):
        number + 1
    assert number.used


class Adapted(nn.Module):
    """Blocks with an adapter each, whose strength lies in a dictionary, as adapters' do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(block_of(adapted, scaling={"style": 1.0}, eps=1e-6) for _ in range(2))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            h = block(h)
        return h


def adapted(block: Any, h: torch.Tensor) -> torch.Tensor:
    normed = nn.functional.layer_norm(h, (8,), eps=block.eps)
    return h + normed + block.linear(normed) * block.scaling["style"]


def set_strength(network: nn.Module, *values: float) -> None:
    for block, value in zip(network.blocks, values, strict=True):  # type: ignore[arg-type]
        block.scaling["style"] = value


_LATER = """
import json, sys, torch
sys.path[:0] = sys.argv[1:4]
import nexfort_engine
from test_scalar_inputs import Adapted, set_strength, x
network = Adapted()
compiled = nexfort_engine.compile(network)
set_strength(network, -2.0, 0.5)
with torch.inference_mode():
    apart = float((compiled(x(5)) - network(x(5))).norm())
told = compiled.report.as_dict()
print(json.dumps([apart, told["artefacts_compiled"], told["artefacts_loaded"], told["eager"]]))
"""


@pytest.mark.large  # the tests above run such graphs as they were captured
def test_lowered_a_strength_is_honoured_in_this_process_and_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path))
    network = Adapted()
    compiled = nexfort_engine.compile(network)
    results = []
    with torch.inference_mode():
        for values in ((1.0, 1.0), (0.5, 0.5), (0.5, -4.0), (0.0, 0.0), (1.0, 1.0)):
            set_strength(network, *values)
            results.append(compiled(x()))
            torch.testing.assert_close(results[-1], network(x()), rtol=1e-5, atol=1e-5)
    assert torch.equal(results[0], results[-1]) and (results[0] - results[2]).norm() > 0.1
    told = compiled.report.as_dict()
    assert (told["artefacts_compiled"], told["eager"], told["variants"]) == (1, [], [])
    folder = Path(__file__).parent
    command = [sys.executable, "-c", _LATER, str(ROOT), str(folder.parent / "support"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    apart, made, loaded, eager = json.loads(done.stdout.splitlines()[-1])
    assert apart < 1e-4 and (made, loaded, eager) == (0, 1, [])
