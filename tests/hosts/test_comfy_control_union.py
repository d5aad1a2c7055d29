# SPDX-License-Identifier: Apache-2.0
"""Union control nets: type, start and end percent change from prompt to prompt, and nothing is compiled for it.

The nodes are ComfyUI's own ("Set Union ControlNet Type", "Apply ControlNet (Advanced)") and the plugin's. The model is
compiled, or the control net, or both.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import comfy_networks
import control_nets
import pytest
import torch
from backbones import make, with_weights
from large_rows import few
from patchers import CONFIG, FAMILIES, MOVES, TOLERANCE, Conditions, distance, nothing_new, patcher_around, sample
from prompts import WIDGETS, comfyui_nodes
from subjects import graphs_as_they_are

from nexfort_engine.hosts.comfy import controlnet
from nexfort_engine.hosts.comfy import model as host

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("comfyui", "artefact_cache")]
CALL: dict[str, Any] = {"size": (4, 4), "steps": 3, "length": 2}
Link = tuple[str, float, float]  # type, start percent, end percent
# the first is what the first picture is made with; a chain is two applications of one control net
ROWS: dict[str, tuple[Link, ...]] = {
    "depth": (("depth", 0.0, 1.0),),
    "openpose": (("openpose", 0.0, 1.0),),
    "hed": (("hed/pidi/scribble/ted", 0.0, 1.0),),
    "last steps": (("depth", 0.3, 1.0),),
    "first steps": (("depth", 0.0, 0.3),),
    "middle steps": (("openpose", 0.3, 0.6),),
    "chain": (("depth", 0.0, 0.6), ("openpose", 0.3, 1.0)),
    "no step": (("depth", 1.0, 1.0),),
}


def flux() -> tuple[Any, Any]:
    """A model, and a union control net for it."""
    control = control_nets.flux()
    control.control_model.controlnet_mode_embedder.weight.mul_(20.0)
    for block in control.control_model.double_blocks:
        block.txt_attn.qkv.weight.mul_(4.0)  # so that the type, a word before the prompt's, matters
    return patcher_around(make("comfy_flux").module, family=FAMILIES["comfy_flux"]), control


def unet() -> tuple[Any, Any]:
    """The same for SDXL's kind, whose types are made for 320 channels."""
    settings: dict[str, Any] = {
        **{"image_size": 32, "in_channels": 4, "model_channels": 320, "num_res_blocks": [1], "channel_mult": [1]},
        **{"num_heads": 4, "context_dim": 16, "transformer_depth": [1], "transformer_depth_middle": 1},
        **{"use_spatial_transformer": True, "use_linear_in_transformer": False, "legacy": False},
    }
    control = control_nets.unet(**settings, union_controlnet_num_control_type=6)
    network = comfy_networks.unet(1, **settings, transformer_depth_output=[1, 1])
    return patcher_around(with_weights(network, "unet_of_320")), control


UNIONS: dict[str, Callable[[], tuple[Any, Any]]] = {"flux": flux, "unet": unet}
NAMES = ["flux", pytest.param("unet", marks=pytest.mark.large)]


class Union:
    """A union control net and its model, plain and compiled, and eager's pictures without it and of all rows."""

    def __init__(self, nodes: Any, name: str) -> None:
        self.nodes = nodes
        self.model, self.control = UNIONS[name]()
        self.model_of_ours = host.attach(self.model, CONFIG)
        self.ours = self.compile(self.control)
        self.reports: list[Any] = [host.report_of(self.model_of_ours), controlnet.report_of(self.ours)]
        self.plain = sample(self.model, **CALL)
        self.wanted = {what: self.picture(self.model, self.control, row) for what, row in ROWS.items()}

    def compile(self, control: Any) -> Any:
        """What the plugin's node makes of a control net."""
        return self.nodes.NODE_CLASS_MAPPINGS["NexfortCompileControlNet"].execute(control, **WIDGETS)[0]

    def picture(self, model: Any, control: Any, row: tuple[Link, ...], typed: Any = None) -> torch.Tensor:
        """The latent. typed: what gives the control net its type, if not ComfyUI's node behind ours."""

        def under(positive: Conditions, negative: Conditions) -> tuple[Conditions, Conditions]:
            apply = self.nodes.ControlNetApplyAdvanced().apply_controlnet
            for at, (kind, start, end) in enumerate(row):
                link = (typed or self.of_type)(control, kind)
                positive, negative = apply(positive, negative, link, control_nets.hint(at), 3.0, start, end)
            return positive, negative

        return sample(model, edit=under, **CALL)

    def of_type(self, control: Any, kind: str) -> Any:
        """What ComfyUI's node makes of it."""
        return self.nodes.NODE_CLASS_MAPPINGS["SetUnionControlNetType"].execute(control, kind)[0]

    def marks(self) -> list[Any]:
        return [report.mark() for report in self.reports]

    def new(self, marks: list[Any]) -> list[dict[str, Any]]:
        """What the reports of model and control net gained."""
        return [report.since(mark) for report, mark in zip(self.reports, marks, strict=True)]


