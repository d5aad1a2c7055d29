# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's entry to Nexfort: the node list and the web directory, and nothing else.

Imported without ComfyUI it does nothing. The engine is a package of its own: it needs neither this file nor
ComfyUI.
"""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("comfy_api") is not None:
    if importlib.util.find_spec("nexfort_engine") is None:
        # Behind everything else: ComfyUI has a module `nodes` too, and its own must be the one that is found.
        sys.path.append(str(Path(__file__).resolve().parent))

    from .nodes import comfy_entrypoint

    WEB_DIRECTORY = "./web"

    __all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]
