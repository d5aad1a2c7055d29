# SPDX-License-Identifier: Apache-2.0
"""`compile_pipe` on diffusers' own pipelines with random weights: same image, and the pipeline given stays itself."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from large_rows import few
from pretended_gpu import norms_as_on_a_gpu
from subjects import graphs_as_they_are

import nexfort_engine
from nexfort_engine.api import CompiledModule
from nexfort_engine.cache.store import Store
from nexfort_engine.compilation import builder as builds
from nexfort_engine.compilation import load_ahead

diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.usefixtures("threads", "artefact_cache")
TOLERANCE = 1e-3  # of the picture after a few steps and the VAE, in fp32
MOVES = 100 * TOLERANCE


@pytest.fixture(autouse=True)
def _graphs() -> Iterator[None]:
    """How graphs are lowered is tested with the demo's pipeline and with the networks by themselves."""
    with graphs_as_they_are():
        yield


def pipeline() -> Any:
    """A Stable Diffusion pipeline without text encoder: one level with attention, one without."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        unet = diffusers.UNet2DConditionModel(
            sample_size=8, in_channels=4, out_channels=4, block_out_channels=(16,), norm_num_groups=4,
            down_block_types=("CrossAttnDownBlock2D",), up_block_types=("CrossAttnUpBlock2D",), layers_per_block=1,
            cross_attention_dim=16, attention_head_dim=8,
        )  # fmt: skip
        vae = diffusers.AutoencoderKL(
            latent_channels=4, block_out_channels=(16, 16), norm_num_groups=4, sample_size=16, layers_per_block=1,
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        )  # fmt: skip
    scheduler = diffusers.DDIMScheduler(steps_offset=1, clip_sample=False)
    pipe = diffusers.StableDiffusionPipeline(
        vae=vae.eval(), unet=unet.eval(), scheduler=scheduler, text_encoder=None, tokenizer=None,
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe


def image(pipe: Any, *, prompt: int = 0, size: tuple[int, int] = (16, 16), count: int = 1) -> torch.Tensor:
    """Pictures of two steps with guidance, as a tensor."""
    words = torch.Generator().manual_seed(10 + prompt)
    embeds = [torch.randn(1, 12, 16, generator=words) for _ in range(2)]
    return pipe(
        prompt_embeds=embeds[0], negative_prompt_embeds=embeds[1], height=size[0], width=size[1], output_type="pt",
        num_inference_steps=2, num_images_per_prompt=count, generator=torch.Generator().manual_seed(7),
    ).images  # fmt: skip


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def assert_only(pipe: Any, *names: str) -> None:
    """Exactly these parts of it are compiled."""
    parts = {"unet": pipe.unet, "vae.decoder": pipe.vae.decoder, "vae.encoder": pipe.vae.encoder, "vae": pipe.vae}
    assert {name for name, part in parts.items() if isinstance(part, CompiledModule)} == set(names)


@pytest.mark.slow
def test_the_image_is_eager_s_at_any_size_and_nothing_new_is_compiled() -> None:
    pipe = pipeline()
    wanted = image(pipe)
    assert distance(image(pipe, prompt=1), wanted) > TOLERANCE
    compiled = nexfort_engine.compile_pipe(pipe)
    assert type(compiled).__name__ == "StableDiffusionPipeline" and isinstance(compiled, type(pipe))
    assert_only(compiled, "unet", "vae.decoder", "vae.encoder")
    first = image(compiled)
    assert distance(first, wanted) < TOLERANCE
    assert set(compiled.reports) == {"unet", "vae.decoder", "vae.encoder"}
    for part in ("unet", "vae.decoder"):
        found = compiled.reports[part].as_dict()
        assert found["regions"] and not found["eager"], (part, found["eager"])
        assert found["calls"] == (2 if part == "unet" else 1)
    marks = {part: report.mark() for part, report in compiled.reports.items()}
    assert torch.equal(image(compiled), first)
    for call in ({"size": (24, 16)}, {"size": (16, 32), "prompt": 1}, {"count": 2}):
        assert distance(image(compiled, **call), image(pipe, **call)) < TOLERANCE, call
    for part, report in compiled.reports.items():
        new = report.since(marks[part])
        assert not new["artefacts"] and not new["variants"] and not new["eager"], part


@pytest.mark.slow
def test_the_pipeline_given_stays_itself() -> None:
    pipe = pipeline()
    wanted, kind, parts = image(pipe), type(pipe), dict(pipe.components)
    keys = {name: list(getattr(pipe, name).state_dict()) for name in ("unet", "vae")}
    compiled = nexfort_engine.compile_pipe(pipe)
    image(compiled)
    assert compiled.uncompiled() is pipe and type(pipe) is kind and not hasattr(pipe, "reports")
    assert all(pipe.components[name] is part for name, part in parts.items())
    assert_only(pipe)
    assert torch.equal(image(compiled.uncompiled()), wanted)
    for name, before in keys.items():
        assert list(getattr(pipe, name).state_dict()) == before == list(getattr(compiled, name).state_dict())
    weights = zip(compiled.unet.parameters(), pipe.unet.parameters(), strict=True)
    assert all(ours is theirs for ours, theirs in weights)
    assert compiled.vae.decoder.uncompiled() is pipe.vae.decoder
    assert set(compiled.components) == set(pipe.components)


@pytest.mark.parametrize(
    ("ignores", "left"),
    [
        (("vae",), ("unet",)),
        (("vae.encoder",), ("unet", "vae.decoder")),
        (["unet"], ("vae.decoder", "vae.encoder")),
        (iter(["unet", "vae.decoder"]), ("vae.encoder",)),
        ((), ("unet", "vae.decoder", "vae.encoder")),
    ],
)
def test_ignored_parts_are_left_alone(ignores: Any, left: tuple[str, ...]) -> None:
    pipe = pipeline()
    compiled = nexfort_engine.compile_pipe(pipe, ignores=ignores)
    assert set(compiled.reports) == set(left)
    assert_only(compiled, *left)
    assert_only(pipe)


def test_ignoring_everything_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"StableDiffusionPipeline was given.*expected at least one that is not ignored"
    ):
        nexfort_engine.compile_pipe(pipeline(), ignores=("unet", "vae"))


@pytest.mark.slow
def test_fused_projections_give_the_same_image() -> None:
    pipe = pipeline()
    wanted = image(pipe)
    compiled = nexfort_engine.compile_pipe(pipe, fuse_qkv_projections=True, ignores=("vae",))
    assert any(getattr(module, "fused_projections", False) for module in compiled.unet.modules())
    assert distance(image(compiled), wanted) < TOLERANCE
    assert distance(image(pipe), wanted) < TOLERANCE
    assert not compiled.reports["unet"].as_dict()["eager"]


def test_compiling_again_compiles_the_original() -> None:
    pipe = pipeline()
    once = nexfort_engine.compile_pipe(pipe, ignores=("vae",))
    twice = nexfort_engine.compile_pipe(once, options={"mode": "jit"}, ignores=("unet",))
    assert twice.uncompiled() is pipe and type(twice).__mro__[1] is type(pipe)
    assert_only(twice, "vae.decoder", "vae.encoder")
    assert_only(once, "unet")
    assert twice.reports["vae.decoder"].as_dict()["config"]["mode"] == "jit"


def test_disabled_it_is_a_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEXFORT_DISABLE", "1")
    pipe = pipeline()
    compiled = nexfort_engine.compile_pipe(pipe)
    assert torch.equal(image(compiled), image(pipe))
    for report in compiled.reports.values():
        found = report.as_dict()
        assert not found["regions"] and not found["artefacts"] and not found["eager"]


@pytest.mark.slow
def test_a_vae_s_round_trip_is_eager_s() -> None:
    pipe = pipeline()
    compiled = nexfort_engine.compile_pipe(pipe, ignores=("unet",))
    picture = torch.randn(1, 3, 32, 24, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted = pipe.vae.encode(picture).latent_dist.mean
        found = compiled.vae.encode(picture).latent_dist.mean
        assert distance(found, wanted) < 1e-4
        assert distance(compiled.vae.decode(wanted).sample, pipe.vae.decode(wanted).sample) < 1e-4
    for report in compiled.reports.values():
        assert report.as_dict()["regions"] and not report.as_dict()["eager"]


def deep_pipeline() -> Any:
    """One whose UNet halves the sides once: odd latents are upsampled to sizes that are no double."""
    from benchmarks.random_pipelines import build

    pipe = build("tiny:sd21", torch.device("cpu"), torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def picture(pipe: Any, size: tuple[int, int]) -> torch.Tensor:
    return pipe(
        "a cat", height=size[0], width=size[1], num_inference_steps=2, output_type="pt",
        generator=torch.Generator().manual_seed(7),
    ).images  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "first", [pytest.param((64, 64), id="even"), pytest.param((72, 56), id="odd", marks=pytest.mark.large)]
)
@pytest.mark.large  # test_diffusers_quantize.py has such sides after even ones
def test_sides_that_cannot_be_halved_compile_nothing_after_those_that_can_nor_the_reverse(
    first: tuple[int, int],
) -> None:
    pytest.importorskip("transformers")
    pipe = deep_pipeline()
    compiled = nexfort_engine.compile_pipe(pipe, ignores=("vae",))
    assert distance(picture(compiled, first), picture(pipe, first)) < TOLERANCE
    mark = compiled.reports["unet"].mark()
    for size in ((72, 56), (64, 96), (88, 104), (64, 72), (128, 128)):
        assert distance(picture(compiled, size), picture(pipe, size)) < TOLERANCE, size
    new = compiled.reports["unet"].since(mark)
    assert not new["variants"] and not new["eager"]
    assert not new["artefacts_compiled"]


def _cold(compiled: Any) -> Any:
    """A pipeline whose UNet and decoder have a store of their own each."""
    for part in (compiled.unet, compiled.vae.decoder):
        _with_empty_store(part)
    return compiled


def _with_empty_store(part: Any) -> None:
    load_ahead.finish(lambda: None)
    state = part._nexfort_engine.state
    state.store = Store(tempfile.mkdtemp(prefix="nexfort-cold-"))
    state.known.artefacts.clear()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sdxl", pytest.param("sd21", marks=pytest.mark.large)])
def test_a_part_is_compiled_in_one_batch_and_nothing_after_it(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a GPU's group norms leave images in another layout, and blocks differ in nothing but `1` and `1.0`."""
    pytest.importorskip("transformers")
    from benchmarks.random_pipelines import RECIPES, build

    norms_as_on_a_gpu(monkeypatch)
    monkeypatch.setitem(RECIPES[family].parts["unet"].tiny, "layers_per_block", 2)  # has one like the middle's
    pipe = build(f"tiny:{family}", torch.device("cpu"), torch.float32)
    pipe.set_progress_bar_config(disable=True)
    assert type(pipe.unet.mid_block.resnets[0].output_scale_factor) is int
    batches, lower_all = [], builds.lower_all
    monkeypatch.setattr(builds, "lower_all", lambda jobs, *a: batches.append(jobs) or lower_all(jobs, *a))
    compiled = _cold(nexfort_engine.compile_pipe(pipe, options={"memory_format": "channels_last"}))
    assert distance(picture(compiled, (64, 64)), picture(pipe, (64, 64))) < TOLERANCE
    assert len(batches) == 1, [[job.name for job in jobs] for jobs in batches]
    for part in ("unet", "vae.decoder"):
        report = compiled.reports[part].as_dict()
        assert report["artefacts_compiled"] and not report["eager"] and not report["variants"]


