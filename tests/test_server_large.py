# SPDX-License-Identifier: Apache-2.0
"""Every shipped workflow that test_server.py leaves out, on a real server, to an image: `make test-large`.

Of SDXL, Qwen-Image and Z-Image ComfyUI knows one width only: their files have that width and as few layers as detection
allows, which still is gigabytes. The files of the others are tiny, and there are many of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import served

from nexfort_engine.cli.comfy_server import ComfyServer

pytestmark = [pytest.mark.comfy, pytest.mark.slow, pytest.mark.large]

FLAVOURS: dict[str, tuple[str, ...]] = {
    "sd15": ("controlnet",),
    "sdxl": ("", "lora", "controlnet", "vae"),
    "sd35": ("", "lora", "controlnet"),
    "pixart": (),
    "flux": ("controlnet", "low_precision"),
    "flux_schnell": ("low_precision",),
    "flux_kontext": ("lora",),
    "qwen_image": ("", "lora", "controlnet", "vae", "low_precision"),
    "z_image": ("", "lora", "low_precision"),
    "wan": ("low_precision",),
    "wan22": ("",),
    "hunyuan_video": ("lora", "vae", "low_precision"),
    "ltxv": ("lora",),
}
NAMES = {
    family: tuple("_".join(filter(None, (family, "compile_model", flavour))) for flavour in flavours)
    for family, flavours in FLAVOURS.items()
}
# What a flavour adds, and the strengths with which it does nothing.
ADDED = {
    "lora": ("LoraLoader", "LoraLoaderModelOnly"),
    "controlnet": ("ControlNetApplyAdvanced",),
}
STRENGTHS = ("strength", "strength_model", "strength_clip")


@pytest.fixture(scope="module")
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A base directory with the files of one family, which go at the end: pytest keeps its directories."""
    family = request.param
    names = dict.fromkeys(
        file for name in (f"{family}_plain", *NAMES[family]) for file in served.tiny_for(name)["files"]
    )
    found = served.base_folder(tmp_path_factory.mktemp(family), served.comfyui_or_skip(), *names)
    served.picture(found)
    yield found
    for path in (found / "models").rglob("tiny_*.safetensors"):
        path.unlink()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One artefact cache for all: schnell and Kontext find what Flux dev left."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def server(base: Path, cache: Path) -> Iterator[ComfyServer]:
    """A server of its own for each family: a model's memory goes with it."""
    with served.server(served.comfyui_or_skip(), base, cache, "--cache-classic") as running:
        yield running


def without(name: str, flavour: str) -> dict[str, object]:
    """The workflow, not compiled, with what its flavour adds at a strength of zero."""
    workflow = served.tiny_workflow(name, compiled=False)
    changed = [node for node in workflow.values() if node["class_type"] in ADDED[flavour]]
    assert changed
    for node in changed:
        node["inputs"] |= {key: 0.0 for key in STRENGTHS if key in node["inputs"]}
    return workflow


@pytest.mark.parametrize(("base", "name"), [(one, f"{one}_plain") for one in NAMES], indirect=["base"], scope="module")
def test_the_plain_workflow_gives_what_one_switched_off_gives(server: ComfyServer, base: Path, name: str) -> None:
    plain = server.run(served.tiny_workflow(name), timeout=600)
    off = name.replace("_plain", "_compile_model")
    wanted = server.run(served.tiny_workflow(off, compiled=False), timeout=600)
    assert numpy.isfinite(served.latent(base, plain)).all()
    assert numpy.array_equal(served.latent(base, plain), served.latent(base, wanted))
    found = served.images(base, plain)
    assert found and all(image.std() > 5 for image in found)
    for image, expected in zip(found, served.images(base, wanted), strict=True):
        assert numpy.array_equal(image, expected)


@pytest.mark.parametrize(
    ("base", "name"), [(one, name) for one in NAMES for name in NAMES[one]], indirect=["base"], scope="module"
)
def test_the_shipped_workflow_gives_the_eager_image(server: ComfyServer, base: Path, name: str) -> None:
    served.compiled_equals_eager(server, base, name, timeout=1200)
    reports = [engine["report"] for engine in server.get("/nexfort/report")["engines"]]
    assert not [report["eager"] for report in reports if report["eager"]]
    if name.endswith("low_precision"):  # which a CPU has not: what is asked for is told, and the picture is eager's
        assert "low precision is not active" in " ".join(note for report in reports for note in report["notes"])
    flavour = name.rsplit("_", 1)[1]
    if flavour in ADDED:
        wanted = served.latent(base, server.run(served.tiny_workflow(name, compiled=False), timeout=600))
        nothing = served.latent(base, server.run(without(name, flavour), timeout=600))
        assert served.distance(nothing, wanted) > 100 * served.TOLERANCE, f"the {flavour} does nothing"
