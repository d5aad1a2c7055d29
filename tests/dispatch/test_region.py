# SPDX-License-Identifier: Apache-2.0
"""Dispatch: a call runs an artefact that fits it, gets one of its own, or runs eager and the report says why.

Captured graphs run as they are here (subjects.py), which leaves out Inductor and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import net_pairs  # noqa: E402
from net_pairs import Net, Pair, Part, x  # noqa: E402
from torch import nn  # noqa: E402

import nexfort_engine  # noqa: E402
from nexfort_engine.compilation import builder, lookup  # noqa: E402

T = torch.Tensor
unlowered, pair = net_pairs.unlowered, net_pairs.pair  # fixtures


# ---- one artefact for all that fits ---------------------------------------------------------------------------------


def test_the_first_call_makes_what_every_later_one_uses(pair: Pair) -> None:
    for batch, length in ((2, 6), (1, 6), (3, 9), (2, 64), (1, 2)):
        new = pair.agrees(x(batch, length))
        assert not new["artefacts"] and not new["variants"] and not new["eager"]
    data = pair.report.as_dict()
    assert {row["name"] for row in data["regions"]} == {"blocks.0", "blocks.1", "head"}
    assert len({row["key"] for row in data["regions"]}) == 2
    assert data["calls"] == 6 and not data["variants"] and not data["eager"] and not data["notes"]


def test_another_structure_dtype_or_rank_gets_an_artefact_of_its_own(pair: Pair) -> None:
    assert pair.agrees(x(), 2.5)["artefacts_compiled"] == 1
    assert pair.agrees(x(), 3.5)["artefacts_compiled"] == 1, "a float is part of the structure"
    assert pair.agrees(x(), torch.tensor(0.5))["artefacts_compiled"] == 1
    assert pair.agrees(x()[0])["artefacts_compiled"] == 2
    pair.net.double()
    assert pair.agrees(x().double())["artefacts_compiled"] == 2
    pair.net.float()
    assert not pair.agrees(x())["artefacts"] and not pair.reasons()


def test_numbers_that_only_look_equal_are_not_taken_for_each_other(pair: Pair) -> None:
    whole = torch.ones(2, 6, 8)
    for scale in (1, True, 1.0, 2, 2.0):
        pair.agrees(whole, scale)

    class Divides(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width))

        def forward(self, h: T, by: Any) -> T:
            counts = torch.arange(8) * by  # whole numbers, unless `by` is a float
            return h * self.weight + (counts / 3 if counts.is_floating_point() else counts // 3)

    other = Pair(Net(part=Divides), pair.engine.state.store.root / "other")
    for by in (1, 1.0, True, 2, 2.0):
        other.agrees(x(), by)


@pytest.mark.parametrize(
    "view",
    [
        lambda: x(8, 6).transpose(0, 1)[:2],
        lambda: x(4, 6)[::2],
        lambda: torch.randn(2, 8, 6).transpose(1, 2),
        lambda: torch.randn(2, 1, 8).expand(2, 6, 8),
        lambda: torch.randn(3, 6, 8)[1:],
    ],
)
def test_any_layout_of_the_input_runs_the_same_artefact(pair: Pair, view: Callable[[], T]) -> None:
    assert not pair.agrees(view())["artefacts"]


def test_channels_last_is_kept_apart_and_kept(tmp_path: Path) -> None:
    class Convolution(nn.Conv2d):
        def __init__(self, width: int) -> None:
            super().__init__(width, width, 3, padding=1)

    pair = Pair(nn.Sequential(nn.ModuleList([nn.Identity()]), *[Convolution(8) for _ in range(2)])[1:], tmp_path)
    image = torch.randn(2, 8, 6, 6)
    pair.agrees(image)
    pair.agrees(image.to(memory_format=torch.channels_last))
    assert not pair.reasons()
    assert not pair.agrees(torch.randn(3, 8, 4, 9).to(memory_format=torch.channels_last))["artefacts"]


def test_fixed_sizes_get_an_artefact_each(tmp_path: Path) -> None:
    pair = Pair(Net(), tmp_path, {"dynamic": False})
    assert pair.agrees(x())["artefacts_compiled"] == 2
    assert not pair.agrees(x(seed=2))["artefacts"]
    new = pair.agrees(x(3))
    assert new["artefacts_compiled"] == 2 and new["variants"]


def test_a_network_without_blocks_is_one_region(tmp_path: Path) -> None:
    pair = Pair(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)), tmp_path)
    assert pair.agrees(x(1))["artefacts_compiled"] == 1
    assert not pair.agrees(x(3, 9))["artefacts"]
    assert [row["name"] for row in pair.report.as_dict()["regions"]] == ["(whole module)"]


# ---- eager, with a reason -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (type("Called", (), {"__call__": lambda self: None})(), "Called"),
        (nn.Linear(2, 2), "Linear"),
        (torch.Generator(), "Generator"),
        (torch.ones(2).to_sparse(), "sparse"),
    ],
    ids=["a callable object", "a module", "a generator", "a sparse tensor"],
)
def test_an_argument_that_is_no_data_runs_eager(pair: Pair, value: Any, reason: str) -> None:
    wanted = pair.net(x(), named=value)
    with torch.no_grad():
        assert torch.allclose(pair.compiled(x(), named=value), wanted, atol=1e-5)
    assert reason in pair.reasons()
    assert not pair.agrees(x())["eager"]


def test_code_among_the_options_runs_eager_and_the_rest_does_not(pair: Pair) -> None:
    pair.agrees(x(), options={})
    for patch in (torch.sin, torch.cos):
        new = pair.agrees(x(), options={"patch": patch})
        assert new["artefacts_compiled"] == 0
    assert "options['patch']" in pair.reasons()
    assert {row["region"] for row in pair.report.as_dict()["eager"]} == {"blocks.0", "blocks.1"}
    new = pair.agrees(x(), options={})
    assert not new["artefacts"] and not new["eager"]


def test_a_tensor_among_the_options_is_data(pair: Pair) -> None:
    pair.agrees(x(), options={})
    assert pair.agrees(x(), options={"shift": torch.ones(8)})["artefacts_compiled"] == 1
    assert not pair.agrees(x(), options={"shift": torch.full((8,), 3.0)})["artefacts"]
    assert not pair.agrees(x(), options={})["artefacts"] and not pair.reasons()


def test_options_that_never_stop_changing_end_in_eager(tmp_path: Path) -> None:
    pair = Pair(Net(), tmp_path)
    for number in range(builder.MOST_VARIANTS + 3):
        pair.agrees(x(), options={"shift": float(number)})
    assert len(pair.report.as_dict()["artefacts"]) <= builder.MOST_VARIANTS + 1
    assert "keeps changing" in pair.reasons()
    assert not pair.agrees(x(), options={"shift": 0.0})["artefacts"], "the first are still in use"
    lookup._loaded.clear()
    later = Pair(Net(), tmp_path)
    new = later.agrees(x(), options={"shift": 100.0})
    assert new["artefacts_compiled"] > 0 and not new["eager"], "earlier sessions leave room for others"
    assert later.agrees(x(), options={"shift": 0.0})["artefacts_compiled"] == 0


def test_gradients_and_disabling_run_eager(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    given = x().requires_grad_(True)
    pair.compiled(given).sum().backward()
    assert given.grad is not None and "gradients are on" in pair.reasons()
    calls = pair.report.as_dict()["calls"]
    monkeypatch.setenv("NEXFORT_DISABLE", "1")
    assert not pair.agrees(x())["eager"]
    assert pair.report.as_dict()["calls"] == calls
    monkeypatch.delenv("NEXFORT_DISABLE")
    pair.agrees(x())
    assert pair.report.as_dict()["calls"] == calls + 1


def test_a_block_that_cannot_be_captured_runs_eager_and_is_not_tried_again(tmp_path: Path) -> None:
    class Stubborn(Part):
        tries = 0

        def forward(self, h: T, *more: Any, **named: Any) -> T:
            type(self).tries += 1
            return super().forward(h) if float(h.sum()) > -1e9 else h

    pair = Pair(Net(part=Stubborn), tmp_path)
    new = pair.agrees(x())
    assert {row["region"] for row in new["eager"]} == {"blocks.0", "blocks.1"} and new["artefacts_compiled"] == 1
    Stubborn.tries = 0
    assert not pair.agrees(x())["eager"]
    assert Stubborn.tries == 4, "two in eager, two in the compiled network"


def test_too_little_memory_is_the_host_s_business(pair: Pair) -> None:
    def full(_inputs: Any) -> Any:
        raise torch.OutOfMemoryError("no memory left")

    binding = pair.engine.regions[0].bindings[0]
    code, binding.code = binding.code, full
    with pytest.raises(torch.OutOfMemoryError), torch.no_grad():
        pair.compiled(x())
    binding.code = code
    assert not pair.agrees(x())["eager"] and not pair.reasons()


def test_an_engine_starts_from_what_another_one_stored(pair: Pair) -> None:
    again = Pair(pair.net, pair.engine.state.store.root)
    new = again.agrees(x(3, 9))
    assert new["artefacts_compiled"] == 0 and new["artefacts_loaded"] == 2
    assert again.agrees(x(), 2.5)["artefacts_compiled"] == 1


# ---- bad input ------------------------------------------------------------------------------------------------------


def test_what_is_no_module_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"got a function, expected a torch\.nn\.Module"):
        nexfort_engine.compile(lambda h: h)


def test_a_module_without_weights_runs_as_it_is(tmp_path: Path) -> None:
    pair = Pair(nn.Sequential(nn.GELU(), nn.Identity()), tmp_path)
    pair.agrees(x())
    assert "holds no weights" in pair.report.as_dict()["notes"][0]


def test_weights_that_are_not_loaded_are_left_to_torch(tmp_path: Path) -> None:
    pair = Pair(Net(), tmp_path)
    pair.net.to("meta")
    with torch.no_grad():
        assert pair.compiled(x().to("meta")).device.type == "meta"
    assert "meta" in pair.reasons() or "not loaded" in pair.reasons()
