# SPDX-License-Identifier: Apache-2.0
"""Every option: its name, default, effect, cost and measured gain, one row each. No torch is imported here.

The grammar (`options.py`), what a config makes of an option (`compile_config.py`), the rungs of `benchmarks/ladder.py`,
`docs/options.md` and the gains in `docs/design/features.md` come from these rows. `pass_catalogue.py` has the passes.

A gain is copied from benchmarks/history.md, with the GPU and the date. Milliseconds are those of a queued step in mode
`O2` at 1024x1024, where the text says nothing else. What nobody measured says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

ON, OFF = "on", "off"
STANDARD = "on, off with `jit`"  # on but in the fast profile
TORCH = "as torch has it"
NOT_MEASURED = "not measured"


class Asked(Protocol):
    """What rules ask of a config."""

    @property
    def dynamic(self) -> bool: ...
    @property
    def has_weight_versions(self) -> bool: ...
    @property
    def profile(self) -> str: ...
    @property
    def lays_out(self) -> bool: ...
    @property
    def keeps(self) -> bool: ...
    @property
    def takes_copies(self) -> bool: ...
    @property
    def step_graphs(self) -> bool: ...
    def has(self, token: str) -> bool: ...
    def option(self, name: str, default: bool | None = None) -> bool | None: ...
    def is_on(self, name: str) -> bool: ...


@dataclass(frozen=True)
class OptionSpec:
    """One option.

    idle: why a value that was given has no effect in a config, or nothing. shapes: whether its value changes an
    artefact by itself, and not by a property of the config. held: the keyword of `process_settings.backend_scope` for a
    setting that torch keeps for the process. rung: its name in the ladder. devices: where it acts; nothing: where its
    passes do.
    """

    name: str
    default: str
    effect: str
    gain: str = NOT_MEASURED
    cost: str = ""
    devices: str = ""
    rung: str = ""
    shapes: bool = True
    held: str = ""
    idle: Callable[[Asked, bool], str] = lambda asked, value: ""
    since: str = "0.2.0"


def _epilogue_idle(asked: Asked, value: bool) -> str:
    return "" if asked.profile == "search" else "only kernels found by max-autotune have an epilogue to fuse"


def _background_idle(asked: Asked, value: bool) -> str:
    if value and not asked.dynamic:
        return "with dynamic off blocks are compiled one by one, in the step that needs them"
    if value and asked.profile == "search":
        return "max-autotune measures kernels, and steps beside it would distort that"
    return ""


def _prompt_idle(asked: Asked, value: bool) -> str:
    if not value or asked.has_weight_versions:
        return ""
    return (
        "what is made of a prompt is kept for steps that are replayed as CUDA graphs, where the host says that a "
        "prompt is the last step's; it is for ComfyUI's MODEL"
    )


def _fill_idle(asked: Asked, value: bool) -> str:
    if not value or asked.step_graphs:
        return ""
    return "steps are not replayed as CUDA graphs, whose nodes these are"


def _keep_idle(asked: Asked, value: bool) -> str:
    if asked.has("freezing") or asked.has("low-precision") or (asked.has_weight_versions and asked.lays_out):
        return ""
    return "with contiguous_format weights are kept prepared by freezing or low-precision alone"


def _int8_idle(asked: Asked, value: bool) -> str:
    if not value or asked.has("low-precision"):
        return ""
    return "matmuls are computed in 8 bits with low-precision alone, as in O3"


_ROWS = (
    # ---- rewrites of graphs
    OptionSpec(
        "fuse.group_norm",
        STANDARD,
        "Computes group norms by rows and channels, with kernels of their own for the sums on NVIDIA GPUs.",
        "SDXL 30.6 to 30.8 ms, 31.65 before; SD2.1 13.4 and 13.8 (H200, 2026-11-24)",
        rung="group_norm",
        since="0.1.0",
    ),
    OptionSpec(
        "fuse.upsample",
        STANDARD,
        "Upsamples images by repeating numbers or by a list of places, without a division for each number.",
        "0.6 ms of a VAE's decode to 1024x1024, 1.9 without (H200, 2026-11-22)",
        rung="upsample",
        since="0.1.0",
    ),
    OptionSpec(
        "fuse.videos",
        STANDARD,
        "Has convolutions of videos read and write them with channels innermost.",
        "Wan 2.1's VAE 0.58 s, 0.72 without (H200, 2026-11-30)",
        rung="videos",
    ),
    OptionSpec(
        "fuse.joined_frames",
        STANDARD,
        "Convolves some frames of a video as one image of all their channels, where cuDNN is faster at that.",
        "Wan 2.1's VAE 0.39 s, 0.44 without (H200, 2026-11-30)",
        rung="joined_frames",
    ),
    OptionSpec(
        "fuse.whole_rows",
        STANDARD,
        "Keeps the rows of norms and other reductions in registers.",
        "SD's VAE 34.6 ms, 36.1 by Inductor's shape (H200, 2026-11-23); Z-Image int8 67.1 ms, 69.2 without (H200, "
        "2026-11-29)",
        rung="whole_rows",
        since="0.1.0",
    ),
    OptionSpec(
        "fuse.segments",
        STANDARD,
        "Writes to several slices of one tensor, such as modulation by segments, in one pass over its rows.",
        "MiniMax-H3 int8 259 ms, 580 without (H200, 2026-11-30)",
        rung="segments",
    ),
    OptionSpec(
        "fuse.broadcast",
        STANDARD,
        "Computes functions of few numbers, such as the `tanh` of gates, once and not for each row.",
        "Z-Image int8 67.1 ms, 67.7 without (H200, 2026-11-29)",
        rung="broadcast",
    ),
    OptionSpec(
        "fuse.cast_once",
        STANDARD,
        "Makes a cast once that several kernels of a library read parts of.",
        "SDXL `O3` 24.57 ms, 24.66 without (H200, 2026-11-26)",
        rung="cast_once",
    ),
    OptionSpec(
        "fuse.convolution",
        STANDARD,
        "Computes convolutions of three by three places by a kernel of its own where that is faster than cuDNN's. "
        "Each call decides by its size.",
        "SDXL 28.0 ms, 28.4 without (H200, 2026-11-26)",
        rung="convolution",
    ),
    OptionSpec(
        "fuse.fp8_input",
        STANDARD,
        "Brings inputs of ComfyUI's fp8 layers to fp8 inside the kernels before them, once for layers of one input.",
        "Krea 2 fp8 127.3 ms, 138.8 without (H100, 2026-11-28)",
        rung="fp8_input",
    ),
    OptionSpec(
        "fuse.few_keys_attention",
        STANDARD,
        "Computes short-KV attention, such as attention to a prompt, by a kernel of its own.",
        "see `fuse.gated_linear`: both were measured together",
        rung="few_keys_attention",
    ),
    OptionSpec(
        "fuse.gated_linear",
        STANDARD,
        "Computes a linear layer and the GELU gate between its halves (GEGLU) in one launch, in fp8 too.",
        "with `fuse.few_keys_attention` SDXL 29.42 ms, 30.31 without both (H200, 2026-11-25); SD2.1 13.49 and 13.92 "
        "(H100)",
        rung="gated_linear",
    ),
    OptionSpec(
        "fuse.gelu",
        STANDARD,
        "Computes GELU by a sigmoid or by the tail of the normal distribution.",
        "76 microseconds for 4608 rows of 15360, 97 without (H200, 2026-11-23); of a step of SDXL or Z-Image int8 none "
        "(H200, 2026-11-29)",
        rung="gelu",
    ),
    OptionSpec(
        "fuse.grouped_linear",
        STANDARD,
        "Computes linear layers of one input with few rows, such as a prompt's keys and values, in one launch.",
        "SDXL 30.54 ms, 31.24 without (H200, 2026-11-25)",
        rung="grouped_linear",
    ),
    OptionSpec(
        "fuse.int8_linear",
        STANDARD,
        "Computes int8 layers of ComfyUI's quantised files by kernels of its own, fused with the norm before them and "
        "the gate and residual behind.",
        "Z-Image int8_convrot with a LoRA 66.9 ms, 97.1 without (H100, 2026-11-28)",
        "Digits of the quantised input may differ by one.",
        rung="int8_linear",
    ),
    OptionSpec(
        "fuse.linear_gelu",
        STANDARD,
        "Computes the tanh form of GELU in the matmul before it.",
        "Wan2.1-1.3B 275.7 ms, 276.1 without (H200, 2026-11-23)",
        rung="linear_gelu",
    ),
    OptionSpec(
        "fuse.rotary",
        STANDARD,
        "Computes ComfyUI's rotary operators as plain math inside the kernels before them.",
        "Flux-dev 131.5 ms, 133.8 without; Wan2.1-1.3B 262.7 and 267.9 (H200, 2026-11-25)",
        rung="rotary",
    ),
    OptionSpec(
        "fuse.unpadded_attention",
        STANDARD,
        "Computes attention of an odd head dim, 72 or 80 (PixArt, Latte), by a kernel that does not pad it to 128.",
        "PixArt-XL 29.15 ms, 30.62 without (H200, 2026-11-25)",
        rung="unpadded_attention",
    ),
    OptionSpec(
        "fuse.upsampled_convolution",
        STANDARD,
        "Computes a convolution of an image that is upsampled to the double from the image before.",
        "with `fuse.convolution` SD2.1 11.2 to 11.4 ms, 12.0 to 12.2 without both (H200, 2026-11-26)",
        rung="upsampled_convolution",
    ),
    # ---- precision and weights
    OptionSpec(
        "quant.attention",
        ON,
        "Computes attention of many tokens in 8 bits where the mode has `low-precision`, as `O3` does.",
        "Wan2.1-1.3B `O3` 214.9 ms, 243.6 without (H100, 2026-11-24)",
        "Changes the picture a little.",
    ),
    OptionSpec(
        "quant.int8",
        OFF,
        "Computes the matmuls of `low-precision` in int8 in the place of fp8.",
        "slower: Flux-dev 132.7 ms, `O2` 126.5 (H200, 2026-11-26); on the cards it is for not measured",
        "Changes the picture a little.",
        idle=_int8_idle,
    ),
    OptionSpec(
        "quant.keep_weights",
        ON,
        "Keeps what is made of weights alone, such as their numbers in fp8, while the host says that they stay.",
        "with two kernels Flux-dev `O3` 95.6 ms, 111 before (H200, 2026-11-23)",
        "Memory for what is kept. Nothing is kept where less than 2 GiB would stay free.",
        shapes=False,  # `CompileConfig.keeps` has its effect
        idle=_keep_idle,
        since="0.1.0",
    ),
    # ---- attention
    OptionSpec(
        "attention.cudnn",
        STANDARD,
        "Computes attention of at least 512 tokens without a mask by cuDNN's kernel and not by torch's flash kernel.",
        "4,224 tokens of 30 heads of 128 numbers 420 microseconds, 806 by flash (H200, 2026-11-27)",
        "The first step at each new size builds cuDNN's plans.",
        rung="cudnn_attention",
    ),
    # ---- steps and compile time
    OptionSpec(
        "triton.cudagraphs",
        STANDARD,
        "Replays whole steps as CUDA graphs. The mode token `cudagraphs` switches it on with `jit`.",
        "SDXL 1024x1024 36.8 ms a step, 68.5 without under cudaMallocAsync (H200, 2026-11-22)",
        "Memory: about the activations of the largest step; graphs of the last four sizes share one pool.",
        "NVIDIA GPUs",
        rung="cudagraphs",
        shapes=False,
        since="0.1.0",
    ),
    OptionSpec(
        "cuda.fill_kernels",
        ON,
        "Fills memory in a step's CUDA graph by kernels and not by nodes of another kind.",
        "PixArt `O3` 23.30 ms, 23.79 without; SDXL 28.68 and 28.84; Flux-dev 126.5 and 126.8 (H200, 2026-11-26)",
        devices="NVIDIA GPUs, without cudaMallocAsync",
        shapes=False,
        idle=_fill_idle,
    ),
    OptionSpec(
        "compile.prompt_once",
        STANDARD,
        "Computes what depends on the prompt and on weights alone once a picture and not in each step.",
        "PixArt 27.89 ms, 28.21 without; SDXL 29.48 and 29.96; SD2.1 12.48 and 12.56; Wan2.1-1.3B none (H200, "
        "2026-11-26)",
        "Memory: at most 100 MiB, or a 24th of the weights where that is more.",
        shapes=False,  # `CompileConfig.prompt_once` has its effect
        idle=_prompt_idle,
    ),
    OptionSpec(
        "compile.fold",
        ON,
        "Lowers what repeats within a block once, and large blocks in parts.",
        "SDXL's first step 17.8 s cold, 21.2 before (H200, 16 cores, 2026-11-23); lowering Flux's block for `O3` "
        "12.6 s, its longest part 6.6 (a CPU, 2026-11-25)",
        rung="fold",
    ),
    OptionSpec(
        "compile.background",
        OFF,
        "Runs the first picture uncompiled while artefacts are made. ComfyUI's nodes switch it on, unless **wait** is "
        "on.",
        cost="The first picture is the uncompiled one's.",
        devices="all",
        shapes=False,
        idle=_background_idle,
    ),
    # ---- settings of torch
    OptionSpec(
        "overrides.conv_benchmark",
        TORCH,
        "Lets cuDNN measure its convolution algorithms, as the mode token `benchmark` does.",
        "SD2.1 768x768 with `freezing` 11.81 ms, 12.64 without (H200, 2026-11-25)",
        "The first call at each size measures.",
        "GPUs with cuDNN",
        shapes=False,
        held="conv_benchmark",
        since="0.1.0",
    ),
    OptionSpec(
        "overrides.matmul_allow_tf32",
        TORCH,
        "Lets matmuls of float32 be computed in TF32.",
        cost="Changes the picture a little.",
        devices="NVIDIA GPUs",
        held="matmul_allow_tf32",
        since="0.1.0",
    ),
    OptionSpec(
        "overrides.matmul_allow_fp16_accumulation",
        TORCH,
        "Lets matmuls of float16 be summed in float16.",
        cost="Changes the picture a little.",
        devices="NVIDIA GPUs",
        shapes=False,
        held="matmul_allow_fp16_accumulation",
    ),
    OptionSpec(
        "inductor.optimize_linear_epilogue",
        TORCH,
        "Fuses what follows a matmul into the kernel that `max-autotune` found for it.",
        devices="all",
        idle=_epilogue_idle,
        since="0.1.0",
    ),
)
OPTION_ROWS: Mapping[str, OptionSpec] = {row.name: row for row in _ROWS}

# Options of workflows for the old engine that have no effect here: what they asked for. A config takes them, and its
# report says that they have none.
LEGACY_NO_EFFECT: Mapping[str, str] = {
    "triton.fuse_attention_allow_fp16_reduction": "an attention kernel that sums in fp16 (matmuls can, with "
    "overrides.matmul_allow_fp16_accumulation)",
    "inductor.force_triton_sdpa": "the fused attention kernel",
    "cuda.fuse_timestep_embedding": "the fused timestep embedding",
}

# Options that were removed, and why. A config takes them, and its report says that they have no effect.
RETIRED: Mapping[str, str] = {
    "attention.measure": "no attention kernel that it tried was faster than the one that is taken without it",
}

# What modes gain, by their tokens.
MODE_GAINS: Mapping[str, str] = {
    "O2": "see [benchmarks](benchmarks.md)",
    "O3": "Flux-dev 80.3 ms, `O2` 126.5 (H200, 2026-11-26); other cards not measured",
    "max-autotune": "SDXL 27.5 and 27.6 ms, `O2` 27.4; its first step takes 52 s (H200, 2026-11-26)",
    "cudagraphs": "see `triton.cudagraphs`",
    "freezing": "see `quant.keep_weights`",
    "low-precision": "see `O3`",
    "cache-all": "SDXL's first step warm 2.4 to 3.4 s, cold 20.7 to 28.2 (H200, 2026-11-22)",
    "benchmark": "see `overrides.conv_benchmark`",
    "quant": "diffusers' SD2.1 81 it/s in fp8, 79 to 80 without (H200, 2026-11-24)",
}


def no_effect(asked: Asked, name: str, value: bool) -> str:
    """Why an option that was given a value has no effect in a config, or nothing."""
    if name in LEGACY_NO_EFFECT:
        effect = "is not available yet" if value else "is not available yet, so there is nothing to turn off"
        return f"{LEGACY_NO_EFFECT[name]} {effect}"
    if name in RETIRED:
        return f"it was removed, because {RETIRED[name]}"
    return OPTION_ROWS[name].idle(asked, value)
