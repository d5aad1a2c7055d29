# SPDX-License-Identifier: Apache-2.0
"""The node list for ComfyUI, and the moment the HTTP routes and replacements are registered. No node lives here."""

from __future__ import annotations

import logging

from comfy_api.latest import ComfyExtension, io

from .cache_manager import NexfortCacheManager
from .compile_controlnet import NexfortCompileControlNet
from .compile_inputs import import_at_start
from .compile_model import NexfortCompileModel
from .compile_vae import NexfortCompileVAE
from .replacements import register_replacements
from .routes import register_routes

log = logging.getLogger("nexfort")

NODES: list[type[io.ComfyNode]] = [
    NexfortCompileModel,
    NexfortCompileVAE,
    NexfortCompileControlNet,
    NexfortCacheManager,
]


class NexfortExtension(ComfyExtension):
    """What ComfyUI asks a pack for: its nodes, and a hook that runs once when the pack is loaded."""

    async def on_load(self) -> None:
        """Register routes and replacements. ComfyUI builds its web application after all packs are loaded."""
        if register_routes():
            import_at_start()
            try:
                await register_replacements()
            except Exception:  # an interface of ComfyUI's that is young; our nodes do without it
                log.warning("Nexfort: old compile nodes are not offered as replaceable", exc_info=True)

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """The nodes of this pack, in the order of the menu."""
        return list(NODES)


async def comfy_entrypoint() -> NexfortExtension:
    """ComfyUI's entry point of a pack."""
    return NexfortExtension()
