# SPDX-License-Identifier: Apache-2.0
"""The templates on a real server, with tiny files, to an image or a video: compiled against not compiled.

Those that are a workflow of `workflows/`, laid out anew, run in test_server.py and test_server_large.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import served
import sounding_templates
import workflow_source
from workflow_templates import TEMPLATES, Template

from nexfort_engine.cli.comfy_server import ComfyServer

pytestmark = [pytest.mark.comfy, pytest.mark.slow]

# Whose files cannot be tiny: testing nodes stand for network, text encoder and decoders.
NEVER_TINY = set(sounding_templates.FAMILY)
ALSO_WORKFLOWS = {
    "Z-Image-Turbo": "z_image_compile_model",
    "FLUX.1 dev": "flux_compile_model",
    "SDXL with LoRA": "sdxl_compile_model_lora",
    "SDXL with ControlNet": "sdxl_compile_model_controlnet",
    "Wan 2.2 text to video": "wan22_compile_model_lora",
}
HERE = [one for one in TEMPLATES if one.title not in {*NEVER_TINY, *ALSO_WORKFLOWS}]


def test_each_template_runs_in_some_test() -> None:
    built = workflow_source.build_all()
    for title, name in ALSO_WORKFLOWS.items():
        (template,) = (one for one in TEMPLATES if one.title == title)
        nodes, others = template.graph().nodes, built[name].nodes
        saving = "filename_prefix"
        assert [{**node["widgets"], saving: ""} for node in nodes] == [
            {**node["widgets"], saving: ""} for node in others
        ]
        assert [(node["kind"], node["links"]) for node in nodes] == [(node["kind"], node["links"]) for node in others]
    assert {one.title for one in TEMPLATES if one.tiny is None} == NEVER_TINY


@pytest.fixture(scope="module")
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A base directory with the files of one template, which go at the end: pytest keeps its directories."""
    template: Template = request.param
    comfyui = served.comfyui_or_skip()
    found = served.base_folder(tmp_path_factory.mktemp("template"), comfyui, *served.TINY[str(template.tiny)]["files"])
    served.picture(found)
    yield found
    for path in (found / "models").rglob("tiny_*.safetensors"):
        path.unlink()


@pytest.fixture(scope="module")
def server(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    """A server of its own for each: a model's memory goes with it."""
    with served.server(served.comfyui_or_skip(), base, tmp_path_factory.mktemp("cache"), "--cache-classic") as running:
        yield running


@pytest.mark.large  # in test_server.py is FLUX.1 dev, which is a template too
@pytest.mark.parametrize(
    ("base", "template"),
    [pytest.param(one, one, id=one.title) for one in HERE],
    indirect=["base"],
    scope="module",
)
def test_the_template_gives_the_uncompiled_picture(server: ComfyServer, base: Path, template: Template) -> None:
    made = [
        served.tiny_template(template, compiled=False),
        served.tiny_template(template, compiled=False, seed=4),
        served.tiny_template(template),
    ]
    served.same_picture(server, base, made, timeout=1200)
    reports = [engine["report"] for engine in server.get("/nexfort/report")["engines"]]
    assert not [report["eager"] for report in reports if report["eager"]]


@pytest.fixture(scope="module")
def plain_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base directory with the testing nodes and no file."""
    return served.base_folder(tmp_path_factory.mktemp("sounding"), served.comfyui_or_skip())


@pytest.mark.parametrize("title", [pytest.param(title, marks=pytest.mark.large) for title in sorted(NEVER_TINY)])
def test_a_template_with_sound_gives_the_uncompiled_video(
    plain_base: Path, tmp_path_factory: pytest.TempPathFactory, title: str
) -> None:
    comfyui, cache = served.comfyui_or_skip(), tmp_path_factory.mktemp("cache")
    with served.server(comfyui, plain_base, cache, "--cache-classic") as running:
        ways = ({"compiled": False}, {"compiled": False, "seed": 4}, {})
        runs = [running.run(sounding_templates.made(title, **way), timeout=1200) for way in ways]
        wanted, other, ours = (served.images(plain_base, run) for run in runs)
        assert len(wanted) > 0 and all(frame.std() > 5 for frame in wanted)
        assert abs(wanted[0] - other[0]).max() > 5, "the seed matters"
        for frame, expected in zip(ours, wanted, strict=True):
            assert abs(frame - expected).max() <= 1
        (saved,) = [
            one
            for run in runs[-1:]
            for out in run["outputs"].values()
            for one in out.get("images", [])
            if one["filename"].endswith(".mp4")
        ]
        assert (plain_base / "output" / saved["subfolder"] / saved["filename"]).stat().st_size > 0
        (report,) = [engine["report"] for engine in running.get("/nexfort/report")["engines"] if engine["nodes"]]
        assert report["artefacts_compiled"] > 0 and not report["eager"]
