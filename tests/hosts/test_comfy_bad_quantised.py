# SPDX-License-Identifier: Apache-2.0
"""Quantised files and LoRAs that are broken or odd: compiled gives what eager gives, or raises what eager raises."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from card_memory import loaded_in_part, unload
from dynamic_vram import dynamic_vram
from large_rows import few
from loader_families import CONFIG, FAMILIES, Weights, file_of, lora_file, picture, with_lora
from patchers import TOLERANCE, distance
from quantised import load
from subjects import graphs_as_they_are

from nexfort_engine.hosts.comfy import model as host

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("comfyui", "artefact_cache")]
WAN = FAMILIES["wan"]
LAYER = "blocks.0.ffn.0"


@pytest.fixture(autouse=True)
def uncompiled(tmp_path: Any) -> Iterator[None]:
    with graphs_as_they_are(), pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setenv("NEXFORT_CACHE_DIR", str(tmp_path / "store"))
        yield
    unload()


def pair(file: Weights) -> tuple[Any, Any]:
    return load(dict(file)), host.attach(load(dict(file)), CONFIG)


def outcome(patcher: Any, **how: Any) -> Any:
    """The latent of a picture, or the kind of what it raised."""
    try:
        return picture(WAN, patcher, **how)
    except Exception as error:
        return type(error)


def alike(found: Any, wanted: Any) -> bool:
    """Whether both are the same error, or the same numbers where there are any."""
    if isinstance(wanted, type) or isinstance(found, type):
        return bool(found is wanted)
    there = wanted.isfinite()
    return torch.equal(found.isfinite(), there) and (
        not there.any() or distance(found[there], wanted[there]) < TOLERANCE
    )


def reported(clone: Any) -> dict[str, Any]:
    return host.report_of(clone).as_dict()  # type: ignore[union-attr]


def _described(file: Weights, name: str = LAYER, **words: Any) -> None:
    told = json.loads(bytes(file[f"{name}.comfy_quant"].tolist()))
    file[f"{name}.comfy_quant"] = torch.tensor(list(json.dumps({**told, **words}).encode())).byte()


def _undivided(file: Weights) -> None:
    _described(file, convrot_groupsize=96)


def _one_column(file: Weights) -> None:
    _described(file, convrot_groupsize=1)


def _of_zero(file: Weights) -> None:
    file[f"{LAYER}.weight_scale"].zero_()


def _not_a_number(file: Weights) -> None:
    file[f"{LAYER}.weight_scale"].fill_(float("nan"))


def _negative(file: Weights) -> None:
    file[f"{LAYER}.weight_scale"].neg_()


@pytest.mark.parametrize("form", few(["int8_convrot", "float8_e4m3fn"], ["int8_convrot"]))
@pytest.mark.parametrize("change", few([_undivided, _one_column, _of_zero, _not_a_number, _negative], [_not_a_number]))
def test_a_layer_with_odd_words_or_scales(form: str, change: Callable[[Weights], None]) -> None:
    file = {name: weight.clone() for name, weight in file_of(WAN, form).items()}
    change(file)
    patcher, clone = pair(file)
    for row in ({}, {"seed": 1}, {"size": (12, 8)}):
        wanted = outcome(patcher, **row)
        assert alike(outcome(clone, **row), wanted), (row, wanted, reported(clone)["eager"])
    if not isinstance(wanted, type):
        assert not reported(clone)["eager"], reported(clone)["eager"]
    changed = [with_lora(one, lora_file(WAN)) for one in (patcher, clone)]
    assert alike(outcome(changed[1]), outcome(changed[0]))


def test_a_format_of_a_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout that somebody registered: ComfyUI unpacks what it has no operator for, and so does the graph."""
    import comfy.quant_ops as quant

    file = file_of(WAN, "int8_tensorwise")

    class Halved(quant.TensorWiseINT8Layout):
        """Whose scale counts twice."""

        @classmethod
        def dequantize(cls, qdata: torch.Tensor, params: Any) -> torch.Tensor:
            return (qdata.to(params.orig_dtype) * params.scale * 2.0).to(params.orig_dtype)

    algorithm = {**quant.QUANT_ALGOS["int8_tensorwise"], "comfy_tensor_layout": "HalvedLayout"}
    monkeypatch.setitem(quant.QUANT_ALGOS, "int8_tensorwise", algorithm)
    quant.register_layout_class("HalvedLayout", Halved)
    patcher, clone = pair(file)
    wanted = picture(WAN, patcher)
    assert distance(picture(WAN, clone), wanted) < TOLERANCE
    assert distance(picture(WAN, clone, size=(12, 8)), picture(WAN, patcher, size=(12, 8))) < TOLERANCE
    plain, _ = pair(WAN.weights())
    assert distance(wanted, picture(WAN, plain)) > TOLERANCE
    changed = [with_lora(one, lora_file(WAN)) for one in (patcher, clone)]
    assert alike(outcome(changed[1]), outcome(changed[0]))


