# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints through ComfyUI's own loader: each format compiled, and what changes then is followed.

On a CPU ComfyUI multiplies int8 natively and computes the other formats in full. Native fp8 is asked for with the one
operator that a CPU lacks put in, and on a card by the GPU test.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from card_memory import PagedMemory, loaded_in_part, page, unload
from large_rows import few
from patchers import CONFIG, MOVES, TOLERANCE, distance
from patchers import sample as sample_any
from quantised import CHANNELS, FORMATS, load, plain_weights, quantised_weights
from subjects import graphs_as_they_are
from test_comfy_weights import nothing_new, reported

from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.hosts.comfy import model as host

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("comfyui", "artefact_cache")]
sample = functools.partial(sample_any, channels=CHANNELS)
BLOCKS = {"double_blocks.0", "double_blocks.1", "single_blocks.0", "single_blocks.1"}
CHANGES: list[dict[str, Any]] = [{"size": (24, 16)}, {"size": (16, 28), "length": 20}, {"cfg": 1.0}, {"prompt": 1}]
Pair = tuple[Any, Any]


@pytest.fixture
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Pair]]:
    """Makes an eager patcher of a format and its compiled clone after a first picture, from a cache of their own."""

    def make(form: str) -> Pair:
        patcher = load(quantised_weights(form))
        kind = form, patcher.model.diffusion_model.double_blocks[0].img_mlp[0]._full_precision_mm
        mine = tmp_path_factory.mktemp("quantised") / "store"
        if kind in _stores:
            shutil.copytree(_stores[kind], mine)
        patch.setenv("NEXFORT_CACHE_DIR", str(mine))
        clone = host.attach(patcher, CONFIG)
        assert distance(sample(clone), sample(patcher)) < TOLERANCE
        assert not reported(clone)["eager"], reported(clone)["eager"]
        if kind not in _stores:
            _stores[kind] = mine
            return make(form)
        return patcher, clone

    # in this order, so that each puts back its own; without gradients, as a prompt runs
    with graphs_as_they_are(), pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        yield make


_stores: dict[tuple[str, bool], Path] = {}  # what the first picture leaves in the cache, by format and whether in full


def weight_of(patcher: Any) -> Any:
    """One of the quantised weights."""
    return patcher.model.diffusion_model.double_blocks[0].img_mlp[0].weight


def with_lora(patcher: Any, strength: float) -> Any:
    """A clone with a change of every matrix of the blocks, as a LoRA node makes it; packed data has other shapes."""
    clone = patcher.clone()
    generator = torch.Generator().manual_seed(3)
    patches = {
        f"diffusion_model.{name}": (0.05 * torch.randn(weight.shape, generator=generator),)
        for name, weight in plain_weights().items()
        if "blocks" in name and name.endswith("weight") and weight.ndim == 2
    }
    assert len(clone.add_patches(patches, strength)) == len(patches) > 4
    return clone


