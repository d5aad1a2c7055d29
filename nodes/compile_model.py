# SPDX-License-Identifier: Apache-2.0
"""The node "Nexfort Compile Model": widgets and a model in, a model that runs compiled out.

It only hands over: what is compiled, and when, is the engine's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from comfy_api.latest import io

from .compile_inputs import CATEGORY, check_options, compiled, shared_inputs

if TYPE_CHECKING:
    from nexfort_engine.config.compile_config import CompileConfig
    from nexfort_engine.reporting.report import Report

# The front end's search ranks a name that begins with what is typed first, one that holds it next, and looks at aliases
# last. On the canvas the node is called "Nexfort Compile Model" (web/nexfort.js).
SEARCHED_NAME = "Compile Model (Nexfort: speed, torch compile)"
MEMORY_FORMAT_TOOLTIP = """\
How images lie in memory inside the compiled blocks.
• channels_last (recommended): channels innermost, which NVIDIA's convolutions are made for: less time a step for UNets
such as SDXL's. Transformers (Flux, PixArt, Wan, SD3) have next to no convolutions, and do not care.
• contiguous_format: rows innermost, as the model keeps them.
Change it when a UNet runs slower with this node than without."""


class NexfortCompileModel(io.ComfyNode):
    """A clone of the model whose diffusion network runs compiled."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The node as the front end sees it."""
        return io.Schema(
            node_id="NexfortCompileModel",
            display_name=SEARCHED_NAME,
            category=CATEGORY,
            description=(
                "Runs the diffusion model compiled: the same picture in less time. The first time it is compiled "
                "in the background, and the picture is made uncompiled meanwhile. After that every size, batch and "
                "prompt length runs at full speed. After a restart the compiled code is loaded from disk. "
                "Put it right before the sampler, after LoRA and model-sampling nodes."
            ),
            search_aliases=[
                "nexfort",
                "compile",
                "torch compile",
                "faster",
                "speed",
                "speed up",
                "optimize",
                "performance",
                "accelerate",
                "inductor",
                "onediff",
            ],
            inputs=[
                io.Model.Input("model", tooltip="The model to speed up. It stays as it is; the output is a clone."),
                *shared_inputs(memory_format="channels_last", memory_format_tooltip=MEMORY_FORMAT_TOOLTIP),
            ],
            outputs=[io.Model.Output(display_name="model", tooltip="The same model, compiled when it first samples.")],
            hidden=[io.Hidden.unique_id],
            not_idempotent=True,  # or a node like one that ran before would not run, and nothing would know of it
        )

    @classmethod
    def validate_inputs(cls, options: str | None = "") -> bool | str:
        """Refuse unreadable options before anything is loaded."""
        return check_options(options)

    @classmethod
    def execute(
        cls,
        model: io.Model.Type,
        mode: str,
        dynamic: bool,
        memory_format: str,
        options: str = "",
        enabled: bool = True,
        verify: bool = False,
        wait: bool = False,
    ) -> io.NodeOutput:
        """Attach the engine to a clone. Nothing is compiled here: that happens in the first step."""
        return compiled(model, _attach, (mode, dynamic, memory_format, options, wait), enabled, verify, cls)


def _attach(model: Any, config: CompileConfig) -> tuple[Any, Report | None]:
    from nexfort_engine.hosts.comfy import model as comfy

    attached = comfy.attach(model, config)
    return attached, comfy.report_of(attached)
