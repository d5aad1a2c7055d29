# SPDX-License-Identifier: Apache-2.0
"""Old workflows: which compile nodes of ComfyUI and of other packs have a node of ours that does their work.

ComfyUI puts a replacement in only where the old node is not installed: the front end offers it, `POST /prompt` does it
by itself. What is installed is never replaced behind the user's back; the command in web/replace.js does that when it
is asked to. Nothing is replaced here, only registered.

Only links are carried over. The old nodes' modes are words of torch.compile, which has other ones, and ComfyUI hands
values on as they are or not at all. Their `dynamic` is off unless somebody switched it on, and nothing tells the two
apart; here one artefact for all sizes is the rule. A pack's settings that change the picture (step caches,
quantisation) have no node here, so the ids of such nodes are not in the list and a workflow with one says that it is
missing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import comfy_api.latest
from comfy_api.latest import io

from .compile_controlnet import NexfortCompileControlNet
from .compile_model import NexfortCompileModel
from .compile_vae import NexfortCompileVAE

log = logging.getLogger("nexfort")


@dataclass(frozen=True)
class Old:
    """Nodes of others that one of ours stands for. link: their input for what is compiled.

    None where they only held settings for a node behind them. Our settings are in the compile node, so what stands for
    them is connected to nothing and never runs; without it ComfyUI would refuse the whole workflow.
    """

    new: type[io.ComfyNode]
    link: str | None
    ids: tuple[str, ...]


OLD = (
    Old(
        NexfortCompileModel,
        "model",
        (
            # ComfyUI's own
            "TorchCompileModel",
            # ComfyUI-KJNodes, the deprecated ones too
            *("TorchCompileModelAdvanced", "TorchCompileModelFluxAdvanced", "TorchCompileModelFluxAdvancedV2"),
            *("TorchCompileModelWanVideo", "TorchCompileModelWanVideoV2", "TorchCompileModelQwenImage"),
            *("TorchCompileModelHyVideo", "TorchCompileLTXModel", "TorchCompileCosmosModel"),
            # Comfy-WaveSpeed; of its two nodes that cache steps there is no counterpart here
            *("EnhancedCompileModel", "VelocatorCompileModel"),
            # ComfyUI_stable_fast, ComfyUI_pruna, LoRA-safe torch.compile
            *("ApplyStableFastUnet", "PrunaCompileModel", "TorchCompileModel_LoRASafe"),
            # OneDiff
            *("ModelSpeedup", "SVDSpeedup"),
        ),
    ),
    Old(NexfortCompileVAE, "vae", ("TorchCompileVAE", "VaeSpeedup")),
    Old(NexfortCompileControlNet, "controlnet", ("TorchCompileControlNet",)),
    Old(NexfortCompileControlNet, "control_net", ("ControlnetSpeedup",)),
    # OneDiff's "boosters", which told ModelSpeedup and its like how to compile
    Old(NexfortCompileModel, None, ("OneDiffModelBooster", "OneDiffNexfortBooster", "OneDiffTorchCompileBooster")),
)


async def register_replacements() -> int:
    """Tell ComfyUI of all of them; how many. 0 on a ComfyUI that knows no replacements."""
    make = getattr(io, "NodeReplace", None)
    api = getattr(comfy_api.latest, "ComfyAPI", None)
    registry = None if api is None else getattr(api(), "node_replacement", None)
    if make is None or registry is None:
        log.debug("this ComfyUI has no list of node replacements; old workflows keep their compile nodes")
        return 0
    told = replacements()
    for arguments in told:
        await registry.register(make(**arguments))
    return len(told)


def replacements() -> list[dict[str, Any]]:
    """The arguments of each `io.NodeReplace`."""
    return [
        {
            "new_node_id": old.new.define_schema().node_id,
            "old_node_id": old_id,
            "input_mapping": _inputs(old),
            "output_mapping": None if old.link is None else [{"new_idx": 0, "old_idx": 0}],
        }
        for old in OLD
        for old_id in old.ids
    ]


def _inputs(old: Old) -> list[dict[str, Any]]:
    """The link under its new name, and the default of each widget that a prompt must have."""
    first, *widgets = old.new.define_schema().inputs
    link = [] if old.link is None else [{"new_id": first.id, "old_id": old.link}]
    # An input that the old node may lack must not be mapped: ComfyUI's server answers a prompt without it with 500.
    return [*link, *({"new_id": one.id, "set_value": one.default} for one in widgets if not one.optional)]
