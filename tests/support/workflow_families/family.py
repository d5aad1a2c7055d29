# SPDX-License-Identifier: Apache-2.0
"""What a family of models is: a name, the flavours it comes in, and what builds one of them.

Which flavours a family has is for the family to say: those that its users would look for, not every one there is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workflow_graph import Graph

PLAIN = "plain"
COMPILED = "compile_model"
LORA = "compile_model_lora"
CONTROLNET = "compile_model_controlnet"
VAE = "compile_model_vae"
LOW_PRECISION = "compile_model_low_precision"
# What is told of each in the note and on the picture.
FLAVOURS = {
    PLAIN: "not compiled, to compare with",
    COMPILED: "model compiled",
    LORA: "model compiled, with a LoRA",
    CONTROLNET: "model and ControlNet compiled",
    VAE: "model and VAE compiled",
    LOW_PRECISION: "model compiled, large products in 8 bits",
}


@dataclass(frozen=True)
class Family:
    """One family. key: how its files' names begin. build: adds the nodes of a flavour to a graph.

    flavours: besides the plain and the compiled one, which every family has. remark: what the note says of its files.
    """

    key: str
    title: str
    build: Callable[[Graph, str], None]
    flavours: tuple[str, ...] = ()
    remark: str = ""

    @property
    def all_flavours(self) -> tuple[str, ...]:
        """In the order of FLAVOURS."""
        return tuple(one for one in FLAVOURS if one in (PLAIN, COMPILED, *self.flavours))
