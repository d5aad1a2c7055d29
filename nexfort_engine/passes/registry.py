# SPDX-License-Identifier: Apache-2.0
"""Passes: a captured graph written differently, so that Inductor makes better kernels of it. Each gives equal numbers,
but for what is rounded less often.

A pass is a function of a graph that says how often it found what it is for, has a file of its own, and is one switch
in the config. What it puts in is plain code there, run on the graph's own nodes (`graph/fx_builder.py`), so that
reading that code is reading what runs. Low precision, which does not give equal numbers, is in low_precision.py and
low_precision_attention.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch.fx import GraphModule

from ..attention.operator import operator
from .channels_last_weights import inner_weights
from .geglu_linear import gated_linears
from .gelu import gelus
from .group_norm import LaidOut, group_norms
from .grouped_gemm import grouped_linears
from .hoist_casts import casts_once
from .linear_gelu import linear_gelus
from .low_precision import low_precision
from .low_precision_attention import narrow_attentions
from .materialize_broadcast import broadcasts
from .odd_head_dim_attention import unpadded_attentions
from .rotary import rotaries
from .short_kv_attention import few_keys_attentions
from .tuned_attention import measured_attentions, quantised_attentions
from .upsample import inner_channels, upsamplings
from .upsample_conv import upsampled_convolutions

PREFIX = "nexfort."  # of the switches among the settings for lowering; the rest are Inductor's
PASSES: dict[str, Callable[[GraphModule], int]] = {
    "group_norm": group_norms,
    "inner_channels": inner_channels,
    "inner_weights": inner_weights,  # of what is a convolution still
    "upsampled_convolution": upsampled_convolutions,
    "upsample": upsamplings,  # of those that are left
    "rotary": rotaries,
    "broadcast": broadcasts,
    "low_precision": low_precision,
    "low_precision_int8": partial(low_precision, dtype=torch.int8),
    "grouped_linear": grouped_linears,  # of those that are not brought to low precision
    "gated_linear": gated_linears,  # of these and of products in fp8
    "linear_gelu": linear_gelus,
    "gelu": gelus,
    "narrow_attention": narrow_attentions,
    "few_keys_attention": few_keys_attentions,
    "unpadded_attention": unpadded_attentions,
    "measured_attention": measured_attentions,  # of what is attention still
    "quantised_attention": quantised_attentions,
    "cast_once": casts_once,  # for what is a library's then
}
_CALLED: dict[str, Callable[[], object]] = dict.fromkeys(("measured_attention", "quantised_attention"), operator)


def split(options: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """The engine's own switches, without their prefix, and Inductor's settings."""
    own = {name.removeprefix(PREFIX): value for name, value in options.items() if name.startswith(PREFIX)}
    return own, {name: value for name, value in options.items() if not name.startswith(PREFIX)}


def register(own: Mapping[str, object]) -> None:
    """Have the operators there that code lowered with these switches calls by name."""
    for name, make in _CALLED.items():
        if own.get(name):
            make()


def laid_out(options: Mapping[str, object]) -> AbstractContextManager[object]:
    """Inside the block eager results lie in memory as those of graphs that are lowered with these settings."""
    return LaidOut() if split(options)[0].get("group_norm") else nullcontext()
