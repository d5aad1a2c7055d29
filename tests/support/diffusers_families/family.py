# SPDX-License-Identifier: Apache-2.0
"""What one family of diffusers' networks is: how it is made tiny, what one call of it is given, what may run eager.

No test lives here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from backbones import Backbone, Tiny
from inputs import Draw, Size, tensors_of
from torch import nn

Inputs = dict[str, Any]
Give = Callable[[Draw, int, Size, int], Inputs]  # the arguments of one call, by name
IMAGE = ((16, 16), (16, 24), (24, 16), (20, 28), (12, 12))
VIDEO = ((3, 8, 8), (3, 8, 12), (5, 12, 8), (2, 10, 14))
SOUND = ((32,), (48,), (40,), (56,))
WORDS = (64, 20, 77)
NO_WORDS = (1,)  # its calls have no length of their own


@dataclass(frozen=True)
class Family:
    """One family of networks.

    kind: the name of its class in diffusers; config: its arguments, `depth` those that say how many blocks it has.
    part: what a pipeline calls it. moves: what of a call must matter to it. use: how a pipeline calls it, if not by
    its forward. eager: region -> the reason that it runs eager for, where torch or its own code leaves no other way.
    bound: regions that compute with plain sizes, and run eager at other sizes than the first. apart: reasons of the
    variants that a later batch may need, where the network calls its blocks in another way then. notes: what else its
    report says. alike: from how many layers on some of a list are alike, so that it is taken apart.
    """

    name: str
    kind: str
    give: Give
    config: Mapping[str, Any]
    depth: tuple[str, ...] = ("num_layers",)
    part: str = "transformer"
    sizes: tuple[Size, ...] = IMAGE
    lengths: tuple[int, ...] = WORDS
    moves: tuple[str, ...] = ("seed", "prompt", "step", "length")
    use: Callable[[nn.Module, Inputs], Any] = lambda module, given: module(**given)
    eager: Mapping[str, str] = field(default_factory=dict)
    bound: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    alike: int = 2

    def build(self, depth: int) -> nn.Module:
        """The network with so many blocks of each kind, its weights still to be drawn."""
        import diffusers

        return getattr(diffusers, self.kind)(**{**self.config, **dict.fromkeys(self.depth, depth)})

    def tiny(self, depth: int = 2) -> Tiny:
        """The network with weights that are the same in every process."""
        return Tiny(Backbone(self.name, "diffusers", self.build, self._call, self.sizes, self.lengths), depth)

    def _call(self, d: Draw, batch: int, size: Size, length: int) -> tuple[tuple[Any, ...], Inputs]:
        return (), self.give(d, batch, size, length)


class Pipe:
    """As much of a pipeline as `compile_pipe` looks at: one network under the name that pipelines give it."""

    def __init__(self, family: Family, depth: int = 2) -> None:
        self.family, self.made = family, family.tiny(depth)
        self.components: dict[str, Any] = {}
        setattr(self, family.part, self.made.module)

    def __call__(self, **call: Any) -> list[torch.Tensor]:
        """What the network gives for one call; keywords are those of `Tiny.make_inputs`."""
        _, given = self.made.make_inputs(**call)
        with torch.inference_mode():
            return tensors_of(_plain(self.family.use(getattr(self, self.family.part), given)))


def _plain(result: Any) -> Any:
    """A result without what stands for nothing."""
    if isinstance(result, Mapping):
        return [_plain(value) for value in result.values() if value is not None]
    return [_plain(value) for value in result if value is not None] if isinstance(result, (list, tuple)) else result


def without(*names: str) -> tuple[str, ...]:
    """What matters to a family, without what it has not."""
    return tuple(name for name in ("seed", "prompt", "step", "length") if name not in names)


def words(d: Draw, batch: int, length: int, width: int = 16) -> Inputs:
    """A prompt as most networks name it."""
    return {"encoder_hidden_states": d.prompt(batch, length, width), "return_dict": False}


def mask(batch: int, length: int, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    """As a tokenizer leaves it: the end of the prompt is padding."""
    found = torch.ones(batch, length, dtype=dtype)
    found[:, -3:] = 0
    return found


def tokens(d: Draw, most: int, *shape: int) -> torch.Tensor:
    """Whole numbers below `most` that depend on the prompt."""
    return (d.prompt(*shape).abs() * 1000).long() % most


def grid(height: int, width: int, axes: int = 3) -> torch.Tensor:
    """The places of an image's tokens on the last two of its axes."""
    found = torch.zeros(height, width, axes)
    found[..., axes - 2] += torch.arange(height)[:, None]
    found[..., axes - 1] += torch.arange(width)[None]
    return found.flatten(0, 1)
