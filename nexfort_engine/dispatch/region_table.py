# SPDX-License-Identifier: Apache-2.0
"""RegionTable: the regions of one backbone, found on first use and found anew where submodules were exchanged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from torch import nn

from ..capture.reached_names import assigns_names
from ..capture.static_reach import set_for_blocks, takes_out
from ..modules.regions import RegionSpec, Seats, beyond, find_regions, parts
from ..modules.tree import Slot
from ..runtime.artifact import Binding
from ..runtime.engine_state import EngineState
from .prepack_cache import released_weights
from .region import Region

_SPLIT = "{} is not compiled as a whole where it cannot be captured; of its submodules, those that can be are"


class RegionTable:
    """The regions of one engine's backbone."""

    def __init__(self, state: EngineState, make: Callable[[RegionSpec], Region], *, whole: bool) -> None:
        """make: a region. whole: the backbone is called through its forward alone, so it may be one region."""
        self._state, self._make, self._may_be_whole = state, make, whole
        self._finding = threading.Lock()
        self._by_module: dict[int, Region] | None = None
        self._placed: list[tuple[RegionSpec, Region]] = []
        self._split: frozenset[str] = frozenset()  # as the regions were found
        self._seats: Seats | None = None  # where their blocks are in the backbone
        self._sets_names = False

    @property
    def regions(self) -> list[Region]:
        """All of them."""
        return list(self._found().values())

    @property
    def whole_region(self) -> Region | None:
        """The region that is the backbone as a whole; None where it has several."""
        return self._found().get(id(self._state.root))

    @property
    def sets_names(self) -> bool:
        """Whether code between the blocks assigns what blocks may read by name, or blocks take out of what they do."""
        self._found()
        return self._sets_names

    def of(self, module: nn.Module) -> Region | None:
        """The region of a module, None where it is none."""
        found = self._by_module  # asked for each call of a block: no further call of our own
        return (found if found is not None else self._found()).get(id(module))

    def modules(self) -> list[nn.Module]:
        """The module of each region."""
        return [region.module for region in self.regions]

    def is_block(self, region: Region) -> bool:
        """Whether a region is one of the blocks that make a step long: one of several alike, or all there is."""
        return region.module is self._state.root or sum(other.kind == region.kind for other in self.regions) > 1

    def were_exchanged(self) -> bool:
        """Whether another module is where the block of a region was."""
        return self._seats is not None and not self._seats.unchanged()

    def find_anew(self) -> None:
        """Find the regions anew when they are asked for next: submodules were exchanged."""
        self._by_module = None

    def split(self, regions: Iterable[Region]) -> bool:
        """Have the submodules below regions be regions too, from the next step on. Whether there are new ones."""
        for region in regions:
            if region.module is not self._state.root and next(parts(region.module, region.path), None) is not None:
                self._state.known.split.add(region.path)
                self._state.report.note(_SPLIT.format(region.kind))
        if self._state.known.split <= self._split:
            return False
        self.find_anew()
        return True

    def below(self, region: Region) -> list[Region]:
        """The regions below one that is split."""
        if not region.is_split:
            return []
        return [other for other in self.regions if other.path.startswith(f"{region.path}.")]

    def is_below(self, region: Region) -> bool:
        """Whether a region is called only where another one, which is split, runs its own forward."""
        return any(region.path.startswith(f"{path}.") for path in self._split)

    def _found(self) -> dict[int, Region]:
        found = self._by_module
        if found is None:
            with self._finding:  # threads that begin together share the regions
                found = self._by_module
                if found is None:
                    found = self._by_module = self._find()
        return found

    def _find(self) -> dict[int, Region]:
        root, report = self._state.root, self._state.report
        self._split = frozenset(self._state.known.split)
        specs = find_regions(root, whole=self._may_be_whole, split=self._split)
        # a region whose block stayed where it is keeps what it knows
        known = {(spec.path, id(region.module)): region for spec, region in self._placed}
        found = [(spec, known.get((spec.path, id(spec.module))) or self._make(spec)) for spec in specs]
        self._placed, self._seats = found, Seats(root, [spec.path for spec in specs])
        inside = {id(sub) for spec in specs if spec.path not in self._split for sub in spec.module.modules()}
        own = {type(sub) for sub in root.modules() if id(sub) not in inside or sub is root}
        blocks = {type(sub) for spec in specs if spec.module is not root for sub in spec.module.modules()}
        self._sets_names = any(map(assigns_names, own)) or bool(set_for_blocks(own, blocks)) or takes_out(blocks)
        if not found:
            report.note("no region: the module holds no weights; it runs as it is")
        for path, kind in beyond(root, self._state.besides):
            report.eager(path, f"this {kind} lies in a plain object, where no block is looked for")
        return {id(spec.module): region for spec, region in found}

    # -- what they hold ----------------------------------------------------------------------------------

    def released_weights(self, used: list[Binding]) -> list[Slot]:
        """Weights that a step which used these bindings does not need as they are, because it has them prepared."""
        ids = {id(binding) for binding in used}
        found, needed = [], set()
        for region in self.regions:
            without = released_weights(region, ids)
            for place, (table, name) in enumerate(region.weights.slots.slots):
                if place in without:
                    found.append((table, name))
                else:
                    needed.add((id(table), name))
        return [(table, name) for table, name in found if (id(table), name) not in needed]

    def release(self) -> bool:
        """Let go of prepared weights, without looking for regions. Whether there were any."""
        return any([region.release() for region in (self._by_module or {}).values()])

    def forget_all(self) -> None:
        """Forget every artefact of every region."""
        for region in self.regions:
            region.drop_artifacts()
