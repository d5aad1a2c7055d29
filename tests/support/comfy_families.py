# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's other families at tiny sizes, for hosts/test_comfy_families.py, and what of each stays eager and why.

The families that every contract is asked of are in backbones.py. ComfyUI must have been imported before one is made.
"""

from __future__ import annotations

import comfy_image_families
import comfy_other_families
import comfy_video_families

FAMILIES = {
    row.name: row for row in (*comfy_image_families.ROWS, *comfy_video_families.ROWS, *comfy_other_families.ROWS)
}

_BRANCHES = "its code branches on the value of a tensor"
_SIZES = "it was compiled for other sizes"
_HANDED = "is neither data nor a plain value"
# by family: the regions that run eager, as the beginning of their names, and words of the reason that the report gives;
# what can be compiled of their submodules is
FALLS_SHORT: dict[str, dict[str, str]] = {
    "hunyuan3d_21": {"blocks.": _BRANCHES},  # it sends each token to the experts that its weights name
    "ace_step15": {"encoder": _BRANCHES},
    # an object that blocks keep what they computed in, for each other
    "seedvr2": dict.fromkeys(("vid_in", "blocks.", "vid_out"), _HANDED),
    # positions for the largest of three sides: another one may be the largest in a later call
    **{key: {"pos_embedder": _SIZES} for key in ("cosmos2", "cosmos2_per_frame", "anima")},
    **{key: {"pos_embedder": _SIZES, "final_layer": _SIZES} for key in ("cosmos1", "cosmos1_fps")},
    # `range` over a number of pixels
    **{key: {"pixel_blocks.": _SIZES} for key in ("pixeldit", "pid")},
}
