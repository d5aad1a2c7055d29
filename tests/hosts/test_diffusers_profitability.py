# SPDX-License-Identifier: Apache-2.0
"""`quantize_pipe` packs what pays, as a first step of the pipeline tells it, and leaves no trace of that step."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import nexfort_engine
from benchmarks.random_pipelines import build, recipe_of
from nexfort_engine.hosts.diffusers.row_probe import look
from nexfort_engine.quant.cost_model import H200, Card
from nexfort_engine.quant.profitability import ROWS

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("threads")
# tiny products pay here if they are larger than 32 rows times 64x32
SLOW = Card(half=1e9, narrow=1e12, memory=3e11, kernel=0.0, product=2.0 * 32 * 32 * 64 / 1e9, processors=0)
ODD = {"height": 65, "width": 64}
PARTS = {"sd21": "unet", "sdxl": "unet", "pixart": "transformer", "latte": "transformer", "flux": "transformer"}


def pipeline(family: str = "sd21") -> Any:
    pipe = build(f"tiny:{family}", torch.device("cpu"), torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def call_of(family: str) -> dict[str, Any]:
    recipe, _ = recipe_of(f"tiny:{family}")
    return {**recipe.call, **recipe.tiny_call, "height": 64, "width": 64}


def rows_of(plan: Any, part: str) -> dict[str, int | None]:
    return {row.layer: row.rows for row in plan.parts[part]}


@pytest.mark.parametrize("family", PARTS)
def test_rows_are_those_that_the_pipeline_gives(family: str) -> None:
    pipe, part = pipeline(family), PARTS[family]
    found = look(pipe, {part: getattr(pipe, part)}, call_of(family))
    guided = 1 if family == "flux" else 2
    assert not found.problem
    rows = {path: one.rows for path, one in found.seen[part].items()}
    of_time = [n for path, n in rows.items() if "time" in path and "linear" in path]
    assert of_time and set(of_time) == {guided}
    # 64 pixels are 8 numbers of a latent a side, and patches or a first halving of the UNet make them 4
    tokens = 16 * guided * (4 if family == "latte" else 1)
    assert {n for path, n in rows.items() if path.endswith(("attn1.to_q", "transformer_blocks.0.attn.to_q"))} >= {
        tokens
    }
    twice = look(pipe, {part: getattr(pipe, part)}, {**call_of(family), "num_images_per_prompt": 2}).seen[part]
    query = next(path for path in rows if path.endswith("to_q"))
    assert twice[query].rows == 2 * rows[query]


def test_nothing_of_the_pipeline_is_changed_by_the_look() -> None:
    pipe = pipeline()
    pipe.scheduler.set_timesteps(7)
    before = dict(vars(pipe))
    steps, numbers = pipe.scheduler.timesteps.clone(), torch.get_rng_state()
    own = torch.Generator().manual_seed(5)
    state = own.get_state()
    found = look(pipe, {"unet": pipe.unet}, {**call_of("sd21"), "generator": own})
    assert found.seen and not found.problem
    assert vars(pipe).keys() == before.keys() and all(vars(pipe)[name] is value for name, value in before.items())
    assert torch.equal(pipe.scheduler.timesteps, steps) and torch.equal(torch.get_rng_state(), numbers)
    assert torch.equal(own.get_state(), state)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in pipe.unet.modules())


def test_rows_of_the_call_decide_and_everything_switches_it_off() -> None:
    pipe, call = pipeline(), call_of("sd21")
    all_of_them = nexfort_engine.quantize_pipe(pipe, everything=True, call=call, card=SLOW).quantisation
    plain = nexfort_engine.quantize_pipe(pipe).quantisation
    assert plain == all_of_them, "on a CPU everything is packed unless it is said"
    assert set(rows_of(plain, "unet").values()) == {None}
    none = nexfort_engine.quantize_pipe(pipe, everything=False, call=call).quantisation
    assert not any(row.type for row in none.parts["unet"]) and not none.notes
    assert "32 rows times 256x32 would take as long or longer" in str(none)
    some = nexfort_engine.quantize_pipe(pipe, everything=False, call=call, card=SLOW).quantisation
    packed = {row.layer for row in some.parts["unet"] if row.type}
    before = {row.layer for row in plain.parts["unet"] if row.type}
    assert packed < before and any(path.endswith("ff.net.0.proj") for path in packed)
    assert "ff.net.*.proj  256x32, 32 rows  error up to" in str(some)
    assert some.as_dict()["parts"]["unet"][0]["rows"] == 2
    larger = nexfort_engine.quantize_pipe(pipe, everything=False, call={**call, "height": 256}, card=SLOW).quantisation
    assert packed < {row.layer for row in larger.parts["unet"] if row.type}, "more rows, more that pays"


@pytest.mark.gpu
def test_on_a_gpu_only_what_pays_is_packed_unless_it_is_said() -> None:
    pipe, call = pipeline().to("cuda", torch.float16), call_of("sd21")
    plan = nexfort_engine.quantize_pipe(pipe, call=call, quant_type="int8_dynamic").quantisation
    assert not any(row.type for row in plan.parts["unet"]) and not plan.notes
    assert "32 rows times 256x32 would take as long or longer" in str(plan)
    for more in ({"everything": True}, {"quant_type": "fp8_e4m3_e4m3_weightonly"}):
        plan = nexfort_engine.quantize_pipe(pipe, **{"quant_type": "int8_dynamic", **more}).quantisation
        assert sum(row.type is not None for row in plan.parts["unet"]) == 48


def test_a_file_of_layers_is_judged_too_and_weightonly_is_not() -> None:
    pipe, call = pipeline("flux"), call_of("flux")
    kind = "fp8_e4m3_e4m3_weightonly"
    weightonly = nexfort_engine.quantize_pipe(pipe, quant_type=kind, everything=False, call=call).quantisation
    rows = weightonly.parts["transformer"]
    assert sum(row.type is not None for row in rows) > len(rows) / 2 and not weightonly.notes
    int8 = nexfort_engine.quantize_pipe(pipe, quant_type="int8_dynamic", everything=False, call=call).quantisation
    assert not any(row.type for row in int8.parts["transformer"])


def test_a_call_that_fails_is_told_and_sizes_decide() -> None:
    pipe = pipeline()
    for call, said in ((ODD, "divisible by 8"), ({"prompt": None}, "ValueError: Provide")):
        plan = nexfort_engine.quantize_pipe(pipe, everything=False, call=call).quantisation
        (note,) = plan.notes
        assert note.startswith("unet: how many rows its layers see is not known (") and said in note
        assert f"its rows are not known, and {ROWS} times 256x32 would take as long or longer" in str(plan)
        assert str(plan).endswith(f"note: {note}")
    fast = dataclasses.replace(H200, kernel=0.0, product=0.0, memory=1e20)
    plan = nexfort_engine.quantize_pipe(pipe, everything=False, call=ODD, card=fast).quantisation
    assert sum(row.type is not None for row in plan.parts["unet"]) == 48


def test_a_network_that_fails_halfway_tells_nothing() -> None:
    pipe = pipeline()
    pipe.unet.conv_out = torch.nn.Identity()  # too many channels for the scheduler, which is not asked any more
    assert look(pipe, {"unet": pipe.unet}, call_of("sd21")).seen
    pipe.unet.conv_norm_out = torch.nn.GroupNorm(3, 3)
    found = look(pipe, {"unet": pipe.unet}, call_of("sd21"))
    assert not found.seen and found.problem


@pytest.mark.parametrize(
    ("more", "said"),
    [
        *(
            ({"everything": 1}, "True, False or None"),
            ({"call": 64}, "keywords of"),
            ({"card": "h100"}, "such as H200"),
        ),
        *(({"top_percentage": "90"}, "from 0 to 100"), ({"budget": "0.1"}, "a number"), ({"budget": -1}, "a number")),
        ({"ignores": "unet"}, r"such as \["),
    ],
)
def test_wrong_options_are_answered(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        nexfort_engine.quantize_pipe(pipeline(), **more)


def test_a_controlnet_and_its_unet_are_both_seen() -> None:
    pipe = pipeline()
    net = diffusers.ControlNetModel.from_unet(pipe.unet, load_weights_from_unet=False).eval().requires_grad_(False)
    pipe = diffusers.AutoPipelineForText2Image.from_pipe(pipe, controlnet=net)
    call = {**call_of("sd21"), "image": torch.zeros(1, 3, 64, 64)}
    plan = nexfort_engine.quantize_pipe(pipe, everything=False, call=call, card=SLOW).quantisation
    assert not plan.notes
    for part in ("unet", "controlnet"):
        assert any(row.type for row in plan.parts[part]) and 32 in rows_of(plan, part).values()
    lacking = nexfort_engine.quantize_pipe(pipe, everything=False, card=SLOW).quantisation
    assert len(lacking.notes) == 2 and "image" in lacking.notes[0]
