# SPDX-License-Identifier: Apache-2.0
"""An artefact in this process: what its manifest says, the loaded code, and its binding to one module.

The manifest is plain JSON, so that it can be checked before anything is loaded: shape conditions, read-set guards, the
attributes the capture read, the hashes of the host's source files, and how a call maps to the code's inputs. One
artefact serves every module of the same structure; a `Binding` ties it to one of them.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Collection, Hashable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import nn

from ..cache.entry import Entry
from ..capture.types import Captured
from ..guards import option_recorder
from ..guards.call_spec import Flat, Leaves, unflatten
from ..guards.callbacks import called_with
from ..guards.collectives import facts_of, group_names, speaking_in
from ..guards.given_changes import make_again, parsed
from ..guards.module_guards import ModuleState
from ..guards.name_guards import Dependence
from ..guards.name_resolver import Row
from ..guards.option_guards import checker, from_json_path, json_path
from ..guards.scalar_inputs import look
from ..guards.shape_guards import Conditions
from ..guards.tensor_answers import Answers, fits
from ..lowering.loaded_code import Loaded, PreparingCode
from ..modules.boundaries import boundaries
from ..modules.channels_last import as_held
from ..modules.memory_format import is_plain, kind_of
from ..modules.module_keys import holds_module
from ..modules.tree import PLAIN, Hidden, WeightSlots, modules_of, tensors_of
from ..weights.prepack_entry import PrepackEntry
from .lru_mapping import Recent

_MOST_FITS = 64


def manifest_of(captured: Captured, kind: str, driver: int | None, info: Mapping[str, Any]) -> dict[str, Any]:
    """What must be stored beside the payload. Raises Refused for what cannot be written down.

    driver: the oldest one that runs it (key.driver_needed). info: whatever those want to see who look through the
    store; it does not tell artefacts apart.
    """
    return {
        "kind": kind,
        "driver": driver,
        "weights": captured.weights,
        "tensors": captured.tensors,
        "options": [json_path(path) for path in captured.options],
        "option_kinds": captured.option_kinds,
        "ints": captured.ints,
        "strengths": [[path, name, list(keys)] for path, name, keys in captured.strengths],
        "conditions": captured.conditions.as_json(),
        "guards": captured.guards,
        "reads": captured.reads,
        "output": _spec_to_json(captured.output),
        "mutated": captured.mutated,
        "by_strides": captured.by_strides,
        "writes": captured.writes,
        "changes": captured.changes,
        "asked": captured.asked,
        "sites": captured.sites,
        "boundaries": captured.boundaries,
        "groups": captured.groups,
        "images": captured.images,
        "lays_held": captured.lays_held,
        "sources": captured.sources,
        "names": captured.names,
        "only_here": captured.only_here,
        "modules": captured.modules,
        "info": {"kind": kind, **info},
    }


def _spec_to_json(spec: Any) -> Any:
    if isinstance(spec, str):
        return spec
    if spec[0] == "=":
        if type(spec[1]) not in PLAIN:
            raise option_recorder.Refused(f"it returns a {type(spec[1]).__qualname__}")
        return {"value": spec[1]}
    kind = spec[0]
    named = len(spec) > 1 and isinstance(spec[1], tuple) and all(isinstance(n, str) for n in spec[1])
    head = {"module": kind.__module__, "class": kind.__qualname__}
    if named and kind not in (list, tuple, torch.Size):
        return {**head, "names": list(spec[1]), "items": [_spec_to_json(s) for s in spec[2:]]}
    return {**head, "items": [_spec_to_json(s) for s in spec[1:]]}


def _spec_from_json(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if "value" in value:
        return ("=", value["value"])
    kind: Any = sys.modules[value["module"]]
    for part in value["class"].split("."):
        kind = getattr(kind, part)
    items = [_spec_from_json(v) for v in value["items"]]
    return (kind, tuple(value["names"]), *items) if "names" in value else (kind, *items)


def _always() -> bool:
    return True


def _own_tensors(module: nn.Module, without: Collection[str]) -> list[torch.Tensor]:
    """The tensors of a module tree, without those of these modules and what is below them."""
    return [tensor for _, sub in modules_of(module, without) for _, _, tensor in tensors_of(sub)]


@dataclass(frozen=True)
class GuardFailure:
    """Why an artefact may not serve a call.

    sizes: everything but the sizes fits. narrow: it was captured where a size was 1, and the call has more. wide: the
    call has a size of 1 where it was captured with more. fixed: the code is for one size, and the call has another.
    parity: the code is for even or for odd numbers, and the call has another.
    """

    reason: str
    sizes: bool = False
    narrow: bool = False
    wide: bool = False
    fixed: bool = False
    parity: bool = False
    check: Callable[[list[Any]], bool] = lambda _: True  # for which mappings this is so


class Artefact:
    """A stored artefact as the engine uses it; its code is loaded on first use."""

    def __init__(self, entry_id: str, primary: str, manifest: Mapping[str, Any], entry: Entry | None = None) -> None:
        """entry: where its code is, if it comes from the store."""
        self.id, self.primary, self.entry = entry_id, primary, entry
        self.weights: list[int] = manifest["weights"]
        self.tensors: list[int] = manifest["tensors"]
        self.options = [from_json_path(path) for path in manifest["options"]]
        self.option_kinds = [tuple(kind) for kind in manifest["option_kinds"]]
        self.ints: list[int] = manifest["ints"]
        self.strengths: list[list[Any]] = manifest["strengths"]
        self.conditions = Conditions(**manifest["conditions"])
        self.guards: list[list[Any]] = manifest["guards"]
        self.check = checker(self.guards)
        self.by_modules = any(holds_module(key) for _, path, _ in self.guards for key in from_json_path(path))
        self.reads: list[list[Any]] = manifest["reads"]
        self.names: list[Row] = manifest["names"]
        self.output = _spec_from_json(manifest["output"])
        self.mutated: list[int] = manifest["mutated"]
        self.by_strides: list[int] = manifest["by_strides"]
        self.writes: list[list[Any]] = manifest["writes"]
        self.changes = parsed(manifest["changes"])
        self.asked: list[list[Any]] = manifest["asked"]
        self.sites: list[list[list[Any]]] = manifest["sites"]
        self.boundaries: list[str] = manifest["boundaries"]
        self.groups: list[list[int]] = manifest["groups"]
        self.lays_held: bool = manifest.get("lays_held", False)
        self.images: bool = manifest["images"]  # they lie with channels innermost
        self.unwatched = False  # whether its operators need not be watched again (cudagraphs/host_constants.py)
        self.foreign = False  # whether some of them are of others, as far as they were watched (capture_check.py)
        self.is_new = False  # it was compiled in this process, and none of its results was compared with eager's
        self.withdrawn = False  # its result was another than eager's
        self.code: Loaded | None = None
        self._fits: Recent[Any, bool] = Recent(_MOST_FITS)  # sizes and numbers of calls that the conditions hold for

    def take_code(self, code: Loaded) -> None:
        """The artefact's code is loaded."""
        self.code = code

    def note_new(self) -> None:
        """It was compiled in this process."""
        self.is_new = True

    def note_compared(self) -> None:
        """Its first result is compared now, or cannot be."""
        self.is_new = False

    def withdraw(self) -> None:
        """No call may use it any more."""
        self.withdrawn = True

    def note_watched(self, *, is_enough: bool) -> None:
        """Its operators were watched. is_enough: they need not be watched again."""
        self.unwatched = is_enough

    def note_foreign(self) -> None:
        """An operator of others ran in it."""
        self.foreign = True

    @property
    def others(self) -> bool:
        """Whether it calls code of others, or speaks with other processes."""
        return bool(self.sites or self.groups)

    def speaks(self, module: nn.Module) -> bool:
        """Whether a module holds the groups now that it speaks in, of the sizes and ranks that it rests on."""
        if not self.groups:
            return True
        ranks = any(rank >= 0 for _, _, rank in self.groups)
        return facts_of([row[0] for row in self.groups], group_names(module, self.reads), ranks=ranks) == self.groups

    def guard_failure(self, flat: Flat) -> GuardFailure | None:
        """Why a call with these sizes, numbers and mappings may not use the artefact, or None."""
        extra = [option_recorder.look(flat.mappings, path) for path in self.options]
        where = "the lists and mappings" if flat.lists else "the options"
        if not all(isinstance(t, torch.Tensor) for t in extra):
            return GuardFailure(f"what was a tensor in {where} is none")
        if list(map(kind_of, extra)) != self.option_kinds or not all(map(is_plain, extra)):
            return GuardFailure(f"a tensor of {where} is of another type, rank or device")
        if not self.check(flat.mappings):
            return GuardFailure(f"{where} answer differently from the captured call")
        shapes = tuple([t.shape for t in (*flat.tensors, *extra)])
        key = (shapes, tuple(flat.ints))
        if self._fits.get(key):
            return None
        reason = self.conditions.broken(shapes, flat.ints)
        if not reason:
            self._fits[key] = True
            return None
        told = self.conditions
        parity = told.other_parity(shapes, flat.ints)
        narrow, wide = told.narrow(shapes, flat.ints), told.wide(shapes, flat.ints)
        return GuardFailure(parity or reason, True, narrow, wide, told.fixed(shapes), parity is not None, self.check)