@pytest.fixture
def expected(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was found to be needed for calls still to come, as tuples of a structure's key and the weights' dtypes."""
    found: list[Any] = []
    expecting = builds.Builder.expecting

    def noted(builder: Any, *args: Any) -> Any:
        dtypes = {p.dtype for p in builder.state.root.parameters()}
        jobs = expecting(builder, *args)
        found.extend((job.primary, dtypes) for job in jobs)
        return jobs

    monkeypatch.setattr(builds.Builder, "expecting", noted)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype", "cancelled"),
    [
        pytest.param("sdxl", torch.float32, False, marks=pytest.mark.large),
        pytest.param("sdxl", torch.float32, True, marks=pytest.mark.large),
        pytest.param("sd21", torch.float16, False, marks=pytest.mark.large),
    ],
)
def test_a_vae_of_float16_is_made_ready_for_what_it_decodes_in(
    family: str, dtype: torch.dtype, cancelled: bool, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All say of themselves that they are to be brought to float32; StableDiffusionPipeline does not ask."""
    pytest.importorskip("transformers")
    from benchmarks.random_pipelines import build

    norms_as_on_a_gpu(monkeypatch)
    pipe = build(f"tiny:{family}", torch.device("cpu"), torch.float16)
    pipe.set_progress_bar_config(disable=True)
    compiled = _cold(nexfort_engine.compile_pipe(pipe, options={"memory_format": "channels_last"}))
    engine = compiled.vae.decoder._nexfort_engine
    if cancelled:
        observe = engine.builder.planner._observe

        def stopped(*args: Any) -> Any:
            observe(*args)
            raise KeyboardInterrupt

        engine.builder.planner._observe = stopped
        with pytest.raises(KeyboardInterrupt):
            picture(compiled, (64, 64))
        assert {p.dtype for p in pipe.vae.parameters()} == {torch.float16}
        engine.builder.planner._observe = observe
    assert distance(picture(compiled, (64, 64)), picture(pipe, (64, 64))) < 0.01
    assert {p.dtype for p in pipe.vae.parameters()} == {torch.float16}
    report = compiled.reports["vae.decoder"].as_dict()
    assert report["artefacts_compiled"] and not report["eager"] and report["calls"] == 1
    if not cancelled:  # otherwise the UNet had all it needs, and the decoder's own call made the rest
        assert len(expected) > 5 and all(dtypes == {dtype} for _, dtypes in expected)
        bound = {binding.artefact.primary for region in engine.regions for binding in region.bindings}
        assert bound == {key for key, _ in expected}, "and it is called so"


def _exchanged(compiled: Any) -> None:
    compiled.vae = diffusers.AutoencoderTiny(
        encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8), num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
    ).eval()  # fmt: skip


