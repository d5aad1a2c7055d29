# SPDX-License-Identifier: Apache-2.0
"""How many rows the linear layers of a diffusers pipeline see: its first step is run, and looked at.

A real call, because what a network is given is known to its pipeline alone: guidance, lengths of prompts, patches. The
pipeline runs as a copy with copies of the networks that share every weight; it ends as soon as each network was called.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...quant.plan import sharing_copy
from ...quant.profitability import Seen, Watch
from ...reporting.report import named

_PROMPT = "a picture"
_STEPS = 2  # the second of two networks takes the last steps of some


@dataclass
class Found:
    """Network -> layer -> what it was called with; and why a call ended early, where it did."""

    seen: dict[str, dict[str, Seen]] = field(default_factory=dict)
    problem: str = ""


class _Enough(BaseException):
    """All networks were called. No Exception: nobody on the way may take it for one of theirs."""


def look(pipe: Any, networks: Mapping[str, nn.Module], call: Mapping[str, Any]) -> Found:
    """What a call with these keywords gives the linear layers. Whatever goes wrong is told in the result.

    The pipeline's own defaults stand for keywords that are not given. Random numbers, schedulers and the pipeline stay
    as they are.
    """
    found = Found()
    if not networks:
        return found
    like, shared = copy.copy(pipe), {name: sharing_copy(net) for name, net in networks.items()}
    like.__dict__.update(shared, **_schedulers(pipe))
    if hasattr(like, "set_progress_bar_config"):
        like.set_progress_bar_config(disable=True)
    called = _end_after(shared)
    watch = Watch(shared)
    devices = {weight.device.index for net in networks.values() for weight in net.parameters() if weight.is_cuda}
    try:
        with torch.random.fork_rng(devices=devices), torch.no_grad(), watch:
            like(**_keywords(type(pipe), call))
    except _Enough:
        pass
    except Exception as problem:  # of the pipeline's own code: told to whoever reads the plan
        found.problem = named(problem)
    found.seen = {name: seen for name in called if (seen := watch.seen(name)) is not None}
    return found


def _end_after(networks: Mapping[str, nn.Module]) -> set[str]:
    """Hooks on these copies that end the call once each was run to its end; gives the set of those that were."""
    called: set[str] = set()
    for name, net in networks.items():

        def after(_: nn.Module, __: Any, ___: Any, name: str = name) -> None:
            called.add(name)
            if len(called) == len(networks):
                raise _Enough

        net.register_forward_hook(after)
    return called


def _schedulers(pipe: Any) -> dict[str, Any]:
    """Copies of what keeps count of steps."""
    there = {name: part for name, part in vars(pipe).items() if hasattr(part, "set_timesteps")}
    return {name: copy.deepcopy(part) for name, part in there.items()}


def _keywords(kind: type, call: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are given, and as little as can be of the rest; no generator, whose numbers would be used up."""
    own = {"prompt": _PROMPT, "num_inference_steps": _STEPS, "output_type": "latent"}
    takes = inspect.signature(kind.__call__).parameters  # type: ignore[operator]
    given = {name: value for name, value in call.items() if name != "generator"}
    if "prompt_embeds" in given:
        del own["prompt"]
    return {**{name: value for name, value in own.items() if name in takes}, **given}
