# SPDX-License-Identifier: Apache-2.0
"""Leases: weights that a host keeps elsewhere, as tensors for the length of one call.

A host may leave weights in main memory, keep them in another dtype, or patch them on the way in. It does so with code
of its own in each layer. A region whose layers need that leases the finished tensors just before its code runs and
gives them back after it, so that one artefact serves the resident block and the offloaded one. What the layers' code
looks at to decide is hidden from the capture (capture/shadow_module.py): it always sees a resident layer.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..modules.tree import ABSENT, CASTS_TO_INPUT, Slot, modules_of
from .subclass_unwrap import is_plain

Placeholders = Mapping[int, torch.Tensor]  # by their places, what is given for weights that need not be leased
NO_PLACEHOLDERS: Placeholders = {}
_SMALL = 1 << 16  # numbers of a weight of which a copy may be kept


class NotLeased(Exception):
    """The host does not give this layer's weights away now. The text is the reason."""


class WeightLease(Protocol):
    """Weights of some layers, taken out."""

    @property
    def tensors(self) -> list[dict[str, torch.Tensor]]:
        """A dictionary by name for each layer."""

    def release(self) -> None:
        """The call was issued; the host may move the memory when the device has come this far."""

    @property
    def kept(self) -> bool:
        """Whether the host keeps the tensors where they are, so that they may be had again for asking."""

    def reacquire(self) -> bool:
        """Take the same tensors out once more, if each is still where it was. False: nothing was taken."""


class WeightProvider(Protocol):
    """What a host gives an engine to lease from."""

    @property
    def hidden(self) -> Mapping[str, Any]:
        """What a resident layer shows to code that decides; modulestate.ABSENT: what it has not."""

    @property
    def copies(self) -> frozenset[str]:
        """Attributes in which the host keeps copies of a layer's weights. They are no weights or state of the block."""

    @property
    def signs(self) -> tuple[str, ...]:
        """Attributes of which at least one is set in a layer, or its class, that is not resident."""

    @property
    def reports_versions(self) -> bool:
        """Whether `weights_version` ever tells anything of this network."""

    def weights_version(self) -> Hashable:
        """Equal as long as no weight of the network gets other numbers. None: that cannot be told now."""

    def room(self, device: torch.device) -> int:
        """Bytes of a device that the host would give up at once to who asks for memory, besides what is free."""

    def can_release(self, device: torch.device) -> bool:
        """Whether weights make room on a device when others are used in their place (`release`)."""

    @property
    def layout(self) -> Hashable:
        """Where the network's weights lie, if not all make room by themselves (`is_release_profitable`), or None."""

    def is_release_profitable(self, groups: list[list[nn.Module]]) -> list[bool]:
        """Of groups of layers that could be done without, which would make room for what is used in their place."""

    def release(self, layers: list[nn.Module], kept: Iterable[list[torch.Tensor]] = ()) -> int:
        """Give back what is held of a device for these layers alone, if it is worth it: nobody will ask for it soon.

        kept: what is used in their place; it may be moved, into the same lists. Returns bytes. Who leases from them
        all the same gets what they hold, as if they had not been leased before.
        """

    @property
    def has_pending_release(self) -> bool:
        """Whether more could be given back by now for what `release` was asked last."""

    def poll_versions(self, run: object) -> None:
        """Once for each run, see whether weights changed that the host holds elsewhere; `weights_version` tells."""

    def stop_releasing(self) -> None:
        """Give nothing back any more for what `release` was asked: what was used instead is given up."""

    def can_lease(self, layer: nn.Module) -> bool:
        """Whether the layer's weights can be leased: it is of a kind whose code is known."""

    def needs_host_forward(self, layer: nn.Module) -> bool:
        """Whether the layer's own code would now do more than use its weights. Raises NotLeased."""

    def unpacks(self, layer: nn.Module, name: str) -> bool:
        """Whether a weight that is no plain tensor is leased as one now."""

    def shown(self, layer: nn.Module) -> Mapping[str, Any]:
        """What a layer shows besides `hidden`, while it has to be leased."""

    def covers(self, layer: nn.Module) -> bool:
        """Whether `weights_version` tells all that changes the layer's weights as they are leased."""

    def dtype(self, layer: nn.Module, name: str) -> torch.dtype:
        """The dtype that a weight has when it is leased."""

    def acquire(self, layers: list[nn.Module], device: torch.device) -> WeightLease:
        """The layers' weights on a device. Raises NotLeased."""


