# SPDX-License-Identifier: Apache-2.0
"""A pack for tests only: GET /testing/routes lists what the running server answers, as [method, path]."""

from __future__ import annotations

from aiohttp import web
from comfy_api.latest import ComfyExtension, io


async def get_routes(request: web.Request) -> web.Response:
    """Every route, those of other packs too."""
    found = [[route.method, route.resource.canonical] for route in request.app.router.routes() if route.resource]
    return web.json_response(sorted(found))


class RoutesExtension(ComfyExtension):
    """No node, one route."""

    async def on_load(self) -> None:
        """ComfyUI builds its web application after all packs are loaded."""
        from server import PromptServer

        PromptServer.instance.routes.get("/testing/routes")(get_routes)

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """None."""
        return []


async def comfy_entrypoint() -> RoutesExtension:
    """ComfyUI's entry point of a pack."""
    return RoutesExtension()
