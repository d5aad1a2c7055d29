# SPDX-License-Identifier: Apache-2.0
"""Payloads as callables: one graph, or several that call each other."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch


class PreparingCode:
    """A loaded artefact with its preparation, called like any other: with all of its weights, and then the rest.

    code: the artefact after its preparation. before: the preparation. weights: how many of the inputs are weights.
    takes, keeps: which of them each reads.
    """

    def __init__(
        self,
        code: Callable[[list[Any]], Any],
        before: Callable[..., Any],
        weights: int,
        takes: list[int],
        keeps: list[int],
    ) -> None:
        self._code, self._before, self._weights = code, before, weights
        self._takes, self._keeps = getter(takes), getter(keeps)
        self.takes, self.keeps = takes, keeps

    def __call__(self, inputs: list[Any]) -> Any:
        """As `run`, with the weights prepared for this call alone."""
        return self.run(inputs, self.prepare(inputs))

    def prepare(self, inputs: list[Any]) -> list[torch.Tensor]:
        """The prepared tensors of a call's inputs."""
        return list(self._before(*self._takes(inputs)))

    def run(self, inputs: list[Any], prepared: list[torch.Tensor]) -> Any:
        """The artefact's results, from weights that are prepared already."""
        return self._code([*self._keeps(inputs), *prepared, *inputs[self._weights :]])


def getter(places: list[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """What takes these places of a list."""
    if len(places) == 1:
        only = places[0]
        return lambda inputs: (inputs[only],)
    return operator.itemgetter(*places) if places else lambda inputs: ()


class FoldedCode:
    """Loaded pieces, called as the whole would be: with all of its inputs, for the list of its results."""

    def __init__(self, pieces: Sequence[Callable[..., Any]], told: dict[str, Any]) -> None:
        self._sizes: list[list[int]] = told["sizes"]
        self._output: list[int] = told["output"]
        last = {value: number for number, (_, takes) in enumerate(told["calls"]) for value in takes}
        over: dict[int, list[int]] = {}
        for value, number in last.items():
            if value not in self._output:
                over.setdefault(number, []).append(value)
        self._calls = [
            (pieces[piece], getter(takes), over.get(number, [])) for number, (piece, takes) in enumerate(told["calls"])
        ]

    def __call__(self, *inputs: Any) -> list[Any]:
        values = [*inputs, *(inputs[i] if d < 0 else inputs[i].shape[d] for i, d in self._sizes)]
        for piece, takes, over in self._calls:
            values += piece(*takes(values))
            for value in over:  # the last call that needs it was made: its memory is free for the next
                values[value] = None
        return [values[i] for i in self._output]


Run = Callable[..., Sequence[torch.Tensor]]


# with a part's code, its inputs, and which of them is the prompt; it returns the part's results
Answer = Callable[[Run, tuple[Any, ...], int], Sequence[torch.Tensor]]


_answer: ContextVar[Answer | None] = ContextVar("nexfort_prompted", default=None)


class PromptedCode:
    """Loaded code with its parts, called as the whole would be: with all of its inputs."""

    def __init__(self, code: Run, parts: Sequence[Run], told: dict[str, Any]) -> None:
        self._code, self._keeps = code, getter(told["keeps"])
        rows = told["parts"]
        self._parts = [(part, getter(row["takes"]), row["of"]) for part, row in zip(parts, rows, strict=True)]

    def __call__(self, *inputs: Any) -> Any:
        answer, made = _answer.get(), list[torch.Tensor]()
        for part, takes, of in self._parts:
            taken = takes(inputs)  # type: ignore[arg-type]
            made += part(*taken) if answer is None else answer(part, taken, of)
        return self._code(*self._keeps(inputs), *made)  # type: ignore[arg-type]


@contextmanager
def answered_by(answer: Answer | None) -> Iterator[None]:
    """Inside the block parts of this context's artefacts are not run but asked for; None: they are run."""
    token = _answer.set(answer)
    try:
        yield
    finally:
        _answer.reset(token)


Loaded = Callable[[list[Any]], Any]


class _WithConstants:
    """An artefact whose literal tensors are put in after its weights, on the device of the first weight or input."""

    def __init__(self, artefact: Any, constants: list[torch.Tensor], weights: int) -> None:
        self._artefact, self._constants, self._weights = artefact, constants, weights

    def __call__(self, inputs: list[Any]) -> Any:
        device = next((t.device for t in inputs if isinstance(t, torch.Tensor)), None)
        if device is not None and self._constants[0].device != device:
            self._constants = [c if c.ndim == 0 else c.to(device) for c in self._constants]
        return self._artefact(*inputs[: self._weights], *self._constants, *inputs[self._weights :])
