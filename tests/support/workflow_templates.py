# SPDX-License-Identifier: Apache-2.0
"""The templates that ComfyUI's template browser shows: `example_workflows/<title>.json` with a picture beside each.

Twelve of what people run, with the files that ComfyUI's own templates name. Those whose family has workflows in
`workflows/` are the same ones, laid out anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import workflow_layout
import workflow_notes
from workflow_families import flux, stable_diffusion, today, today_video, wan, z_image
from workflow_families.family import COMPILED, CONTROLNET, LORA
from workflow_graph import Graph

Build = Callable[[Graph], None]


@dataclass(frozen=True)
class Template:
    """One template. title: its file's name, which is what the browser shows. does: what it is for, on its picture.

    tiny: the row of `served.TINY` with the files that a test runs it on, None where none can be small.
    folded: besides the usual ones, kinds of nodes that are shown by their title only.
    """

    title: str
    does: str
    build: Build
    tiny: str | None
    folded: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name that its results begin with."""
        return self.title.lower().replace(" ", "_")

    def graph(self) -> Graph:
        """The workflow."""
        graph = Graph(self.name, compact=True, folded=workflow_layout.FOLDED.union(self.folded))
        self.build(graph)
        workflow_notes.describe_template(graph, self.title)
        return graph


def _of(build: Callable[[Graph, str], None], flavour: str) -> Build:
    return lambda graph: build(graph, flavour)


# What two networks have twice and nobody sets.
MANY = ("LoraLoaderModelOnly", "CLIPLoader", "VAELoader")
TEMPLATES = (
    Template("Z-Image-Turbo", "text to image, 8 steps", _of(z_image.build, COMPILED), "z_image"),
    Template("Qwen-Image 2512", "text to image, 4 steps", today.qwen_image_2512, "qwen_image"),
    Template("Qwen-Image-Edit 2511", "change a picture, 4 steps", today.qwen_image_edit, "qwen_image_edit"),
    Template("Krea 2 Turbo", "text to image, 8 steps", today.krea2_turbo, "krea2"),
    Template("FLUX.2 Klein 9B", "text to image, 20 steps", today.flux2_klein, "flux2"),
    Template("FLUX.1 dev", "text to image, 20 steps", _of(flux.dev, COMPILED), "flux"),
    Template("SDXL with LoRA", "text to image, 20 steps", _of(stable_diffusion.sdxl, LORA), "sdxl"),
    Template("SDXL with ControlNet", "follows a picture", _of(stable_diffusion.sdxl, CONTROLNET), "sdxl"),
    Template("Wan 2.2 image to video", "two networks, 4 steps", today_video.wan22_i2v, "wan_i2v", MANY),
    Template("Wan 2.2 text to video", "two networks, 4 steps", _of(wan.wan22, LORA), "wan", MANY),
    Template("LTX-2.3 text to video", "with sound, 8 steps", today_video.ltx23, None),
    Template("MiniMax-H3 text to video", "with sound, 6 steps", today_video.minimax_h3, None),
)
