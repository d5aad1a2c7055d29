# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's families that the contracts are not asked of, a promise each; graphs run as they are captured."""

from __future__ import annotations

from typing import Any

import option_edits
import pytest
from backbones import Tiny
from comfy_families import FALLS_SHORT, FAMILIES
from outside import unexplained
from subjects import MOVES, TOLERANCE, Subject, cold_subject, distance, equal_bits, new_since

pytestmark = [
    *(pytest.mark.comfy, pytest.mark.large),
    pytest.mark.usefixtures("comfyui", "artefact_cache", "quick"),
    pytest.mark.parametrize("name", FAMILIES),
]
NOT_ATTENTION_S = {"ernie", "hydit", "hunyuan3d_21", "ace_step15", "seedvr2"}  # they hand no options to attention
ONE_SHAPE = {"hunyuan_video_masked"}  # its mask is the same for every row, so that a batch can not be doubled to plan
VIDEOS_ARE_ROWS = {"svd"}  # one video in the first call: how many there are is then a number of the capture
ROWS_ARE_PAIRS = {"seedvr2"}  # prompt and no prompt
# the network calls the layers of these blocks, not the blocks: they run eager, which a note of the report says
CALLED_BY_PARTS = {"wan_animate2": ("blocks.",)}
NOT_CALLED = "are not called as modules"


def _compiled(name: str, blocks: int = 2, **first: Any) -> Subject:
    made = cold_subject(Tiny(FAMILIES[name], blocks))
    made.run(**first)
    return made


def _unforeseen(name: str, told: dict[str, Any]) -> list[Any]:
    """What of a report is neither in order nor known to fall short."""
    known = FALLS_SHORT.get(name, {})
    eager = [
        (row["region"], row["reason"])
        for row in told.get("eager", ())
        if not any(row["region"].startswith(path) and words in row["reason"] for path, words in known.items())
    ]
    return eager + list(told.get("artefacts", ())) + list(told.get("variants", ()))


def test_every_input_matters_and_the_result_is_eager_s(name: str) -> None:
    made = _compiled(name)
    base = made.eager()
    for call in ({"seed": 1}, {"prompt": 1}, {"step": 1}):
        wanted = made.eager(**call)
        assert distance(wanted, base) > TOLERANCE, f"{call} does not matter to the network"
        assert distance(made.run(**call), wanted) < TOLERANCE, call
    assert distance(made.eager(seed=1), base) > MOVES
    assert equal_bits(made.eager(), made.eager_before) and list(made.module.state_dict()) == made.keys_before


def test_regions_cover_it_and_the_report_names_what_they_do_not(name: str) -> None:
    made = _compiled(name)
    told = made.report.as_dict()
    assert told["artefacts_compiled"] > 0
    assert not _unforeseen(name, {"eager": told["eager"]})
    silent = unexplained(made.module, told, made.run)
    assert not [path for path in silent if not path.startswith(CALLED_BY_PARTS.get(name, ("-",)))]
    notes = [note for note in told["notes"] if NOT_CALLED in note]
    parts = CALLED_BY_PARTS.get(name, ())
    assert len(notes) == len(parts) and all(f" to {path}" in notes[0] for path in parts)


def test_other_sizes_lengths_and_batches_need_nothing_new(name: str) -> None:
    if name in ONE_SHAPE | VIDEOS_ARE_ROWS | ROWS_ARE_PAIRS:
        pytest.skip("its first call can not stand for others, see above")
    kind = FAMILIES[name]
    made = _compiled(name, batch=1)
    for batch, size, length in ((4, 1, 0), (3, -1, 0), (2, 0, -1), (1, -1, 1), (2, 1, 1)):
        call: dict[str, Any] = {"batch": batch, "size": kind.sizes[min(size, len(kind.sizes) - 1)]}
        call |= {"length": kind.lengths[length], "seed": batch, "step": batch % 2}
        mark = made.report.mark()
        assert made.same(**call) < TOLERANCE, call
        assert not _unforeseen(name, new_since(made, mark)), call


def test_an_attention_override_added_later_acts_as_in_eager(name: str) -> None:
    if name in NOT_ATTENTION_S:
        pytest.skip("it hands no options to its attention")
    made = _compiled(name)
    before, options = made.run(), {}
    option_edits.override(options)
    wanted = made.eager(options=options)
    assert distance(wanted, made.eager()) > MOVES
    mark = made.report.mark()
    assert distance(made.run(options=options), wanted) < TOLERANCE
    assert not _unforeseen(name, {"eager": made.report.since(mark)["eager"]}), "it is called from inside artefacts"
    assert equal_bits(made.run(), before)
