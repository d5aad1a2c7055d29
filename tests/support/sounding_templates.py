# SPDX-License-Identifier: Apache-2.0
"""Templates of videos with sound, whose files cannot be tiny, cut to what runs in a test through `/prompt`.

Networks, text encoders and decoders are the testing nodes'; all between is the template's own, the compile node,
guider, sampler and the video that is saved among it. No test lives here.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

from workflow_templates import TEMPLATES

Api = dict[str, dict[str, Any]]
FAMILY = {"LTX-2.3 text to video": "ltx_sound", "MiniMax-H3 text to video": "h3"}
WORDS = {"LTX-2.3 text to video": 128, "MiniMax-H3 text to video": 64}  # widths of what the networks are given
SIZE = {"width": 128, "height": 64}
SMALL = {"steps": 2, "frames_number": 9, "sigmas": "1.0, 0.7, 0.0"}
LENGTH = {"LTX-2.3 text to video": 9, "MiniMax-H3 text to video": 5}
GONE = ("LTXAVTextEncoderLoader", "LTXVAudioVAELoader", "CLIPLoader", "VAELoader")


def made(title: str, *, compiled: bool = True, seed: int = 3) -> Api:
    """The template as it is queued."""
    (template,) = (one for one in TEMPLATES if one.title == title)
    workflow: Api = template.graph().api()
    for number in list(workflow):
        node = workflow[number]
        inputs = node["inputs"]
        small = {**SIZE, **SMALL, "length": LENGTH[title]}
        inputs |= {key: value for key, value in small.items() if key in inputs and not isinstance(inputs[key], list)}
        inputs |= {"noise_seed": seed} if "noise_seed" in inputs else {}
        if node["class_type"] == "NexfortCompileModel":
            inputs["enabled"] = compiled
        elif node["class_type"] in GONE:
            del workflow[number]
        elif node["class_type"] in INSTEAD:
            workflow |= INSTEAD[node["class_type"]](number, inputs, title)
        elif node["class_type"] == "LoraLoaderModelOnly":
            _pass_by(workflow, number)
        elif node["class_type"] == "CreateVideo":
            saving = {"images": inputs["images"], "filename_prefix": f"frames/{template.name}"}
            workflow["frames"] = {"class_type": "SaveImage", "inputs": saving}
    for node in workflow.values():  # what had two outputs is two nodes now
        for name, value in node["inputs"].items():
            if isinstance(value, list) and value[1] == 1 and f"{value[0]}latent" in workflow:
                node["inputs"][name] = [f"{value[0]}latent", 0]
    return workflow


def _pass_by(workflow: Api, number: str) -> None:
    """Take a node out whose output is what it is given."""
    given = workflow.pop(number)["inputs"]["model"]
    for node in workflow.values():
        node["inputs"] |= {name: given for name, value in node["inputs"].items() if value == [number, 0]}


def _network(number: str, inputs: dict[str, Any], title: str) -> Api:
    return {number: {"class_type": "TestNetwork", "inputs": {"family": FAMILY[title]}}}


def _words(number: str, inputs: dict[str, Any], title: str) -> Api:
    seed = zlib.crc32(str(inputs.get("text", inputs.get("prompt"))).encode()) % 2048
    text = {"seed": seed, "tokens": 16, "width": WORDS[title], "pooled": 0, "mask": "LTX" in title}
    return {number: {"class_type": "TestRandomConditioning", "inputs": text}}


def _begins(number: str, inputs: dict[str, Any], title: str) -> Api:
    latent = {name: inputs[name] for name in ("width", "height", "length")}
    return {
        **_words(number, inputs, title),
        f"{number}latent": {"class_type": "EmptyMiniMaxH3LatentAV", "inputs": latent},
    }


def _decoded(kind: str) -> Callable[[str, dict[str, Any], str], Api]:
    return lambda number, inputs, _: {number: {"class_type": kind, "inputs": {"samples": inputs["samples"]}}}


INSTEAD: dict[str, Callable[[str, dict[str, Any], str], Api]] = {
    **{"CheckpointLoaderSimple": _network, "UNETLoader": _network, "CLIPTextEncode": _words},
    **{"MiniMaxH3ImageToVideo": _begins, "VAEDecode": _decoded("TestFrames"), "VAEDecodeTiled": _decoded("TestFrames")},
    **{"LTXVAudioVAEDecode": _decoded("TestSound"), "VAEDecodeAudio": _decoded("TestSound")},
    "LTXVEmptyLatentAudio": lambda number, *_: {number: {"class_type": "TestSoundLatent", "inputs": {"frames": 6}}},
}
