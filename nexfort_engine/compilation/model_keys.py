# SPDX-License-Identifier: Apache-2.0
"""ModelKeys: which backbone an artefact was made for, so that all of one backbone's are found before its first step."""

from __future__ import annotations

from typing import Any

import torch

from ..cache.key import driver_needed, environment_parts, fingerprint, machine, primary_key
from ..modules.tree import structure
from ..quant.card_figures import key_part
from ..runtime.engine_state import EngineState


class ModelKeys:
    """The keys of one engine's backbone, one for each kind of device."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._keys: dict[str, str] = {}

    def key(self, device: torch.device) -> str:
        """A key of the backbone's classes, shapes and config on one kind of device."""
        if device.type not in self._keys:
            parts = {
                "environment": environment_parts(str(device)),
                "config": self._state.lowering.lowering_key(),
                "structure": structure(self._state.root, besides=self._state.besides),
                **key_part(self._state.store.root, device.type),
            }
            self._keys[device.type] = primary_key(parts)
            self._state.report.of_model(self._keys[device.type])
        return self._keys[device.type]

    def stored(self, device: torch.device) -> list[str]:
        """The primary keys of what the store has for the backbone on a device."""
        key = self.key(device)
        return [row["primary"] for row in self._state.store.rows() if row["info"].get("model") == key]

    def origin(self, region: str, device: torch.device) -> tuple[int | None, dict[str, Any]]:
        """For the manifest of a region's artefact: the oldest driver that runs it, and what people want to know."""
        where = str(device)
        info = {
            "region": region,
            "family": self._state.name,
            "model": self.key(device),
            "mode": self._state.config.mode,
        }
        return driver_needed(where), {**info, "machine": machine(where), "fingerprint": fingerprint(where)}