def test_a_format_that_nobody_knows_is_refused_by_the_loader() -> None:
    file = {name: weight.clone() for name, weight in file_of(WAN, "int8_convrot").items()}
    _described(file, format="int3_tomorrow")
    with pytest.raises((KeyError, ValueError)):
        load(file)


def _nan(file: Weights) -> Weights:
    """In one matrix of one layer."""
    key = next(name for name in file if name.endswith("lora_up.weight"))
    return {**file, key: torch.full_like(file[key], float("nan"))}


def _infinite(file: Weights) -> Weights:
    key = next(name for name in file if name.endswith("lora_down.weight"))
    return {**file, key: file[key] * float("inf")}


def _misshapen(file: Weights) -> Weights:
    """For another model: ComfyUI leaves such a layer as it is."""
    key = next(name for name in file if name.endswith("lora_up.weight"))
    return {**file, key: torch.randn(7, file[key].shape[1])}


def _of_many_ranks(_: Weights) -> Weights:
    return lora_file(WAN, 2, rank=lambda i: 1 + i)


LORAS = [_nan, _infinite, _misshapen, _of_many_ranks]


@pytest.mark.parametrize("form", ["int8_convrot", pytest.param("float8_e4m3fn", marks=pytest.mark.large)])
@pytest.mark.parametrize("change", few(LORAS, [_misshapen]))
def test_a_lora_that_is_broken_or_odd_leaves_nothing(form: str, change: Callable[[Weights], Weights]) -> None:
    patcher, clone = pair(file_of(WAN, form))
    plain = picture(WAN, patcher)
    assert distance(picture(WAN, clone), plain) < TOLERANCE
    made, file = reported(clone)["artefacts_compiled"], change(lora_file(WAN))
    for share in (None, 0.0):
        unload()
        with loaded_in_part(share) if share is not None else contextlib.nullcontext():
            wanted = outcome(with_lora(patcher, file))
            assert alike(outcome(with_lora(clone, file)), wanted), (share, wanted)
            assert share is not None or reported(clone)["artefacts_compiled"] == made
        unload()
        assert distance(picture(WAN, clone), plain) < TOLERANCE and torch.equal(picture(WAN, patcher), plain)
    assert not reported(clone)["eager"], reported(clone)["eager"]


@pytest.mark.parametrize("change", few(LORAS, [_infinite]))
def test_such_a_lora_under_dynamic_vram(change: Callable[[Weights], Weights]) -> None:
    form = "int8_convrot"
    files = file_of(WAN, form), change(lora_file(WAN))
    with dynamic_vram() as card:
        patcher, clone = pair(files[0])
        plain = picture(WAN, patcher)
        assert distance(picture(WAN, clone), plain) < TOLERANCE
        made = reported(clone)["artefacts_compiled"]
        wanted = outcome(with_lora(patcher, files[1]))
        assert alike(outcome(with_lora(clone, files[1])), wanted), wanted
        assert distance(picture(WAN, clone), plain) < TOLERANCE and not card.pinned()
        found = reported(clone)
        assert not found["eager"] and found["artefacts_compiled"] == made, found["eager"]