@pytest.mark.parametrize(
    "change",
    few(
        {
            "tiled": lambda compiled: compiled.uncompiled().vae.enable_tiling(),
            "tiled as compiled": lambda compiled: compiled.vae.enable_tiling(),
            "in slices": lambda compiled: compiled.vae.enable_slicing(),
            "gone": lambda compiled: setattr(compiled.uncompiled(), "vae", None),
            "exchanged": _exchanged,
        },
        [],
    ),
)
def test_a_decoder_is_left_to_its_own_call_where_that_differs(change: Any, expected: list[Any]) -> None:
    compiled = _cold(nexfort_engine.compile_pipe(pipeline()))
    change(compiled)
    assert image(compiled).isfinite().all()
    assert not expected
    assert not compiled.reports["unet"].as_dict()["notes"]


@pytest.mark.large  # costs time and changes no result
def test_a_step_does_not_fail_by_what_is_still_to_come() -> None:
    compiled = _cold(nexfort_engine.compile_pipe(pipeline()))

    def broken(*_: Any) -> Any:
        raise OSError("no such thing")

    compiled.vae.decoder._nexfort_engine.stored = broken
    assert image(compiled).isfinite().all()
    assert any("no such thing" in note for note in compiled.reports["unet"].as_dict()["notes"])
    assert compiled.reports["vae.decoder"].as_dict()["artefacts_compiled"]


