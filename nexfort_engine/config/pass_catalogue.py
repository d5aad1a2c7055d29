# SPDX-License-Identifier: Apache-2.0
"""Every pass: its name, rewrite, option, place in the order, and the devices it is for, one row each.

A pass is a switch of lowering. Most are rewrites of a captured graph (passes/); the rest is read while a graph is
lowered (`lowering/inductor.py`). Rewrites run in the order of rows. `passes/registry.py` loads them,
`CompileConfig.lowering_options` sets the switches, and `compilation/lookup.py` takes back what the device is not for: a
pass may run in a process that is forked afterwards, and with it a device that it had asked for would be lost.

No torch is imported here. What a pass gains is in the row of its option (`option_catalogue.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .option_catalogue import Asked

PREFIX = "nexfort."  # of the switches among the settings for lowering; the rest are Inductor's
Cards = tuple[tuple[int, int], ...]
HOPPER: Cards = ((9, 0),)


@dataclass(frozen=True)
class Need:
    """What a kernel needs of the device. cards: the compute capabilities; none: `oldest` and newer.

    descriptors: whether it writes descriptors, for which it needs more of torch, of Triton and of the driver.
    """

    text: str
    cards: Cards = ()
    oldest: tuple[int, int] = (0, 0)
    descriptors: bool = False


NEEDS: Mapping[str, Need] = {
    # what those with cards need of torch and of Triton is looked for by kernels/gluon_support.py
    "descriptors": Need("NVIDIA GPUs of compute capability 9.0", cards=HOPPER, descriptors=True),
    "fp8": Need("NVIDIA GPUs of compute capability 8.9 and newer", oldest=(8, 9)),
    "int8": Need("NVIDIA GPUs of compute capability 8.0 and newer", oldest=(8, 0)),
    "int8_files": Need(
        "NVIDIA GPUs of compute capability 8.0 and newer, with comfy_kitchen's CUDA kernels", oldest=(8, 0)
    ),
}


@dataclass(frozen=True)
class PassSpec:
    """One pass.

    rewrite: "file:function" in passes/; nothing: lowering reads the switch. option: what the user switches it by, an
    option, a mode token or a key. after: names of passes that must have run, each with the reason. on: the rule of a
    config; None: the option's own. gpu: whether it is for GPUs alone, where it was measured to win. measured: the cards
    on which it was measured to win; elsewhere it is on where the user asks for it. tuned: the verdict of
    quant.card_figures.CardFigures that counts instead, on a card that the user measured. needs: a name of NEEDS.
    operator: "module:function" of the engine that makes the operator that lowered code calls by name. packs_weights:
    whether it makes smaller weights of weights.
    """

    name: str
    option: str
    rewrite: str = ""
    after: Mapping[str, str] = field(default_factory=dict)
    on: Callable[[Asked], bool] | None = None
    gpu: bool = True
    measured: Cards = ()
    tuned: str = ""
    needs: str = ""
    operator: str = ""
    packs_weights: bool = False

    @property
    def switch(self) -> str:
        """Its name among the settings for lowering."""
        return PREFIX + self.name

    def is_on(self, asked: Asked, device_type: str) -> bool:
        """Whether a config has it on "cuda" or "cpu", of which sort the card may be."""
        if self.gpu and device_type == "cpu":
            return False
        return asked.is_on(self.option) if self.on is None else self.on(asked)


def _low(asked: Asked) -> bool:
    return asked.has("low-precision")


_TOLD = "the report says of the captured graph which matmuls are computed in 8 bits"
_TOLD_ATTENTION = "the report says of the captured graph which attention is computed in 8 bits"
_LEFT = "it takes what is attention still"
_READERS = "it looks at who reads a value, which that pass changes"

PASSES: tuple[PassSpec, ...] = (
    # ---- rewrites, in their order
    PassSpec("group_norm", "fuse.group_norm", "group_norm:group_norms"),
    PassSpec(
        "inner_channels",
        "fuse.upsample",
        "upsample:inner_channels",
        on=lambda asked: asked.lays_out and asked.is_on("fuse.upsample"),
    ),
    PassSpec(
        "inner_weights",
        "memory_format",
        "channels_last_weights:inner_weights",
        on=lambda asked: asked.lays_out,
    ),
    PassSpec("joined_frames", "fuse.joined_frames", "joined_frames:joined_frames", measured=HOPPER),
    PassSpec(
        "videos",
        "fuse.videos",
        "video_convolutions:video_convolutions",
        after={"joined_frames": "that pass looks for torch's operator"},
        operator="kernels.conv3d.op:operator",
    ),
    PassSpec(
        "upsampled_convolution",
        "fuse.upsampled_convolution",
        "upsample_conv:upsampled_convolutions",
        after={
            "inner_channels": "it takes images whose channels are innermost, which that pass lays out",
            "inner_weights": "that pass lays out the weights of what is a convolution still",
        },
        needs="descriptors",
    ),
    PassSpec(
        "upsample",
        "fuse.upsample",
        "upsample:upsamplings",
        after={
            "inner_channels": "that pass looks for torch's operator",
            "upsampled_convolution": "it takes the images that are left",
        },
    ),
    PassSpec("rotary", "fuse.rotary", "rotary:rotaries"),
    PassSpec("fp8_input", "fuse.fp8_input", "fp8_input:fp8_inputs", needs="fp8", measured=HOPPER),
    PassSpec(
        "int8_linear",
        "fuse.int8_linear",
        "int8_linear:int8_linears",
        needs="int8_files",
        measured=HOPPER,
        tuned="int8_pays",
    ),
    PassSpec(
        "segments",
        "fuse.segments",
        "segment_writes:segment_writes",
        after={
            "rotary": "that pass looks for tables as the block's code has them",
            "int8_linear": "that pass looks for modulation as the block's code has it",
        },
    ),
    PassSpec(
        "broadcast",
        "fuse.broadcast",
        "materialize_broadcast:broadcasts",
        after={
            "rotary": "it looks at what that pass put in as well",
            "int8_linear": "that pass looks for modulation as the block's code has it",
        },
    ),
    PassSpec(
        "low_precision",
        "low-precision",
        "low_precision:low_precision",
        on=lambda asked: _low(asked) and not asked.is_on("quant.int8"),
        needs="fp8",
        packs_weights=True,
    ),
    PassSpec(
        "low_precision_int8",
        "quant.int8",
        "low_precision:low_precision_int8",
        on=lambda asked: _low(asked) and asked.is_on("quant.int8"),
        needs="int8",
        packs_weights=True,
    ),
    PassSpec(
        "grouped_linear",
        "fuse.grouped_linear",
        "grouped_gemm:grouped_linears",
        after={"low_precision": _TOLD, "low_precision_int8": _TOLD},
    ),
    PassSpec(
        "gated_linear",
        "fuse.gated_linear",
        "geglu_linear:gated_linears",
        after={"low_precision": "it takes matmuls in fp8 as well", "low_precision_int8": _TOLD},
        needs="descriptors",
    ),
    PassSpec(
        "linear_gelu",
        "fuse.linear_gelu",
        "linear_gelu:linear_gelus",
        after={"low_precision": _TOLD, "low_precision_int8": _TOLD},
    ),
    PassSpec(
        "gelu",
        "fuse.gelu",
        "gelu:gelus",
        after=dict.fromkeys(
            ("int8_linear", "broadcast", "gated_linear", "linear_gelu"), "that pass looks for torch's GELU"
        ),
    ),
    PassSpec(
        "narrow_attention",
        "quant.attention",
        "low_precision_attention:narrow_attentions",
        on=lambda asked: _low(asked) and asked.is_on("quant.attention"),
        measured=HOPPER,
        needs="fp8",
    ),
    PassSpec(
        "few_keys_attention",
        "fuse.few_keys_attention",
        "short_kv_attention:few_keys_attentions",
        after={"narrow_attention": _TOLD_ATTENTION},
        measured=HOPPER,
    ),
    PassSpec(
        "unpadded_attention",
        "fuse.unpadded_attention",
        "odd_head_dim_attention:unpadded_attentions",
        after={"narrow_attention": _TOLD_ATTENTION},
        needs="descriptors",
    ),
    PassSpec(
        "cudnn_attention",
        "attention.cudnn",
        "cudnn_attention:cudnn_attentions",
        after=dict.fromkeys(("narrow_attention", "few_keys_attention", "unpadded_attention"), _LEFT),
        measured=HOPPER,
        operator="attention.cudnn:operator",
    ),
    PassSpec(
        "cast_once",
        "fuse.cast_once",
        "hoist_casts:casts_once",
        after=dict.fromkeys(
            (
                *("low_precision", "low_precision_int8", "grouped_linear", "gated_linear", "linear_gelu"),
                *("narrow_attention", "few_keys_attention", "unpadded_attention"),
                "cudnn_attention",
            ),
            _READERS,
        ),
    ),
    # ---- what lowering reads
    PassSpec("whole_rows", "fuse.whole_rows"),
    PassSpec("convolution", "fuse.convolution", needs="descriptors"),
    PassSpec("prepare", "quant.keep_weights", on=lambda asked: asked.keeps, gpu=False),
    PassSpec("prepare_copies", "quant.keep_weights", on=lambda asked: asked.takes_copies, gpu=False),
    PassSpec("prompt_once", "compile.prompt_once"),
    PassSpec("fold", "compile.fold", gpu=False),
)
