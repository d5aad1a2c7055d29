# SPDX-License-Identifier: Apache-2.0
"""One small block through the whole way: capture, lower, save, load, compare. Decides on an unknown torch or device."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ..cache.ephemeral import Scratch
from ..capture.exporter import capture
from ..capture.types import Example
from ..config.compile_config import CompileConfig
from ..guards.call_spec import Flat, flatten_call
from ..lowering import inductor
from ..modules.tree import WeightSlots
from ..reporting.report import named


class _Block(nn.Module):
    """A pre-norm feed-forward with a residual: a norm to fuse, two products, sizes that must stay free."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x)))) * scale.unsqueeze(1)


def run(device_type: str) -> str | None:
    """Why this torch cannot compile for a kind of device ("cpu", "cuda", "xpu", "mps"), or None."""
    try:
        # the sampler's random numbers must not depend on whether this ran: the block's weights are drawn aside
        aside = torch.random.fork_rng(devices=[])
        with torch.inference_mode(False), torch.no_grad(), aside, Scratch() as folder:
            return _check(device_type, folder / "payload")
    except Exception as error:
        # the question is whether it works; whatever goes wrong is the answer
        return named(error)


def _check(device_type: str, payload: Path) -> str | None:
    generator = torch.Generator().manual_seed(0)
    block = _Block().eval().requires_grad_(False).to(device_type)
    flat = Flat()
    inputs = torch.randn(2, 16, 32, generator=generator).to(device_type), torch.ones(2, 32, device=device_type)
    spec = flatten_call(inputs, {}, flat)
    captured = capture(block, Example.of(spec, flat))
    options = CompileConfig.parse(None).lowering_options(device_type)
    inductor.lower(captured, payload, options)
    code = inductor.load(payload, options, captured.modules, len(captured.weights))
    weights = WeightSlots(block).read()
    for batch, length in ((2, 16), (1, 24), (3, 7)):
        x = torch.randn(batch, length, 32, generator=generator).to(device_type)
        scale = torch.randn(batch, 32, generator=generator).to(device_type)
        wanted = block(x, scale)
        found = code([weights[i] for i in captured.weights] + [(x, scale)[i] for i in captured.tensors])[0]
        error = float((found - wanted).norm() / wanted.norm())
        if not error < 1e-3:
            return f"a compiled block differs from the uncompiled one by {error:.2g} at batch {batch}, length {length}"
    return None