class Binding:
    """One artefact for one module."""

    __slots__ = (
        *("_factors", "_groups", "_module", "_slots", "_strengths", "artefact", "code", "kept", "names", "plain"),
        *("prepack_failed", "state"),
    )

    def __init__(
        self, artefact: Artefact, module: nn.Module, hidden: Hidden | None = None, names: Dependence | None = None
    ) -> None:
        """names: what the artefact reaches by name, for modules of these classes; None where nobody watches."""
        assert artefact.code is not None, "an artefact is bound after its code was loaded"
        self.artefact, self.code, self._module = artefact, artefact.code, module
        self.kept: PrepackEntry | None = None  # prepared weights of the module
        self.prepack_failed: Hashable = None  # the `WeightProvider.layout` in which keeping them made no room
        self.state, self.names = ModuleState(module, artefact.reads, hidden, artefact.boundaries), names
        self._groups = group_names(module, artefact.reads) if artefact.groups else []
        by_path = dict(module.named_modules()) if artefact.strengths else {}
        self._strengths = [(by_path[path].__dict__, name, keys) for path, name, keys in artefact.strengths]
        self._slots: WeightSlots | None = None  # of all tensors of the module, once a call is asked for more than sizes
        self._factors: tuple[list[float], list[torch.Tensor]] = ([], [])
        # the common case: one tensor, or a tuple of tensors, comes out; nothing is written back
        changes = artefact.writes or artefact.changes or artefact.mutated
        self.plain = artefact.output == "T" and not changes and not artefact.options

    def usable(self, flat: Flat) -> bool:
        """Whether the options answer as captured and the module is what it was.

        Sizes of the call's own tensors were checked before; those of tensors in the options are compared each time.
        """
        artefact = self.artefact
        if artefact.asked and not self._fits(flat):
            return False
        answers = artefact.guard_failure(flat) is None if artefact.options else artefact.check(flat.mappings)
        return answers and self.unchanged()

    def _fits(self, flat: Flat) -> bool:
        """Whether a call answers what code asked besides sizes."""
        if self._slots is None:
            self._slots = WeightSlots(self._module)
        return fits(self.artefact.asked, Answers.now(flat.tensors, flat.mappings, self._slots.read), self._module)

    def unchanged(self) -> bool:
        """Whether it may be used, and the module and what code reaches by name are what they were at capture."""
        return not self.artefact.withdrawn and (self.names is None or self.names.holds()) and self.state.unchanged()

    def _as_it_is(self) -> Callable[[], bool]:
        """Whether what code reads of the module and by name is what it is now, as far as no code of others holds it."""
        called = self.artefact.boundaries
        module, before = self._module, _own_tensors(self._module, called)
        names = self.names

        def still() -> bool:
            if names is not None:
                names.look()
            now = _own_tensors(module, called)
            same = len(now) == len(before) and all(map(is_, now, before))
            return same and boundaries(module) == tuple(called) and self.unchanged()

        return still

    def strengths(self) -> list[float]:
        """The numbers of the module that the artefact takes as inputs, as they are now."""
        return [look(table[name], keys) for table, name, keys in self._strengths]

    def _as_inputs(self) -> list[torch.Tensor]:
        now, (before, tensors) = self.strengths(), self._factors
        if now != before:
            tensors = [torch.tensor(value, dtype=torch.float32) for value in now]
            self._factors = now, tensors
        return tensors

    def keep(self, kept: PrepackEntry) -> None:
        """Keep prepared weights from call to call."""
        self.kept = kept

    def let_go(self) -> None:
        """Keep no prepared weights any more; they are made again when they are wanted."""
        self.kept = None

    def rule_out(self, layout: Hashable) -> None:
        """Keep no prepared weights while the `WeightProvider.layout` is this one: keeping them makes no room."""
        self.kept, self.prepack_failed = None, layout

    @property
    def prepares(self) -> bool:
        """Whether the artefact's weights are prepared in a step of its own, whose results may be kept."""
        return isinstance(self.code, PreparingCode)

    @property
    def needed(self) -> set[int]:
        """Places of the module's weights that the code reads as they are, for an artefact that `prepares`."""
        assert isinstance(self.code, PreparingCode)
        return {self.artefact.weights[i] for i in self.code.keeps}

    @property
    def prepared_of(self) -> set[int]:
        """Places of the module's weights that its preparation reads, for an artefact that `prepares`."""
        assert isinstance(self.code, PreparingCode)
        return {self.artefact.weights[i] for i in self.code.takes}

    def prepare(self, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        """The prepared tensors of the module's weights, for an artefact that `prepares`."""
        assert isinstance(self.code, PreparingCode)
        return self.code.prepare(list(map(weights.__getitem__, self.artefact.weights)))

    def run(
        self, weights: list[torch.Tensor], flat: Flat, tensors: list[torch.Tensor], kept: PrepackEntry | None = None
    ) -> Any:
        """Call the artefact. `tensors` are the call's, brought into the memory format of the signature.

        kept: its prepared weights, where they need not be made for this call.
        """
        artefact = self.artefact
        inputs: list[Any] = list(map(weights.__getitem__, artefact.weights))
        inputs += map(tensors.__getitem__, artefact.tensors)
        if artefact.options:
            held = (option_recorder.look(flat.mappings, path) for path in artefact.options)
            inputs += [as_held(tensor, artefact.lays_held) for tensor in held]
        inputs += [flat.ints[i] for i in artefact.ints]
        if self._strengths:
            inputs += self._as_inputs()
        with speaking_in(self._groups) if artefact.groups else nullcontext():
            if artefact.sites:
                changed = [tensors[artefact.tensors[i]] for i in artefact.mutated]
                still = self._as_it_is() if artefact.boundaries else _always
                with called_with(flat.mappings, artefact.sites, artefact.check, changed, self._module, still):
                    results = self._results(inputs, kept)
            else:
                results = self._results(inputs, kept)
        if any(map(operator.is_not, tensors, flat.tensors)):
            results = [_as_given(result, flat.tensors, tensors) for result in results]
        if self.plain:
            return results[0]
        for i in artefact.mutated:
            original, used = flat.tensors[artefact.tensors[i]], tensors[artefact.tensors[i]]
            if used is not original:
                original.copy_(used)
        for number, key, template in artefact.writes:
            flat.mappings[number][key] = self._written(template, flat)
        if artefact.changes:
            make_again(artefact.changes, flat.mappings, flat.tensors, results)
        return unflatten(artefact.output, Leaves(results))

    def _results(self, inputs: list[Any], kept: PrepackEntry | None) -> list[Any]:
        if kept is not None and isinstance(self.code, PreparingCode):
            return self.code.run(inputs, kept.tensors)
        return self.code(inputs)

    def _written(self, template: Any, flat: Flat) -> Any:
        if "plain" in template:
            return template["plain"]
        if "size" in template:
            i, d = template["size"]
            return flat.tensors[i].shape[d]
        kind = "tuple" if "tuple" in template else "list"
        items = [self._written(t, flat) for t in template[kind]]
        return tuple(items) if kind == "tuple" else items


def _as_given(result: Any, given: list[torch.Tensor], used: list[torch.Tensor]) -> Any:
    """A result, or the very tensor that was given where it is the copy of that which was used in its place.

    Whoever changes it in place would change the copy alone.
    """
    for own, copy in zip(given, used, strict=True):
        if copy is not own and isinstance(result, torch.Tensor) and _place(result) == _place(copy):
            return own
    return result


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
