# SPDX-License-Identifier: Apache-2.0
"""Operators made known to torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARIES: list[torch.library.Library] = []  # an operator goes with its library


def registered(schema: str, reference: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """The operator `nexfort::<name>` of this schema. Once a process and name.

    reference: what it computes on any device. fake: the same for tensors without numbers.
    """
    name = schema.partition("(")[0]
    library = torch.library.Library("nexfort", "FRAGMENT")
    library.define(schema)
    library.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"nexfort::{name}", fake, lib=library)
    _LIBRARIES.append(library)
    return getattr(torch.ops.nexfort, name).default
