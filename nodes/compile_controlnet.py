# SPDX-License-Identifier: Apache-2.0
"""The node "Nexfort Compile ControlNet": widgets and a control net in, a control net that runs compiled out.

It only hands over: what is compiled, and when, is the engine's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from comfy_api.latest import io

from .compile_inputs import CATEGORY, check_options, compiled, shared_inputs

if TYPE_CHECKING:
    from nexfort_engine.config.compile_config import CompileConfig
    from nexfort_engine.reporting.report import Report

MEMORY_FORMAT_TOOLTIP = """\
How images lie in memory inside the compiled blocks.
• channels_last (recommended): channels innermost, which NVIDIA's convolutions are made for. It matters to control nets
of SD1.5 and SDXL and to T2I adapters; those of transformers (Flux, SD3, Qwen) have few convolutions, and do not care.
• contiguous_format: rows innermost, as the control net keeps them.
Change it when a step takes longer with this node than without."""


class NexfortCompileControlNet(io.ComfyNode):
    """A copy of the control net whose own network runs compiled."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The node as the front end sees it."""
        return io.Schema(
            node_id="NexfortCompileControlNet",
            display_name="Nexfort Compile ControlNet",
            category=CATEGORY,
            description=(
                "Runs the control net's own network compiled: the same picture in less time. The first time it "
                "is compiled in the background, and runs uncompiled meanwhile. After that every size, batch and hint "
                "runs the same compiled code. After a restart it is loaded from disk. "
                "Put it right behind the loader. The control net that comes in stays uncompiled for other nodes."
            ),
            search_aliases=[
                "nexfort",
                "torch compile controlnet",
                "speed up controlnet",
                "t2i adapter",
                "control lora",
            ],
            inputs=[
                io.ControlNet.Input(
                    "control_net",
                    tooltip="The control net, T2I adapter or control LoRA to speed up. It stays as it is; the output "
                    "is a copy.",
                ),
                *shared_inputs(memory_format="channels_last", memory_format_tooltip=MEMORY_FORMAT_TOOLTIP),
            ],
            outputs=[
                io.ControlNet.Output(
                    display_name="control_net", tooltip="The same control net, compiled in the first step it acts in."
                )
            ],
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
        control_net: io.ControlNet.Type,
        mode: str,
        dynamic: bool,
        memory_format: str,
        options: str = "",
        enabled: bool = True,
        verify: bool = False,
        wait: bool = False,
    ) -> io.NodeOutput:
        """Attach the engine to a copy. Nothing is compiled here: that happens in the first step."""
        return compiled(control_net, _attach, (mode, dynamic, memory_format, options, wait), enabled, verify, cls)


def _attach(control_net: Any, config: CompileConfig) -> tuple[Any, Report | None]:
    from nexfort_engine.hosts.comfy import controlnet

    attached = controlnet.attach_control(control_net, config)
    return attached, controlnet.report_of(attached)
