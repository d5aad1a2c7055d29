# SPDX-License-Identifier: Apache-2.0
"""The node "Nexfort Compile VAE": widgets and a VAE in, a VAE that runs compiled out.

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
• channels_last (recommended): channels innermost, which NVIDIA's convolutions are made for; a VAE is nearly all
convolutions.
• contiguous_format: rows innermost, as the VAE keeps them.
Change it when a picture decodes slower than without this node."""


class NexfortCompileVAE(io.ComfyNode):
    """A copy of the VAE whose encoder and decoder run compiled."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The node as the front end sees it."""
        return io.Schema(
            node_id="NexfortCompileVAE",
            display_name="Nexfort Compile VAE",
            category=CATEGORY,
            description=(
                "Runs the VAE compiled, in decoding and encoding, whole or tiled. Decoder and encoder are "
                "compiled when each is first used, serve every size after that, and are loaded from disk "
                "after a restart. "
                "The VAE that comes in stays uncompiled for other nodes."
            ),
            search_aliases=["nexfort", "torch compile vae", "speed up vae", "decode faster"],
            inputs=[
                io.Vae.Input("vae", tooltip="The VAE to speed up. It stays as it is; the output is a copy."),
                *shared_inputs(
                    memory_format="channels_last", memory_format_tooltip=MEMORY_FORMAT_TOOLTIP, low_precision=False
                ),
            ],
            outputs=[
                io.Vae.Output(display_name="vae", tooltip="The same VAE, compiled when it first decodes or encodes.")
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
        vae: io.Vae.Type,
        mode: str,
        dynamic: bool,
        memory_format: str,
        options: str = "",
        enabled: bool = True,
        verify: bool = False,
        wait: bool = False,
    ) -> io.NodeOutput:
        """Attach the engine to a copy. Nothing is compiled here: that happens in the first decode."""
        return compiled(vae, _attach, (mode, dynamic, memory_format, options, wait), enabled, verify, cls)


def _attach(vae: Any, config: CompileConfig) -> tuple[Any, Report | None]:
    from nexfort_engine.hosts.comfy import model as comfy

    attached = comfy.attach_vae(vae, config)
    return attached, comfy.report_of(attached)
