# SPDX-License-Identifier: Apache-2.0
"""Step-invariant values: what a step computes of inputs that stay the same in all steps, kept beside its CUDA graph.

A host may say of a prompt that it is the last step's. What is computed of it and of weights alone is then the same too:
keys and values that blocks make of it (lowering/prompt_subgraph.py), whole regions such as the one that projects it,
what the network's own code does with it in between. While a step is observed such calls are remembered with their
results; while it is captured each is answered with that result, so that the step's graph only reads it. A graph of its
own computes all of them anew, into the same memory, whenever an input or the weights are others (`renew`).

That is sound: what lasts is known by its memory, which nothing else is given while it is held, and a call is the same
if code, places in memory and plain arguments are. Who writes to what lasts, or may do so with a kernel of its own, ends
all of it. Not seen is what writes without an operator, such as an extension of C++ that is called as a function.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from ..guards.call_spec import Flat
from ..lowering.loaded_code import Answer, Run, answered_by
from ..runtime.artifact import Binding
from ..system.kernel_launches import noted_triton_launches
from ..weights.prepack_entry import PrepackEntry
from .host_constants import Watch, is_function, tensors_in, written
from .step_call import StepCall, empty_as, overlaps

Call = Callable[[], Sequence[torch.Tensor]]


@dataclass
class _StepInvariant:
    """A call on what lasts alone, and what it gave, which is nobody else's to write to."""

    again: Call
    results: Sequence[torch.Tensor]


