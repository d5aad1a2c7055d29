# SPDX-License-Identifier: Apache-2.0
"""What most people run now, through ComfyUI's own code: nothing eager, nothing compiled after the first call.

Half of them run int8 with turned columns, a third fp8, a few steps at CFG 1; videos with sound have two times a step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from card_memory import PagedMemory, page
from inputs import tensors_of
from patchers import CONFIG, TOLERANCE
from patchers import distance as far
from quantised import load
from subjects import distance, graphs_as_they_are
from today_models import Call, h3, h3_call, quantised, wan_weights

import nexfort_engine
from nexfort_engine.hosts.comfy import model as host

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("comfyui", "artefact_cache")]
large = functools.partial(pytest.param, marks=pytest.mark.large)


@pytest.fixture(autouse=True)
def uncompiled(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path / "store"))
    with graphs_as_they_are(), torch.inference_mode():
        yield


def walk(module: Any, other: Any, calls: list[Call], first: int = 1) -> dict[str, Any]:
    """Compare eager and compiled over calls; `first`: after so many nothing more is compiled. The report at the end."""
    compiled = nexfort_engine.compile(module)
    results, made = [], []
    for call in calls:
        (args, options), (again, more) = call(), call()
        wanted = tensors_of(other(*args, **options))
        assert distance(tensors_of(compiled(*again, **more)), wanted) < TOLERANCE
        results.append(wanted)
        made.append(compiled.report.as_dict()["artefacts_compiled"])
    assert distance(results[1], results[0]) > 10 * TOLERANCE, "the calls do not differ"
    report: dict[str, Any] = compiled.report.as_dict()
    assert not report["eager"], report["eager"]
    assert made[first - 1] == made[-1], made
    return report


# ---- videos with sound ----------------------------------------------------------------------------------------------

SCHEDULE = [
    {"sigma": 1.0}, {"sigma": 1.0, "seed": 2}, {"sigma": 0.9}, {"sigma": 0.5}, {"sigma": 1.0, "size": (12, 8)},
    {"sigma": 0.8, "size": (12, 8)},
]  # fmt: skip
SIZES = [
    {}, {"seed": 1}, {"sigma": 0.3}, {"size": (8, 12)}, {"frames": 4, "size": (12, 8)}, {"size": (9, 11)},
    {"sound": 11}, {"length": 20}, {"frames": 5, "size": (10, 14), "sound": 9, "length": 31, "sigma": 0.1},
]  # fmt: skip


def half(frames: int, height: int, width: int) -> torch.Tensor:
    return torch.full((1, 1, frames, height, width), 0.5)


def levels(frames: int, height: int, width: int) -> torch.Tensor:
    found = torch.ones(1, 1, frames, height, width)
    found[:, :, 0], found[..., : width // 2] = 0.0, 0.5
    return found


@pytest.mark.parametrize(
    ("form", "calls", "first"),
    [
        pytest.param(None, SCHEDULE, 3, id="one time in the first step and two in the next"),
        large("int8_convrot", SIZES, 1, id="sizes in int8"),
        large(None, SIZES, 1, id="sizes"),
        large(None, [{**row, "keyframe": True} for row in SCHEDULE], 1, id="a keyframe"),
        large(None, [{}, {"mask": half}, {"mask": levels}, {"mask": levels, "size": (12, 8)}, {}], 3, id="masks"),
    ],
)
def test_a_video_with_sound(form: str | None, calls: list[dict[str, Any]], first: int) -> None:
    walk(h3(form), h3(form), [h3_call(**row) for row in calls], first)


# ---- quantised files through the loader -----------------------------------------------------------------------------

STEPS: list[dict[str, Any]] = [{}, {"seed": 1, "prompt": 1}, {"size": (12, 8)}, {"batch": 2}, {"length": 20}]


def sample(patcher: Any, *, size: tuple[int, int] = (8, 8), batch: int = 1, length: int = 16, **more: Any) -> Any:
    noise_seed, prompt = more.get("seed", 0), more.get("prompt", 0)
    import comfy.sample

    noise = torch.randn(batch, 16, 3, *size, generator=torch.Generator().manual_seed(noise_seed))
    words = torch.randn(1, length, 4096, generator=torch.Generator().manual_seed(100 + prompt))
    given = [[words, {}]]
    return comfy.sample.sample(
        patcher, noise, 2, 1.0, "euler", "simple", given, given, torch.zeros_like(noise), disable_pbar=True, seed=1
    ).clone()  # fmt: skip


def with_lora(patcher: Any, strength: float) -> Any:
    clone = patcher.clone()
    generator = torch.Generator().manual_seed(3)
    patches = {
        f"diffusion_model.{name}": (0.05 * torch.randn(weight.shape, generator=generator),)
        for name, weight in wan_weights().items()
        if "blocks" in name and name.endswith("weight") and weight.ndim == 2
    }
    assert len(clone.add_patches(patches, strength)) == len(patches) > 4
    return clone


def compared(patcher: Any, clone: Any, rows: list[dict[str, Any]]) -> int:
    """Each picture by both is the same; how many artefacts were made after the first."""
    made = []
    for row in rows:
        assert far(sample(clone, **row), sample(patcher, **row)) < TOLERANCE, row
        made.append(host.report_of(clone).as_dict()["artefacts_compiled"])
    assert not host.report_of(clone).as_dict()["eager"], host.report_of(clone).as_dict()["eager"]
    return made[-1] - made[0]


@pytest.mark.parametrize("form", ["int8_convrot", large("int8_tensorwise"), large("float8_e4m3fn")])
def test_a_quantised_video_model(form: str) -> None:
    patcher = load(quantised(wan_weights(), lambda name: "blocks." in name, form))
    clone = host.attach(patcher, CONFIG)
    assert compared(patcher, clone, STEPS) == 0
    mark = host.report_of(clone).mark()
    for strength in (1.0, 0.5):
        assert far(sample(with_lora(clone, strength)), sample(with_lora(patcher, strength))) < TOLERANCE
    assert not host.report_of(clone).since(mark)["eager"] and not host.report_of(clone).since(mark)["artefacts"]


@pytest.mark.parametrize("computing", [torch.float16, large(torch.bfloat16)], ids=str)
@pytest.mark.parametrize("paged", [False, True])
def test_layers_that_compute_in_more_than_the_model(
    computing: torch.dtype, paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wan's first layer is wider, and gets a float32 input: ComfyUI casts weights to what a layer is given."""
    import comfy.model_management as management

    for name in ("unet_dtype", "unet_manual_cast"):
        monkeypatch.setattr(management, name, lambda *args, **kwargs: computing)
    weights = {name: weight.half() for name, weight in wan_weights().items()}
    patcher = load(quantised(weights, lambda name: "blocks." in name, "float8_e4m3fn"))
    first = patcher.model.diffusion_model.patch_embedding
    assert first.weight.dtype == torch.float32 and patcher.model.manual_cast_dtype == computing
    wanted = sample(patcher)
    if paged:
        page(patcher, PagedMemory(1 << 24), monkeypatch)
    clone = host.attach(patcher, CONFIG)
    assert far(sample(clone), wanted) < 1e-2 if paged else far(sample(clone), wanted) == 0
    assert not host.report_of(clone).as_dict()["eager"], host.report_of(clone).as_dict()["eager"]