@pytest.fixture(scope="module")
def begun(comfyui: Path) -> Iterator[Callable[[str], Union]]:
    """Makes each kind once, after the first picture of model and control net."""
    with graphs_as_they_are(), comfyui_nodes(comfyui) as nodes:

        @functools.cache
        def make_one(name: str) -> Union:
            at = Union(nodes, name)
            found = at.picture(at.model_of_ours, at.ours, ROWS["depth"])
            assert distance(found, at.wanted["depth"]) < TOLERANCE
            return at

        yield make_one


def unlike_eager(at: Union, model: Any, control: Any) -> list[str]:
    """The rows whose pictures are not eager's."""
    found = {what: distance(at.picture(model, control, row), at.wanted[what]) for what, row in ROWS.items()}
    return [what for what, apart in found.items() if apart >= TOLERANCE]


@pytest.mark.large  # about the rows, not about what is compiled
@pytest.mark.parametrize("name", NAMES)
def test_every_row_makes_another_picture_than_the_one_before(begun: Callable[[str], Union], name: str) -> None:
    at = begun(name)
    rows = [*at.wanted.values(), at.wanted["depth"]]
    assert all(distance(now, before) > MOVES for before, now in itertools.pairwise(rows))
    assert all(distance(a, b) > 5 * TOLERANCE for a, b in itertools.combinations(at.wanted.values(), 2))
    assert torch.equal(at.wanted["no step"], at.plain)


@pytest.mark.parametrize("compiled", few(["model", "control net", "both"], ["control net"]))
@pytest.mark.parametrize("name", NAMES)
def test_type_start_and_end_are_followed_and_compile_nothing(
    begun: Callable[[str], Union], name: str, compiled: str
) -> None:
    at = begun(name)
    model = at.model if compiled == "control net" else at.model_of_ours
    control = at.control if compiled == "model" else at.ours
    before, marks = sample(at.model_of_ours, **CALL), at.marks()
    assert not unlike_eager(at, model, control)
    of_model, of_control = at.new(marks)
    nothing_new(of_model)
    assert bool(of_model["calls"]) == (model is not at.model) and bool(of_control["calls"]) == (control is at.ours)
    # what SDXL's makes of the number is small, and the number is a constant there
    assert {row["region"] for row in of_control.pop("eager")} <= {"control_add_embedding"}
    nothing_new({**of_control, "eager": []})
    assert torch.equal(sample(at.model_of_ours, **CALL), before), "the control net is felt after it was taken off"
    assert torch.equal(sample(at.model, **CALL), at.plain), "bypassing the node gives another picture"
    assert torch.equal(at.picture(at.model, at.control, ROWS["depth"]), at.wanted["depth"])


@pytest.mark.parametrize("name", NAMES)
def test_a_type_that_is_set_in_front_of_our_node_acts(begun: Callable[[str], Union], name: str) -> None:
    at, typed = begun(name), []

    def in_front(control: Any, kind: str) -> Any:
        typed.append(at.compile(at.of_type(control, kind)))
        return typed[-1]

    marks = at.marks()
    for what in ("depth", "openpose", "chain"):
        found = at.picture(at.model, at.control, ROWS[what], in_front)
        assert distance(found, at.wanted[what]) < TOLERANCE, what
    assert controlnet.report_of(typed[0]) is at.reports[1] and not at.new(marks)[1]["artefacts"]


@pytest.mark.parametrize("name", NAMES)
def test_no_type_at_all(begun: Callable[[str], Union], name: str) -> None:
    """What a type went through is called in another way, or not at all."""
    at, row = begun(name), (("auto", 0.0, 1.0),)
    wanted = at.picture(at.model, at.control, row)
    assert all(distance(wanted, other) > 10 * TOLERANCE for other in at.wanted.values())
    marks = at.marks()
    assert distance(at.picture(at.model_of_ours, at.ours, row), wanted) < TOLERANCE
    assert {one["region"] for one in at.new(marks)[1]["artefacts"]} <= {"control_add_embedding"}
    marks = at.marks()
    assert not unlike_eager(at, at.model_of_ours, at.ours)
    assert distance(at.picture(at.model_of_ours, at.ours, row), wanted) < TOLERANCE
    assert not any(new["artefacts"] for new in at.new(marks))


@pytest.mark.parametrize("name", NAMES)
def test_a_type_that_the_network_lacks_is_refused_in_the_same_words(begun: Callable[[str], Union], name: str) -> None:
    at, said = begun(name), []
    for model, control in ((at.model, at.control), (at.model_of_ours, at.ours)):
        with pytest.raises((ValueError, IndexError)) as refused:
            at.picture(model, control, (("repaint", 0.0, 1.0),))
        said.append((refused.type, str(refused.value)))
    assert said[0] == said[1]
    assert not unlike_eager(at, at.model_of_ours, at.ours)
