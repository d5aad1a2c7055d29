# SPDX-License-Identifier: Apache-2.0
"""`torch.compile(module, backend="nexfort")`: the engine's lowering settings behind torch's own tracing and guards.

For code that already calls torch.compile. Regions, read-set guards and the artefact store belong to
`nexfort_engine.compile`; here torch decides what is traced and when it is traced again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .config.compile_config import CompileConfig
from .system.process_settings import disabled, supported_options


def nexfort(graph: torch.fx.GraphModule, example_inputs: list[Any], *, options: Mapping[str, Any] | None = None) -> Any:
    """torch.compile's backend entry point. options: as for `nexfort_engine.compile`. ValueError for wrong ones."""
    config = CompileConfig.parse(options)
    if config.disable or disabled():
        return graph.forward
    from torch._inductor.compile_fx import compile_fx

    device = next((v.device.type for v in example_inputs if isinstance(v, torch.Tensor)), "cpu")
    return compile_fx(graph, example_inputs, config_patches=supported_options(config.inductor_options(device)))