def noise_floor(patcher: Any, wanted: torch.Tensor, **change: Any) -> float:
    """How far eager is from itself with another attention kernel."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        return distance(sample(patcher, **change), wanted)


def mark_of(clone: Any) -> Any:
    return host.report_of(clone).mark()  # type: ignore[union-attr]


def eager_since(clone: Any, mark: Any) -> list[dict[str, Any]]:
    return host.report_of(clone).since(mark)["eager"]  # type: ignore[union-attr]


# int8 is lowered below, and a layer in nvfp4 takes the place of one in fp8; the others differ in their digits alone
MOST = few(list(FORMATS), ["float8_e4m3fn"])
NVFP4 = pytest.param("nvfp4", marks=pytest.mark.large)


@pytest.mark.parametrize("form", MOST)
def test_a_format_is_compiled_and_other_calls_need_nothing_new(pair: Callable[[str], Pair], form: str) -> None:
    patcher, clone = pair(form)
    assert type(weight_of(patcher)).__name__ == "QuantizedTensor"
    assert distance(sample(patcher), sample(load(plain_weights()))) > 10 * TOLERANCE, "as quantised weights do"
    found = reported(clone)
    assert found["artefacts_compiled"] == 0 and {row["name"] for row in found["regions"]} > BLOCKS, "a second engine"
    plain, before, mark = sample(patcher), sample(clone), mark_of(clone)
    for change in CHANGES:
        wanted = sample(patcher, **change)
        assert wanted.shape != plain.shape or distance(wanted, plain) > MOVES
        assert distance(sample(clone, **change), wanted) < TOLERANCE, change
    assert torch.equal(sample(clone), before) and torch.equal(sample(patcher), plain)
    nothing_new(clone, mark)


@pytest.mark.large  # test_comfy_loader.py has it for fp8, test_comfy_today.py for int8
@pytest.mark.parametrize("form", list(FORMATS))
def test_a_lora_on_quantised_weights_compiles_nothing_and_leaves_nothing(
    pair: Callable[[str], Pair], form: str
) -> None:
    patcher, clone = pair(form)
    plain, before, mark = sample(patcher), sample(clone), mark_of(clone)
    for strength in (1.0, 0.5):
        wanted = sample(with_lora(patcher, strength))
        assert type(weight_of(patcher)).__name__ == "QuantizedTensor", "it was quantised again"
        assert distance(wanted, plain) > MOVES
        assert distance(sample(with_lora(clone, strength)), wanted) < TOLERANCE, strength
    assert torch.equal(sample(clone), before), "the LoRA is felt after it was taken off"
    assert torch.equal(sample(patcher), plain), "bypassing the node gives another picture"
    nothing_new(clone, mark)


@pytest.mark.parametrize("form", few(["int8_tensorwise", "float8_e4m3fn", "nvfp4"], ["int8_tensorwise"]))
def test_lowered_code_gives_eager_s_picture(form: str) -> None:
    """To the tolerance where products are computed in full. Inputs that are quantised flip a digit for any rounding:
    there, to twice what the attention kernel makes of eager. With LoRAs too, for which nothing more is lowered.
    """
    patcher = load(quantised_weights(form))
    in_full = patcher.model.diffusion_model.double_blocks[0].img_mlp[0]._full_precision_mm
    with torch.inference_mode():
        clone = host.attach(patcher, CONFIG)
        found, noise = [], []
        for change in ({}, *CHANGES):
            wanted = sample(patcher, **change)
            noise.append(noise_floor(patcher, wanted, **change))
            found.append(distance(sample(clone, **change), wanted))
        made = reported(clone)["artefacts_compiled"]
        for strength in (1.0, 0.5):
            patched, compiled = with_lora(patcher, strength), with_lora(clone, strength)
            wanted = sample(patched)
            noise.append(noise_floor(patched, wanted))
            found.append(distance(sample(compiled), wanted))
        assert reported(clone)["artefacts_compiled"] == made
        if in_full:
            assert max(found) < TOLERANCE, found
        else:  # which digits flip is chance in one call
            assert sum(noise) > TOLERANCE * len(noise), "no digit flips: the tolerance would do"
            assert sum(found) <= 2 * sum(noise), (found, noise)
        assert not reported(clone)["eager"], reported(clone)["eager"]


@pytest.mark.parametrize("form", ["float8_e4m3fn", NVFP4])
def test_scales_are_data(pair: Callable[[str], Pair], form: str) -> None:
    patcher, clone = pair(form)
    plain, before, mark = sample(patcher), sample(clone), mark_of(clone)
    scale = weight_of(patcher)._params.scale
    kept = scale.clone()
    scale.mul_(5.0)
    wanted = sample(patcher)
    assert distance(wanted, plain) > MOVES
    assert distance(sample(clone), wanted) < TOLERANCE
    scale.copy_(kept)
    assert torch.equal(sample(clone), before)
    nothing_new(clone, mark)


def test_a_weight_of_another_format_is_another_artefact(pair: Callable[[str], Pair]) -> None:
    patcher, clone = pair("float8_e4m3fn")
    plain, before, mark = sample(patcher), sample(clone), mark_of(clone)
    layer = patcher.model.diffusion_model.double_blocks[0].img_mlp[0]
    original = layer.weight
    other = weight_of(load(quantised_weights("nvfp4")))
    layer.weight = torch.nn.Parameter(other, requires_grad=False)
    wanted = sample(patcher)
    assert distance(wanted, plain) > 10 * TOLERANCE
    assert distance(sample(clone), wanted) < TOLERANCE
    new = host.report_of(clone).since(mark)  # type: ignore[union-attr]
    assert {row["region"] for row in new["artefacts"]} == {"double_blocks.0"} and not new["eager"], new
    layer.weight = original
    mark = mark_of(clone)
    assert torch.equal(sample(clone), before)
    nothing_new(clone, mark)


# ---- where weights are elsewhere -----------------------------------------------------------------------------


@pytest.mark.large  # test_comfy_loader.py has it for a file with LoRAs
@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("form", ["float8_e4m3fn", "int8_tensorwise", "nvfp4"])
def test_a_model_that_is_loaded_in_part_runs_the_same_artefacts(
    pair: Callable[[str], Pair], form: str, share: float
) -> None:
    patcher, clone = pair(form)
    plain, before, mark = sample(patcher), sample(clone), mark_of(clone)
    unload()
    with loaded_in_part(share):
        assert torch.equal(sample(patcher), plain)
        layers = [m for m in patcher.model.diffusion_model.modules() if getattr(m, "comfy_cast_weights", False)]
        assert any(type(layer.weight).__name__ == "QuantizedTensor" for layer in layers), "none is left to its layer"
        assert distance(sample(clone), plain) < TOLERANCE
        nothing_new(clone, mark)
        for strength in (1.0, 0.5):  # a weight that a LoRA is run over is computed with in full, as in eager
            wanted = sample(with_lora(patcher, strength))
            assert distance(wanted, plain) > MOVES
            assert distance(sample(with_lora(clone, strength)), wanted) < TOLERANCE
            new = host.report_of(clone).since(mark)  # type: ignore[union-attr]
            assert not new["eager"] and bool(new["artefacts"]) == (strength == 1.0), new
            mark = mark_of(clone)
        assert torch.equal(sample(patcher), plain) and distance(sample(clone), plain) < TOLERANCE
        unload()
    mark = mark_of(clone)
    assert torch.equal(sample(clone), before) and torch.equal(sample(patcher), plain)
    nothing_new(clone, mark)


@pytest.mark.parametrize("form", ["float8_e4m3fn", NVFP4])
def test_under_dynamic_vram_the_same_artefacts_run(
    pair: Callable[[str], Pair], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import comfy.utils
    from comfy.model_patcher import LowVramPatch

    patcher, clone = pair(form)
    mark, memory = mark_of(clone), PagedMemory(1 << 22)
    layers = page(patcher, memory, monkeypatch)
    paged = sample(clone)
    assert distance(paged, sample(patcher)) < TOLERANCE and memory.faults >= len(layers) > 20
    for fits in (memory.fits, 0):
        memory.take_away()
        memory.fits = fits
        assert torch.equal(sample(clone), paged) and not +memory.pins, fits
    memory.fits = 1 << 22
    patches = with_lora(patcher, 1.0).patches
    for layer in layers:
        key = f"{layer.seed_key}.weight"
        layer.weight_lowvram_function = LowVramPatch(key, patches) if key in patches else None
        layer._v_signature = None  # as a patcher's load leaves it when its patches changed
    found = sample(clone)
    assert torch.equal(sample(clone), found) and not +memory.pins
    kept = {layer: layer.weight for layer in layers if layer.weight_lowvram_function is not None}
    for layer, weight in kept.items():  # without a GPU eager does not patch: it is given what ComfyUI makes there
        patched = layer.weight_lowvram_function(weight.dequantize())
        words = {"scale": "recalculate", "stochastic_rounding": comfy.utils.string_to_seed(layer.seed_key)}
        # ComfyUI 0.20 has no such method and makes a new one
        again = getattr(weight, "requantize_from_float", None) or functools.partial(
            type(weight).from_float, layout_cls=layer.layout_type
        )
        layer.weight = torch.nn.Parameter(again(patched, **words), requires_grad=False)
    wanted = sample(patcher)
    assert distance(wanted, paged) > MOVES and distance(found, wanted) < TOLERANCE
    for layer in layers:
        layer.weight = kept.get(layer, layer.weight)
        layer.weight_lowvram_function = layer._v_signature = None
    assert torch.equal(sample(clone), paged)
    nothing_new(clone, mark)


# ---- native multiplication -----------------------------------------------------------------------------------


@pytest.fixture
def multiplies(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Size]]:
    """A CPU that multiplies fp8: the one operator that it lacks, computed in full. Gives the shapes it was called with.

    ComfyUI's own code around it runs as on a card, with ComfyUI told that this is one.
    """
    import comfy.model_management

    seen: list[torch.Size] = []

    def multiply(a: Any, b: Any, scale_a: Any, _ra: Any, _sa: Any, scale_b: Any, _rb: Any, _sb: Any, bias: Any,
                 dtype: Any, *_: Any, **__: Any) -> Any:  # fmt: skip
        seen.append(a.shape)
        assert a.dtype == b.dtype == torch.float8_e4m3fn
        product = (a.float() * scale_a[0]) @ (b.float() * scale_b[0])
        return (product if bias is None else product + bias).to(dtype)

    monkeypatch.setattr(comfy.model_management, "supports_fp8_compute", lambda device=None: True)
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_mm_v2", multiply, "CPU")
    yield seen
    library._destroy()


def test_native_fp8_multiplication_has_dynamic_sizes(pair: Callable[[str], Pair], multiplies: list[torch.Size]) -> None:
    patcher, clone = pair("float8_e4m3fn")
    assert not patcher.model.diffusion_model.double_blocks[0].img_mlp[0]._full_precision_mm
    plain, before, mark = sample(patcher), sample(clone), mark_of(clone)
    multiplies.clear()
    for change in CHANGES:
        wanted = sample(patcher, **change)
        eager, shapes = len(multiplies), list(multiplies)
        assert eager > 10 and distance(sample(clone, **change), wanted) < TOLERANCE, change
        assert multiplies[eager:] == shapes, "compiled code multiplies as often, with the same shapes"
        multiplies.clear()
    wanted = sample(with_lora(patcher, 1.0))
    assert distance(wanted, plain) > MOVES
    assert distance(sample(with_lora(clone, 1.0)), wanted) < TOLERANCE
    assert torch.equal(sample(clone), before) and torch.equal(sample(patcher), plain)
    nothing_new(clone, mark)


@pytest.mark.gpu
def test_native_fp8_on_a_card_is_as_near_to_eager_as_attention_kernels_are() -> None:
    """Twice the distance between two eager runs that differ in the attention kernel, in bf16 with fp8 products."""
    card = torch.device("cuda")
    patcher = load(quantised_weights("float8_e4m3fn"), load_device=card)
    if patcher.model.diffusion_model.double_blocks[0].img_mlp[0]._full_precision_mm:
        pytest.skip("this card does not multiply fp8")
    with torch.inference_mode():
        clone = host.attach(patcher, CONFIG)
        for change in ({}, *CHANGES[:2]):
            wanted = sample(patcher, **change)
            noise = noise_floor(patcher, wanted, **change)
            found = distance(sample(clone, **change), wanted)
            assert noise > 0.0 and found <= 2 * noise, (change, found, noise)
        assert not reported(clone)["eager"], reported(clone)["eager"]
        mark = mark_of(clone)
        sample(clone, size=(24, 24))
        nothing_new(clone, mark)


# ---- what does not go ----------------------------------------------------------------------------------------


def test_what_the_machine_cannot_multiply_falls_back_as_in_eager(pair: Callable[[str], Pair]) -> None:
    """Eager tries the multiplication and computes in full where it fails; compiled code cannot try."""
    patcher, clone = pair("float8_e4m3fn")
    before, mark = sample(clone), mark_of(clone)
    block = patcher.model.diffusion_model.double_blocks[0]
    layers = [m for m in block.modules() if hasattr(m, "_full_precision_mm")]
    for layer in layers:
        layer._full_precision_mm = False
    wanted = sample(patcher)
    assert distance(wanted, before) > TOLERANCE, "its inputs are quantised too"
    assert distance(sample(clone), wanted) < TOLERANCE
    found = eager_since(clone, mark)
    if _multiplies_fp8():
        assert not found
        pytest.skip(f"torch {torch.__version__} multiplies fp8 on a CPU, so that nothing has to fall back")
    assert {row["region"] for row in found} == {"double_blocks.0"} and "compiled code failed" in found[0]["reason"], (
        found
    )


def _multiplies_fp8() -> bool:
    from comfy_kitchen.tensor import fp8

    numbers, scale = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(())
    try:
        fp8._fp8_scaled_mm(numbers, numbers.t(), scale, scale, out_dtype=torch.float32)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float16])
def test_plain_weights_stored_narrow_are_cast_as_in_eager(stored: torch.dtype) -> None:
    weights = plain_weights()
    patcher = load({name: weight.to(stored) for name, weight in weights.items()}, dtype=stored)
    assert weight_of(patcher).dtype == stored != patcher.model.get_dtype_inference()
    with graphs_as_they_are():
        clone = host.attach(patcher, CONFIG)
        wanted = sample(patcher)
        if stored == torch.float8_e4m3fn:
            assert distance(wanted, sample(load(weights))) > 10 * TOLERANCE
        assert distance(sample(clone), wanted) < TOLERANCE
        assert not reported(clone)["eager"], reported(clone)["eager"]
        lora = sample(with_lora(patcher, 1.0))
        assert distance(lora, wanted) > MOVES
        before, mark = sample(clone), mark_of(clone)
        assert distance(sample(with_lora(clone, 1.0)), lora) < TOLERANCE
        assert torch.equal(sample(clone), before), "the LoRA is felt after it was taken off"
        assert torch.equal(sample(patcher), wanted), "bypassing the node gives another picture"
        nothing_new(clone, mark)


def test_the_mode_says_where_nothing_is_quantised() -> None:
    config = CompileConfig.parse("quant:O2")
    for weights, told in ((plain_weights(), ["quant"]), (quantised_weights("int8_tensorwise"), [])):
        found = reported(host.attach(load(weights), config))
        assert [row["token"] for row in found["inactive"]] == told