@dataclass(frozen=True, eq=False)
class _KeptLease:
    """What a block leased and the host keeps in its place.

    given: the block's weights with those on lease, and what stood for those that were not, in their places.
    """

    device: torch.device
    placeholders: Placeholders
    lease: WeightLease
    given: list[torch.Tensor]


class Layers:
    """The layers of one block that a host may lease, and where their weights stand in the block's list."""

    def __init__(
        self, provider: WeightProvider, module: nn.Module, names: list[str], without: Collection[str] = ()
    ) -> None:
        """without: dotted names of submodules that take their weights themselves, with all below them."""
        self.provider, self._module = provider, module
        places = {name: i for i, name in enumerate(names)}
        self._all: list[tuple[nn.Module, dict[str, int]]] = []
        inside = list(modules_of(module, without))
        for path, sub in inside:
            if provider.can_lease(sub):
                own = {name: places[f"{path}.{name}" if path else name] for name in _weights_of(sub)}
                self._all.append((sub, own))
        # in two lists, because `map` over them takes half the time of a comprehension
        self._owns = [layer.__dict__ for layer, _ in self._all for _ in provider.signs]
        self._names = [name for _ in self._all for name in provider.signs]
        leased = {id(layer) for layer, _ in self._all}
        others = [sub.__dict__ for _, sub in inside if id(sub) not in leased]
        self._strangers = [own for own in others for _ in provider.signs]
        self._their_names = [name for _ in others for name in provider.signs]
        self._by_class = any(getattr(type(layer), name, None) for layer, _ in self._all for name in provider.signs)
        self._seen: list[Any] = []
        self._due: list[tuple[nn.Module, dict[str, int]]] = []
        self._last: _KeptLease | None = None
        self.is_covered = True  # whether the host's version tells all that changes weights on lease

    def hidden(self) -> dict[int, Mapping[str, Any]]:
        """id(submodule) -> the attributes that a capture is shown in the place of its own."""
        copies = dict.fromkeys(self.provider.copies, ABSENT)
        everywhere: dict[int, Mapping[str, Any]] = {id(sub): copies for sub in self._module.modules()}
        leased = {id(layer): {CASTS_TO_INPUT: True, **self.provider.shown(layer)} for layer, _ in self._due}
        hidden = {**copies, **self.provider.hidden}
        return everywhere | {id(layer): {**hidden, **leased.get(id(layer), {})} for layer, _ in self._all}

    def resident(self) -> bool:
        """Whether no layer has to be leased. Asked on every call: flat, and without a call for each layer."""
        return not self._by_class and not any(map(dict.get, self._owns, self._names))

    def strangers(self) -> bool:
        """Whether a layer that cannot be leased is not resident: the host's own code fetches what it needs."""
        return any(map(dict.get, self._strangers, self._their_names))

    @property
    def all(self) -> list[tuple[nn.Module, dict[str, int]]]:
        """Every layer that may ever have to be leased."""
        return self._all

    @property
    def kept(self) -> bool:
        """Whether what was leased last stays where it is, so that it may be had again."""
        return self._last is not None

    def due(self) -> list[tuple[nn.Module, dict[str, int]]]:
        """The layers that have to be leased now; the same list as long as nothing changed. Raises NotLeased."""
        if self.resident():
            self.is_covered = True
            return []
        signs = list(map(dict.get, self._owns, self._names))
        if not self._seen or signs != self._seen:
            self._last = None
            self._due = [row for row in self._all if self.provider.needs_host_forward(row[0])]
            self.is_covered = all(self.provider.covers(layer) for layer, _ in self._due)
            self._seen = [list(sign) if type(sign) is list else sign for sign in signs]  # lists change in place
        return self._due

    def dtypes(self, due: list[Any], weights: list[torch.Tensor]) -> dict[int, torch.dtype]:
        """Place in the block's list -> dtype, for those weights of the layers `due` that are cast on their way."""
        leased = {i: self.provider.dtype(layer, name) for layer, places in due for name, i in places.items()}
        return {i: dtype for i, dtype in leased.items() if weights[i] is not None and dtype != weights[i].dtype}

    def unpacked(self, due: list[Any]) -> frozenset[int]:
        """Places in the block's list of those weights of the layers `due` that are leased as plain tensors only."""
        return frozenset(i for layer, own in due for name, i in own.items() if self.provider.unpacks(layer, name))

    def reacquire(
        self, due: list[Any], device: torch.device, placeholders: Placeholders = NO_PLACEHOLDERS
    ) -> _KeptLease | None:
        """What was leased last, taken out once more, if nothing changed since."""
        last = self._last
        return (
            self.still(device) if last is not None and due is self._due and last.placeholders is placeholders else None
        )

    def still(self, device: torch.device) -> _KeptLease | None:
        """What was leased last, taken out once more, if it is where it was; whether it is still due was not asked."""
        last = self._last
        return last if last is not None and last.device == device and last.lease.reacquire() else None

    def forget(self) -> None:
        """The block's weights are no longer those with which something was leased."""
        self._last = None

    def placeholders_for(self, due: list[Any], weights: list[torch.Tensor], needed: Collection[int]) -> Placeholders:
        """What lets layers of these be left out of later leases, by the places of their weights.

        weights: the block's, as they were leased. needed: places of those that are used as they are. A copy of small
        ones will do; in the place of large ones that nobody needs stands something empty.
        """
        found: dict[int, torch.Tensor] = {}
        for _, places in due:
            large = [i for i in places.values() if weights[i].numel() > _SMALL]
            if large and not any(i in needed for i in large):
                found |= {i: weights[i].new_empty(0) if i in large else weights[i].clone() for i in places.values()}
        return found

    def acquire(
        self,
        due: list[Any],
        weights: list[torch.Tensor],
        device: torch.device,
        placeholders: Placeholders = NO_PLACEHOLDERS,
    ) -> tuple[list[torch.Tensor], WeightLease]:
        """The block's weights with those of the layers `due` on a device, until the lease ends. Raises NotLeased.

        A layer is left out if something stands for each of its weights.
        """
        wanted = [(layer, places) for layer, places in due if not placeholders.keys() >= set(places.values())]
        lease = self.provider.acquire([layer for layer, _ in wanted], device)
        given, keep = list(weights), lease.kept and due is self._due
        for i, instead in placeholders.items():
            given[i] = instead
        for (_, places), tensors in zip(wanted, lease.tensors, strict=True):
            for name, i in places.items():
                given[i] = _laid_out(tensors[name], weights[i])
                keep &= given[i] is tensors[name]  # nothing but what the host keeps anyway is held on to between calls
        self._last = _KeptLease(device, placeholders, lease, given) if keep else None
        return given, lease

    def examples(self, weights: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """The block's weights as they would be leased, without their data."""
        found, due = list(weights), self.due()
        dtypes, unpacked = self.dtypes(due, weights), self.unpacked(due)
        for i in (i for _, places in due for i in places.values()):
            found[i] = _blank(weights[i], dtypes.get(i, weights[i].dtype), device, plain=i in unpacked)
        return found


def layers_in(root: nn.Module, slots: Collection[Slot]) -> list[nn.Module]:
    """The layers of a network all of whose weights lie in these slots."""
    there = {(id(table), name) for table, name in slots}
    rows = [(sub, [(id(sub._parameters), name) for name in _weights_of(sub)]) for sub in root.modules()]
    return [sub for sub, own in rows if own and there.issuperset(own)]


def _blank(own: torch.Tensor, dtype: torch.dtype, device: torch.device, *, plain: bool) -> torch.Tensor:
    """A weight's placeholder. One that is no plain tensor, nor says what it is made of, is leased as a plain one."""
    if is_plain(own) or (is_traceable_wrapper_subclass(own) and not plain):
        return torch.empty_like(own, dtype=dtype, device=device)
    return torch.empty(tuple(own.shape), dtype=dtype, device=device)


def _laid_out(leased: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """A leased weight with the strides of the layer's own, for which code was made; a host may lose them on the way."""
    if is_plain(leased) and not is_plain(own):
        return leased
    if leased.stride() == own.stride() or leased.shape != own.shape:
        return leased
    return torch.empty_strided(own.shape, own.stride(), dtype=leased.dtype, device=leased.device).copy_(leased)


def _weights_of(layer: nn.Module) -> list[str]:
    return [name for name, value in layer._parameters.items() if value is not None]
