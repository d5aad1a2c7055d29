# SPDX-License-Identifier: Apache-2.0
"""Every family of diffusers' networks, tiny, as a pipeline has it: what is promised of backbones holds for each.

Captured graphs run as they are (subjects.py).
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("diffusers")
import torch
from diffusers_families import FAMILIES, Family, Pipe
from inputs import shuffled_calls
from subjects import MOVES, TOLERANCE, distance, graphs_as_they_are

import nexfort_engine

CALLS = 12
every = pytest.mark.parametrize("name", FAMILIES)
pytestmark = [pytest.mark.large, pytest.mark.usefixtures("threads", "artefact_cache")]


@pytest.fixture(autouse=True)
def unlowered() -> Iterator[None]:
    with graphs_as_they_are():
        yield


class Compiled:
    """A family's network and its compiled self after a first call of so many rows, made with an empty cache."""

    def __init__(self, family: Family, batch: int, depth: int = 2) -> None:
        self.family, self.eager = family, Pipe(family, depth)
        self.module = getattr(self.eager, family.part)
        self.keys = list(self.module.state_dict())
        self.plain = self.eager(batch=batch)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NEXFORT_CACHE_DIR", tempfile.mkdtemp(prefix="nexfort-family-"))
            self.ours = nexfort_engine.compile_pipe(self.eager)
        self.first = distance(self.ours(batch=batch), self.plain)
        self.count = len(self.told("artefacts"))
        self.marks = {part: report.mark() for part, report in self.ours.reports.items()}

    def told(self, what: str) -> list[dict[str, Any]]:
        """Rows of the reports of all parts."""
        return [row for report in self.ours.reports.values() for row in report.as_dict()[what]]

    def walked(self) -> tuple[list[Any], list[dict[str, Any]]]:
        """Calls whose result was another, and what the reports gained, over sizes, lengths and batches out of order."""
        family = self.family
        calls = shuffled_calls(family.sizes, family.lengths)[:CALLS]
        wrong = [call for call in calls if not distance(self.ours(**call), self.eager(**call)) < TOLERANCE]
        return wrong, [report.since(self.marks[part]) for part, report in self.ours.reports.items()]


@functools.cache
def compiled(name: str, batch: int) -> Compiled:
    return Compiled(FAMILIES[name], batch)


def eager_by_right(row: dict[str, Any], family: Family) -> bool:
    """Whether the table says of a region that it runs eager, and for this reason."""
    return any(row["region"].startswith(path) and reason in row["reason"] for path, reason in family.eager.items())


def bound_by_right(row: dict[str, Any], family: Family) -> bool:
    return row["region"].startswith(family.bound or ("-",)) and "it was compiled for other sizes" in row["reason"]


@every
def test_result_is_eagers_and_everything_matters(name: str) -> None:
    made = compiled(name, 2)
    assert made.first < TOLERANCE
    base = made.eager()
    other = {"seed": 1, "prompt": 1, "step": 1, "length": made.family.lengths[len(made.family.lengths) > 1]}
    for what in made.family.moves:
        wanted = made.eager(**{what: other[what]})
        assert distance(wanted, base) > MOVES, f"{what} does not matter to the network"
        assert distance(made.ours(**{what: other[what]}), wanted) < TOLERANCE, what


@every
def test_its_regions_cover_it(name: str) -> None:
    made = compiled(name, 2)
    assert made.told("regions") or made.family.eager
    assert not [
        row for row in made.told("eager") if not eager_by_right(row, made.family) | bound_by_right(row, made.family)
    ]
    assert not [note for note in made.told("notes") if not str(note).startswith(made.family.notes or ("-",))]


@every
@pytest.mark.parametrize("batch", [1, 2])
def test_a_first_call_serves_every_size_length_and_batch(name: str, batch: int) -> None:
    made = compiled(name, batch)
    wrong, new = made.walked()
    assert not wrong
    family = made.family
    for report in new:
        assert not [row for row in report["eager"] if not eager_by_right(row, family) | bound_by_right(row, family)]
        if not family.apart:
            assert not report["artefacts"] and not report["variants"]
        assert all(any(reason in row["reason"] for reason in family.apart) for row in report["variants"])


@every
def test_one_block_more_needs_nothing_new(name: str) -> None:
    family = FAMILIES[name]
    if not family.depth:
        pytest.skip("its blocks are not all alike, or it is given something for each")
    few = compiled(name, 2) if family.alike == 2 else Compiled(family, 2, family.alike)
    more = Compiled(family, 2, family.alike + 1)
    assert len(list(more.module.modules())) > len(list(few.module.modules()))
    assert more.first < TOLERANCE
    assert more.count == few.count


@every
def test_it_stays_itself_and_its_exceptions_pass_through(name: str) -> None:
    made = compiled(name, 2)
    assert list(made.module.state_dict()) == made.keys
    assert all(map(torch.equal, made.eager(batch=2), made.plain))
    assert not [path for path, sub in made.module.named_modules() if "forward" in vars(sub)]
    inside = next(
        sub for sub in made.module.modules() if isinstance(sub, torch.nn.Linear | torch.nn.modules.conv._ConvNd)
    )
    weight = next(iter(inside._parameters))
    kept = inside._parameters[weight]
    inside._parameters[weight] = torch.nn.Parameter(kept[..., :0].clone(), requires_grad=False)
    try:
        with pytest.raises(Exception) as in_eager:
            made.eager(batch=2)
        with pytest.raises(type(in_eager.value)):
            made.ours(batch=2)
    finally:
        inside._parameters[weight] = kept
    assert distance(made.ours(batch=2), made.plain) < TOLERANCE
