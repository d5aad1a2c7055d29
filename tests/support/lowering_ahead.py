# SPDX-License-Identifier: Apache-2.0
"""Graphs lowered for a GPU that is not there, by a forked worker, and what is read in that. No test lives here."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpu_blocks import OPTIONS, captured, lowered

from nexfort_engine.capture.types import Captured
from nexfort_engine.lowering import worker_pool
from nexfort_engine.system import process_settings

SUPPORT = Path(__file__).resolve().parent


def lowered_ahead(
    folder: Path,
    kinds: list[str],
    options: dict[str, object],
    capture: Callable[[str], Captured] = captured,
    module: str = "pretended_worker",
) -> dict[str, Path]:
    """The payload of each block, made where nobody has asked for a device. module: as for gpu_blocks.lowered."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(SUPPORT))
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # or CUDA's runtime would be asked for devices, and no worker forked
        patch.setattr(worker_pool, "_MANY", 1)  # as on a machine with cores for the pieces of one graph
        return lowered(folder, module, kinds, options, capture)


class LoweredOnDemand(dict[str, Path]):
    """Payloads by the kind of block. A block is lowered when a test first asks for it."""

    def __init__(self, folder: Path, options: dict[str, object], capture: Callable[[str], Captured] = captured) -> None:
        super().__init__()
        self._given = folder, options, capture

    def __missing__(self, kind: str) -> Path:
        folder, options, capture = self._given
        self[kind] = lowered_ahead(folder, [kind], options, capture)[kind]
        return self[kind]


def code_of(payload: Path) -> str:
    """The Python that Inductor wrote for a payload, for all of its pieces in turn, last what it makes of a prompt."""
    own = [file for file in payload.rglob("*.py") if "before" not in file.relative_to(payload).parts]
    own.sort(key=lambda file: (file.relative_to(payload).parts[0].startswith("prompt_"), file))
    texts = [text for file in own if "def call(" in (text := file.read_text())]
    assert len(texts) == max(1, len(list(payload.glob("piece_*")))) + len(list(payload.glob("prompt_*")))
    return "".join(texts)


def kernels_of(payload: Path) -> list[dict[str, Any]]:
    """What Triton says of the kernels that are inside the stored graph."""
    found = []
    (folder,) = (payload / "fxgraph").glob("*/*")
    for file in folder.iterdir():
        with process_settings.inductor_scope(payload, OPTIONS):
            graph = pickle.loads(file.read_bytes())
        for bundled in graph._triton_bundle.kernel_artifacts:
            names = [artifact.filename for artifact in bundled.artifacts]
            assert sum(name.endswith(".cubin") for name in names) == 1, names
            found += [
                json.loads(artifact.payload)
                for artifact in bundled.artifacts
                if artifact.filename.endswith(".json") and not artifact.filename.startswith("__grp__")
            ]
    return found