class StepInvariants(Watch, TorchDispatchMode):
    """Inside the block operators run as they do anyway; those that give a known step-invariant value are answered.

    slots: copies of the call's tensors that last, by their places; the step is run on them. most: bytes of results that
    are kept. apart: entered where memory is taken that outlives the call.

    reason: why nothing must be kept, None while there is none.
    """

    supports_higher_order_operators = True

    def __init__(
        self, slots: Mapping[int, torch.Tensor], most: int, apart: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        super().__init__()
        self.slots = dict(slots)
        self.reason: str | None = None
        self.graph: Any = None  # torch.cuda.CUDAGraph of the program
        self.bytes, self._most, self._apart = 0, most, apart
        self.answered = 0  # calls that were not run, since their results were known
        self._known: dict[Hashable, _StepInvariant] = {}
        self._observes, self._inside = True, False
        self._watching = ExitStack()
        self._held: dict[int, Any] = {}  # storages of what lasts, so that no other has their place
        self._made_of: Hashable = None  # what the results are results of
        for slot in self.slots.values():
            self._hold(slot)

    @classmethod
    def of(cls, call: StepCall, most: int, apart: Callable[[], AbstractContextManager[Any]]) -> StepInvariants:
        """For a call some of whose tensors last."""
        lasting = [call.tensors[place] for place in call.step_invariant]
        with apart():
            slots = empty_as(lasting, lasting[0].device)
            for slot, tensor in zip(slots, lasting, strict=True):
                slot.copy_(tensor)
        return cls(dict(zip(call.step_invariant, slots, strict=True)), most, apart)

    @property
    def count(self) -> int:
        """How many calls are known."""
        return len(self._known)

    def observed(self, made_of: Hashable) -> bool:
        """The step that is to be captured has ended, on inputs of that name. Whether there is anything to keep."""
        self._observes, self._made_of = False, made_of
        self._held.clear()
        for slot in self.slots.values():
            self._hold(slot)
        return bool(self._known) and self.reason is None

    def program(self) -> Callable[[], None]:
        """What makes all results anew, in the order in which they need each other; from now on it alone can."""
        invariants = list(self._known.values())
        self._known = {key: _StepInvariant(list, invariant.results) for key, invariant in self._known.items()}

        def compute() -> None:
            for invariant in invariants:
                for result, made in zip(invariant.results, invariant.again(), strict=True):
                    result.copy_(made)

        return compute

    def take_graph(self, graph: Any, *, launch: bool) -> None:
        """The program was captured. launch: what its graph takes is there from its first launch on, which is now."""
        self.graph = graph
        if launch:
            graph.replay()

    def renew(self, tensors: Sequence[torch.Tensor], made_of: Hashable) -> None:
        """Have slots and results be those of a call's tensors. made_of: the name of these, and of the weights."""
        if made_of == self._made_of:
            return
        self._made_of = None
        for place, slot in self.slots.items():
            slot.copy_(tensors[place])
        self.graph.replay()
        self._made_of = made_of

    # -- what lasts --------------------------------------------------------------------------------------

    def is_step_invariant(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is, or looks at, what stays the same."""
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        return plain and tensor.untyped_storage()._cdata in self._held

    def _hold(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._held[storage._cdata] = storage

    def _spoil(self, reason: str) -> None:
        self.reason = self.reason or reason

    # -- calls -------------------------------------------------------------------------------------------

    def run(
        self,
        binding: Binding,
        weights: list[torch.Tensor],
        flat: Flat,
        tensors: list[torch.Tensor],
        kept: PrepackEntry | None,
        *,
        parts: bool,
        whole: bool,
    ) -> Any:
        """Run a region's artefact.

        parts, whole: whether what it makes of a prompt may be a step-invariant value, and all of it: its weights are
        where they are between steps, and the host says when any of them changes.
        """
        artefact = binding.artefact
        again = partial(binding.run, weights, flat, tensors, kept)
        if any(self.is_step_invariant(tensors[artefact.tensors[place]]) for place in artefact.mutated):
            self._spoil("a region writes to it")
        with self._inside_an_artefact(partial(self._of_prompt, id(binding)) if parts else None):
            if whole and tensors and all(map(self.is_step_invariant, tensors)):
                with answered_by(None):
                    return self._answered((id(binding), *flat.ints, _places(tensors)), lambda: [again()])[0]
            return again()

    def _of_prompt(self, of_whom: int, part: Run, inputs: tuple[Any, ...], of: int) -> Sequence[torch.Tensor]:
        """What a part of an artefact gives, which is given weights and a prompt."""
        if not self.is_step_invariant(inputs[of]):
            return part(*inputs)
        return self._answered((of_whom, id(part), _places(inputs)), lambda: part(*inputs))

    @contextmanager
    def _inside_an_artefact(self, answer: Answer | None) -> Iterator[None]:
        """Its own operators are none: its kernels may write to what they give, which no operator shows."""
        with self._nothing_of_its_own(), answered_by(answer):
            yield

    @contextmanager
    def _nothing_of_its_own(self) -> Iterator[None]:
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    def __enter__(self) -> Any:
        self._watching.enter_context(noted_triton_launches(self._launched))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            self._watching.close()

    def _launched(self, name: str) -> None:
        """A kernel was launched. That of an operator does what the operator says; others may write anywhere."""
        if not self._inside:
            self._spoil(f"its code launches a Triton kernel ({name}), which may write to it")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        with self._nothing_of_its_own():
            return self._operator(func, args, kwargs)

    def _operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        taken = tensors_in((args, kwargs))
        lasting = [tensor for tensor in taken if self.is_step_invariant(tensor)]
        if not lasting:
            return func(*args, **kwargs)
        if not isinstance(func, torch._ops.OpOverload):
            self._spoil(f"the operator {func} takes it, of which nothing is known")
        elif any(map(self.is_step_invariant, written(func, args, kwargs))):
            self._spoil(f"its code writes to it ({func._schema.name})")
        elif len(lasting) == len(taken) and _makes(func) and is_function(func, kwargs):
            key = _key(func, args, kwargs)
            if key is not None:
                results = self._answered(key, lambda: [func(*args, **kwargs)])
                return results[0]
        return func(*args, **kwargs)

    def _answered(self, key: Hashable, again: Call) -> Sequence[torch.Tensor]:
        """What a call on what lasts gives: as it is known, or run, and known from now on while a step is observed."""
        known = self._known.get(key)
        if known is None:
            if not self._observes:
                return again()
            with self._apart():
                known = _StepInvariant(again, list(again()))
            size = sum(result.nbytes for result in known.results)
            if self.bytes + size > self._most or any(map(overlaps, known.results)):
                return known.results
            self.bytes += size
            self._known[key] = known
        else:
            self.answered += 1
        for result in known.results:
            self._hold(result)
        return known.results


def _makes(func: Any) -> bool:
    """Whether an operator gives one tensor, in memory of its own."""
    returns = func._schema.returns
    return len(returns) == 1 and returns[0].alias_info is None and str(returns[0].type) == "Tensor"


def _places(values: Sequence[Any]) -> Hashable:
    """Where tensors lie, and how; other values as they are."""
    return tuple(
        (value.data_ptr(), value.shape, value.stride(), value.dtype, value.is_conj(), value.is_neg())
        if isinstance(value, torch.Tensor)
        else value
        for value in values
    )


def _key(func: Any, args: Any, kwargs: Any) -> Hashable | None:
    """What calls of an operator that give the same have in common; None where that cannot be compared."""
    leaves, spec = tree_flatten((args, kwargs))
    key = (func, str(spec), tuple(map(type, leaves)), _places(leaves))
    try:
        hash(key)
    except TypeError:
        return None
    return key