def test_what_is_stored_for_a_decoder_is_not_planned(expected: list[Any]) -> None:
    """That it is planned otherwise is shown above."""
    pipe = pipeline()
    image(nexfort_engine.compile_pipe(pipe))
    expected.clear()
    compiled = nexfort_engine.compile_pipe(pipe)
    _with_empty_store(compiled.unet)
    decoded: list[Any] = []
    decode = pipe.vae.decode
    pipe.vae.decode = lambda *args, **words: decoded.append(args) or decode(*args, **words)
    image(compiled)
    assert not expected and not decoded


@pytest.mark.large  # costs time and changes no result
def test_a_network_that_takes_no_other_sides_is_planned_all_the_same() -> None:
    pytest.importorskip("transformers")
    pipe, seen = deep_pipeline(), []

    class OfOneSize(diffusers.UNet2DConditionModel):
        def forward(self, sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            seen.append(tuple(sample.shape[-2:]))
            if seen[-1] != (8, 8):
                raise RuntimeError("not of this size")
            return super().forward(sample, *args, **kwargs)

    pipe.unet.__class__ = OfOneSize
    compiled = nexfort_engine.compile_pipe(pipe, ignores=("vae",))
    _with_empty_store(compiled.unet)
    assert picture(compiled, (64, 64)).isfinite().all()
    assert len(set(seen)) == 2, "the other sides were tried"
    report = compiled.reports["unet"].as_dict()
    assert report["artefacts_compiled"] and not report["eager"]
    assert any("planning ahead for other sizes failed (RuntimeError: not of this size)" in n for n in report["notes"])
