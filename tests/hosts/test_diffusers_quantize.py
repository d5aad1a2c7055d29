# SPDX-License-Identifier: Apache-2.0
"""`quantize_pipe` on diffusers' pipelines with random weights: the plan, the picture, LoRAs, and compiling it."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers_networks import lora
from subjects import graphs_as_they_are

import nexfort_engine
from benchmarks.random_pipelines import build
from nexfort_engine.quant.quant_types import TYPES
from nexfort_engine.quant.quantized_linear import QuantisedLinear

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("threads", "artefact_cache")
TOLERANCE = 1e-3  # of the latents after a few steps, in fp32
MOVES = 100 * TOLERANCE
FAMILIES = {"sd21": "unet", "sdxl": "unet", "pixart": "transformer", "flux": "transformer", "sd3": "transformer"}


@pytest.fixture(autouse=True)
def _graphs() -> Iterator[None]:
    with graphs_as_they_are():
        yield


def pipeline(family: str = "sd21", dtype: torch.dtype = torch.float32) -> Any:
    pipe = build(f"tiny:{family}", torch.device("cpu"), dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def picture(pipe: Any, size: tuple[int, int] = (64, 64)) -> torch.Tensor:
    """Latents after two steps."""
    own = {"use_resolution_binning": False, "clean_caption": False} if "PixArt" in type(pipe).__name__ else {}
    return pipe(
        "a cat", height=size[0], width=size[1], num_inference_steps=2, output_type="latent",
        generator=torch.Generator().manual_seed(3), **own,
    ).images  # fmt: skip


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def packed(net: Any) -> list[str]:
    return [name for name, module in net.named_modules() if isinstance(module, QuantisedLinear)]


def weights(*nets: Any) -> int:
    """Bytes of all weights of some networks, each counted once."""
    return sum({t.data_ptr(): t.nbytes for net in nets for t in (*net.parameters(), *net.buffers())}.values())


# ---- the plan ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_inside_blocks_are_packed_and_the_plan_says_the_rest(family: str) -> None:
    pipe, part = pipeline(family), FAMILIES[family]
    quantised = nexfort_engine.quantize_pipe(pipe)
    net, rows = getattr(quantised, part), quantised.quantisation.parts[part]
    assert isinstance(quantised, type(pipe)) and type(quantised).__name__ == type(pipe).__name__
    assert [row.layer for row in rows if row.type] == packed(net) and len(packed(net)) > len(rows) / 2
    assert all((row.type is None) == bool(row.reason) for row in rows)
    for row in rows:
        block = row.layer.partition(".")[0].endswith(("blocks", "block"))
        assert block or row.type is None, "embeddings, first and last layers are left alone"
        assert row.type is None or not row.layer.endswith(("norm1.linear", "norm.linear", "time_emb_proj"))
    assert str(quantised.quantisation).startswith(f"{part}: {len(packed(net))} of {len(rows)} linear layers")
    json.dumps(quantised.quantisation.as_dict())


def test_the_pipeline_given_stays_itself_and_all_else_is_shared() -> None:
    pipe = pipeline()
    wanted, unet, parts = picture(pipe), pipe.unet, dict(pipe.components)
    keys, kind = list(unet.state_dict()), type(pipe)
    quantised = nexfort_engine.quantize_pipe(pipe)
    assert pipe.unet is unet and type(pipe) is kind and not packed(unet) and not hasattr(pipe, "quantisation")
    assert all(pipe.components[name] is part for name, part in parts.items())
    assert list(unet.state_dict()) == keys and torch.equal(picture(pipe), wanted)
    assert quantised.vae is pipe.vae and quantised.text_encoder is pipe.text_encoder
    assert quantised.unet.conv_in is not unet.conv_in and quantised.unet.conv_in.weight is unet.conv_in.weight
    assert set(quantised.unet.state_dict()) == {*keys, *(f"{name}.weight_scale" for name in packed(quantised.unet))}
    assert quantised.unet.dtype == torch.float32 and quantised.unet.config == unet.config
    assert quantised.unquantised() is pipe
    assert 1e-3 < distance(picture(quantised), wanted) < 0.3


def test_memory_shrinks_once_nobody_holds_the_whole_weights() -> None:
    pipe = pipeline("flux", torch.bfloat16)
    before = weights(pipe.transformer)
    quantised = nexfort_engine.quantize_pipe(pipe, quant_type="int8_dynamic")
    rows = quantised.quantisation.parts["transformer"]
    saved = sum(row.full - row.taken for row in rows)
    assert weights(quantised.transformer) == before - saved < 0.85 * before
    gone = [id(p) for p in pipe.transformer.parameters()]
    compiled = nexfort_engine.compile_pipe(quantised)
    del pipe
    gc.collect()
    alive = {id(t) for t in gc.get_objects() if isinstance(t, torch.nn.Parameter)}
    kept = {id(p) for p in quantised.transformer.parameters()}
    assert not (set(gone) - kept) & alive, "a whole weight is still held"
    for one in (quantised, compiled):
        with pytest.raises(RuntimeError, match="its memory was given back"):
            one.unquantised()


def test_ignored_networks_and_places_are_left_alone() -> None:
    pipe = pipeline()
    quantised = nexfort_engine.quantize_pipe(pipe, ignores=("unet.mid_block", "unet.up_blocks.0.attentions.1"))
    names = packed(quantised.unet)
    assert names and not any(name.startswith(("mid_block", "up_blocks.0.attentions.1")) for name in names)
    assert any(name.startswith("up_blocks.0.attentions.0") for name in names)
    assert "it is ignored" in {row.reason for row in quantised.quantisation.parts["unet"]}
    with pytest.raises(ValueError, match="none of the networks that can be quantised"):
        nexfort_engine.quantize_pipe(pipe, ignores=("unet",))


def test_the_best_of_a_file_are_packed(tmp_path: Path) -> None:
    pipe, file = pipeline(), tmp_path / "layers.json"
    names = packed(nexfort_engine.quantize_pipe(pipe).unet)[:10]
    file.write_text(json.dumps({name: {"ssim": 0.9 + i / 100, "other": 1} for i, name in enumerate(names)}))
    for share, count in ((100, 10), (75, 7), (90, 9), (0, 0)):
        found = packed(nexfort_engine.quantize_pipe(pipe, str(file), share).unet)
        assert found == [
            name for name in packed(nexfort_engine.quantize_pipe(pipe).unet) if name in names[10 - count :]
        ]
    assert len(packed(nexfort_engine.quantize_pipe(pipe, file).unet)) == 9, "90 % unless it is said"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read: .*expected JSON such as"),
        ('["a"]', r"expected a number for ssim"),
        ('{"a": 0.9}', r"has 'a': 0\.9; expected a number for ssim"),
        ('{"a": {"ssim": true}}', r"expected a number for ssim"),
        ('{"transformer_blocks.0.attn.to_qq": {"ssim": 1}}', r"names none of the 58 linear layers of unet.*nearest"),
    ],
)
def test_a_file_that_is_none_is_answered(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "layers.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=said):
        nexfort_engine.quantize_pipe(pipeline(), str(file))
    with pytest.raises(ValueError, match="cannot be read"):
        nexfort_engine.quantize_pipe(pipeline(), str(tmp_path / "absent.json"))


def test_what_cannot_be_quantised_says_what_to_do() -> None:
    pipe = pipeline()
    with pytest.raises(TypeError, match="got a UNet2DConditionModel, expected a diffusers pipeline"):
        nexfort_engine.quantize_pipe(pipe.unet)
    with pytest.raises(
        ValueError, match=r"unknown quant_type 'int8'; did you mean 'int8_dynamic'\? Valid: int8_dynamic"
    ):
        nexfort_engine.quantize_pipe(pipe, quant_type="int8")
    for wrong in (-1, 101, True):
        with pytest.raises(ValueError, match="expected a number from 0 to 100"):
            nexfort_engine.quantize_pipe(pipe, top_percentage=wrong)
    with pytest.raises(ValueError, match=r"is compiled; expected quantize_pipe first and then compile_pipe"):
        nexfort_engine.quantize_pipe(nexfort_engine.compile_pipe(pipe))
    pipe.unet.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="carries a forward hook; expected quantize_pipe before offloading"):
        nexfort_engine.quantize_pipe(pipe)


def test_what_is_packed_already_stays_and_the_rest_can_follow() -> None:
    once = nexfort_engine.quantize_pipe(pipeline(), quant_type="int8_dynamic", ignores=("unet.mid_block",))
    twice = nexfort_engine.quantize_pipe(once, quant_type="fp8_e4m3_e4m3_weightonly")
    kinds = {name: twice.unet.get_submodule(name).kind.name for name in packed(twice.unet)}
    assert set(kinds.values()) == {"int8_dynamic", "fp8_e4m3_e4m3_weightonly"}
    assert all((kind == "int8_dynamic") != name.startswith("mid_block") for name, kind in kinds.items())


# ---- compiled ----------------------------------------------------------------------------------------------

FEW = {"fp8_e4m3_e5m2_dynamic_per_tensor"}  # each takes some seconds; captured graphs have rows for all


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FEW else pytest.mark.large) for name in TYPES])
def test_compiled_it_gives_its_own_picture_at_any_size(name: str) -> None:
    pipe = pipeline()
    quantised = nexfort_engine.quantize_pipe(pipe, quant_type=name)
    compiled = nexfort_engine.compile_pipe(quantised, options={"mode": "quant:O2"}, ignores=("vae",))
    assert compiled.uncompiled() is quantised and compiled.quantisation is quantised.quantisation
    wanted = picture(quantised)
    assert distance(wanted, picture(pipe)) > 1e-3, "packing is seen"
    assert distance(picture(compiled), wanted) < TOLERANCE
    mark = compiled.reports["unet"].mark()
    for size in ((96, 64), (72, 56), (128, 128)):
        assert distance(picture(compiled, size=size), picture(quantised, size=size)) < TOLERANCE, size
    new = compiled.reports["unet"].since(mark)
    assert not new["artefacts_compiled"] and not new["variants"] and not new["eager"]
    said = str(compiled.reports["unet"])
    assert f"note: quantised: 48 of 58 linear layers as {name}" in said and "not active: quant" not in said


@pytest.mark.large  # the UNet above has it; what is packed of each family is asked at the top
@pytest.mark.parametrize("family", ["pixart", "flux", "sd3"])
def test_transformers_too(family: str) -> None:
    quantised = nexfort_engine.quantize_pipe(pipeline(family), quant_type="int8_dynamic")
    compiled = nexfort_engine.compile_pipe(quantised, ignores=("vae",))
    # PixArt keeps its table of positions for its own size, which is the one that other files of tests compile it for
    own = (128, 128)
    assert distance(picture(compiled, own), picture(quantised, own)) < TOLERANCE
    found = compiled.reports["transformer"].as_dict()
    assert found["regions"] and not found["eager"]


def test_the_mode_says_where_nothing_is_quantised() -> None:
    pipe = pipeline()
    plain = nexfort_engine.compile_pipe(pipe, options={"mode": "quant:max-optimize"})
    for report in plain.reports.values():
        (row,) = report.as_dict()["inactive"]
        assert row["token"] == "quant" and "expected nexfort_engine.quantize_pipe before compile_pipe" in row["reason"]
        assert "not active: quant: no weight is quantised" in str(report)
    quantised = nexfort_engine.compile_pipe(nexfort_engine.quantize_pipe(pipe), options={"mode": "quant:max-optimize"})
    assert set(quantised.reports) > {"unet", "vae.decoder"}
    assert not any(report.as_dict()["inactive"] for report in quantised.reports.values()), "the VAE belongs to it"
    alone = nexfort_engine.compile(pipe.unet, options="quant:O2")
    assert [row["token"] for row in alone.report.as_dict()["inactive"]] == ["quant"]


def test_projections_are_fused_before_and_never_after() -> None:
    pipe = pipeline()
    quantised = nexfort_engine.quantize_pipe(pipe)
    compiled = nexfort_engine.compile_pipe(quantised, fuse_qkv_projections=True, ignores=("vae",))
    assert not any(getattr(module, "fused_projections", False) for module in compiled.unet.modules())
    assert any("not fused" in note for note in compiled.reports["unet"].as_dict()["notes"])
    pipe.fuse_qkv_projections()
    fused = nexfort_engine.quantize_pipe(pipe)
    assert any(name.endswith("to_qkv") for name in packed(fused.unet))
    assert distance(picture(fused), picture(pipe)) < 0.3


@pytest.mark.large  # test_diffusers.py has fused ones compiled, and above are packed ones
def test_fused_projections_that_are_packed_run_compiled() -> None:
    pipe = pipeline()
    pipe.fuse_qkv_projections()
    fused = nexfort_engine.quantize_pipe(pipe)
    compiled = nexfort_engine.compile_pipe(fused, ignores=("vae",))
    assert distance(picture(compiled), picture(fused)) < TOLERANCE
    assert not compiled.reports["unet"].as_dict()["eager"]


# ---- LoRAs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.large)  # on ComfyUI's quantised layers make test has them
        for name in ("int8_dynamic", "fp8_e4m3_e4m3_dynamic", "fp8_e4m3_e4m3_weightonly")
    ],
)
def test_a_lora_beside_packed_weights_is_honoured(name: str) -> None:
    pytest.importorskip("peft")
    pipe = pipeline()
    quantised = nexfort_engine.quantize_pipe(pipe, quant_type=name)
    compiled = nexfort_engine.compile_pipe(quantised, ignores=("vae",))
    first = picture(compiled)
    compiled.load_lora_weights(lora(pipe.unet, 1), adapter_name="one")
    report = compiled.reports["unet"]
    seen = []
    for strength in (1.0, 0.5):
        compiled.set_adapters(["one"], [strength])
        seen.append(picture(compiled))
        assert distance(seen[-1], picture(quantised)) < TOLERANCE
        assert distance(seen[-1], first) > MOVES
    assert distance(*seen) > MOVES and not report.as_dict()["eager"]
    mark = report.mark()
    compiled.set_adapters(["one"], [1.0])
    assert torch.equal(picture(compiled), seen[0]) and not report.since(mark)["artefacts"], "a strength seen before"
    compiled.unload_lora_weights()
    assert torch.equal(picture(compiled), first)
    pipe.load_lora_weights(lora(pipe.unet, 1), adapter_name="one")
    assert distance(seen[0], picture(pipe)) < 0.3 * distance(seen[0], first), "it is what it is beside whole weights"


@pytest.mark.large  # above it lies beside packed weights
def test_a_lora_s_strength_fused_before_packing_compiles_nothing() -> None:
    pytest.importorskip("peft")
    pipe = pipeline()
    quantised = nexfort_engine.quantize_pipe(pipe)
    compiled = nexfort_engine.compile_pipe(quantised, ignores=("vae",))
    first = picture(compiled)
    mark = compiled.reports["unet"].mark()
    for strength in (0.5, 1.0):
        fused = pipeline()
        fused.load_lora_weights(lora(pipe.unet, 1), adapter_name="one")
        fused.fuse_lora(lora_scale=strength)
        fused.unload_lora_weights()
        quantised.unet.load_state_dict(fused.unet.state_dict())  # packed on its way
        last = picture(compiled)
        assert distance(last, first) > MOVES
        assert distance(last, picture(quantised)) < TOLERANCE
        again = nexfort_engine.quantize_pipe(fused)
        assert distance(last, picture(again)) < TOLERANCE
    new = compiled.reports["unet"].since(mark)
    assert not new["artefacts"] and not new["variants"] and not new["eager"]


def test_a_lora_there_before_is_answered_and_fusing_after_is_refused() -> None:
    pytest.importorskip("peft")
    pipe = pipeline()
    quantised, file = nexfort_engine.quantize_pipe(pipe), lora(pipe.unet, 1)
    before = picture(quantised)
    pipe.load_lora_weights(dict(file), adapter_name="one")
    with pytest.raises(ValueError, match=r"has a LoRA beside its weights; expected it fused"):
        nexfort_engine.quantize_pipe(pipe)
    assert torch.equal(picture(quantised), before), "it went into the pipeline that was given alone"
    compiled = nexfort_engine.compile_pipe(quantised, ignores=("vae",))
    compiled.load_lora_weights(dict(file), adapter_name="one")
    beside = picture(quantised)
    assert distance(beside, before) > MOVES
    for one in (quantised, compiled):
        for safe in (False, True):
            with pytest.raises(ValueError, match=r"the weights of unet are packed.*expected it fused before"):
                one.fuse_lora(safe_fusing=safe)
        one.fuse_lora(components=["text_encoder"])
    assert torch.equal(picture(quantised), beside)
