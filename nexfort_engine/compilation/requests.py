# SPDX-License-Identifier: Apache-2.0
"""Requests: what a region needs an artefact for, with the key under which artefacts for it are kept."""

from __future__ import annotations

from typing import Any

from ..cache.key import environment_parts, primary_key
from ..capture.exporter import spec_key
from ..capture.types import Example
from ..dispatch.region import Region
from ..guards.call_spec import Flat
from ..modules.channels_last import as_taken, win_on
from ..modules.memory_format import normalised
from ..quant.card_figures import key_part
from ..runtime.devices import device_of
from ..runtime.engine_state import EngineState
from ..runtime.lru_mapping import Recent
from ..system import torch_modes as modes
from .lookup import Wanted

MOST_CALLS = 4096  # of all regions, of which is remembered how they were called


class Requests:
    """The requests of one engine's regions."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._primaries: Recent[tuple[int, Any, Any, bool, Any], tuple[Any, str]] = Recent(MOST_CALLS)

    def wanted(self, region: Region, spec: Any, flat: Flat) -> Wanted:
        """What a region needs for a call. Raises Unsupported."""
        device = device_of([t.device for t in (*flat.tensors, *region.weights.slots.read())])
        images = region.images and win_on(device)  # asked once: a step beside this one may change it
        shaping = modes.current().shaping
        metas = region.metas(flat, images)
        example = Example.of(spec, flat, as_taken if images else normalised)
        primary = self._primary(region, spec, flat, metas, str(device), images, shaping)
        return Wanted(region, primary, example, flat, images, shaping, region.weights.structure())

    def _primary(
        self, region: Region, spec: Any, flat: Flat, metas: list[Any], device: str, images: bool, shaping: modes.Values
    ) -> str:
        structure = region.weights.structure()
        place = (id(region), (spec, flat.own, len(flat.mappings)), tuple(metas), images, shaping)
        found = self._primaries.get(place)
        if found is None or found[0] is not structure:
            parts = {
                "environment": environment_parts(device),
                "config": self._state.lowering.lowering_key(images=images),
                "structure": structure,
                "call": spec_key(spec, flat, metas),
                **({"own": list(map(list, flat.own))} if flat.own else {}),
                "images": images,
                "modes": shaping,
                # lowered code names its card by its number among those that the process sees
                "card": device.partition(":")[2] or "0",
                **key_part(self._state.store.root, device.partition(":")[0]),
            }
            found = self._primaries[place] = (structure, primary_key(parts))
        return found[1]
