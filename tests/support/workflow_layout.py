# SPDX-License-Identifier: Apache-2.0
"""Where the nodes of a template stand: so close together that ComfyUI, which shows a whole template, shows it readably.

The front end (1.49 and 1.58) fills three quarters of the window with a template, whatever view its file asks for.
"""

from __future__ import annotations

from typing import Any

from workflow_nodes import KINDS

WIDE, HIGH, GAP, TITLE = 270, 840, 20, 30
NOTE = ([0, 0], [WIDE + 30, 560])
LEFT = WIDE + 30 + GAP
# Shown by their title only: nothing on them is for the user to set.
FOLDED = frozenset({
    *("ModelSamplingSD3", "ModelSamplingAuraFlow", "ConditioningZeroOut", "BasicGuider", "KSamplerSelect"),
    *("FluxKontextImageScale", "FluxKontextMultiReferenceLatentMethod", "ImageScale", "Canny", "VAEEncode"),
    *("LTXVConditioning", "LTXVConcatAVLatent", "LTXVSeparateAVLatent", "LTXVAudioVAELoader", "ManualSigmas"),
    *("VAEDecode", "VAEDecodeTiled", "VAEDecodeAudio", "LTXVAudioVAEDecode", "CreateVideo"),
})  # fmt: skip
# Pixels that a text or a picture on a node takes here.
TALLER = {"SaveImage": 180, "SaveVideo": 150, "LoadImage": 230, "CLIPTextEncode": 80, "TextEncodeQwenImageEditPlus": 80}
TALLER |= {"MiniMaxH3ImageToVideo": 80, "WanImageToVideo": 24}
TALLER |= {"NexfortCompileModel": 100, "NexfortCompileControlNet": 100}


def compact(nodes: list[dict[str, Any]], folded: frozenset[str]) -> dict[int, tuple[list[int], list[int]]]:
    """Position and size of each node: the first column that has room, from that of what the node is linked to on."""
    places: dict[int, tuple[list[int], list[int]]] = {}
    columns: dict[int, int] = {}
    tops: list[int] = []
    for node in sorted(nodes, key=lambda node: (node["column"], node["id"])):
        high = _high(node)
        taken = 0 if node["kind"] in folded else high
        first = max((columns[out.node] for out in node["links"].values()), default=0)
        fits = (one for one in range(first, len(tops)) if tops[one] + taken <= HIGH)
        column = next(fits, len(tops))
        tops += [0] * (column + 1 - len(tops))
        columns[node["id"]] = column
        places[node["id"]] = ([LEFT + column * (WIDE + GAP), tops[column]], [WIDE, high])
        tops[column] += taken + TITLE + GAP // 2
    return places


def seen(nodes: list[dict[str, Any]], folded: frozenset[str]) -> dict[int, tuple[tuple[int, int], tuple[int, int]]]:
    """What is seen of each node, its title too, from the first column on: where it begins and how large it is."""
    found = {}
    for node in nodes:
        (x, y), (wide, high) = compact(nodes, folded)[node["id"]]
        size = (WIDE * 2 // 3, TITLE) if node["kind"] in folded else (wide, high + TITLE)
        found[node["id"]] = ((x - LEFT, y), size)
    return found


def _high(node: dict[str, Any]) -> int:
    kind = KINDS[node["kind"]]
    slots = max(len(kind.sockets), len(kind.outputs))
    return 16 + 20 * slots + 24 * len(node["widgets"]) + TALLER.get(node["kind"], 0)
