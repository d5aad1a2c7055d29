# SPDX-License-Identifier: Apache-2.0
"""Code of the host that asks about gradients and inference mode is answered as its call would answer it.

The trace itself runs without gradients and outside of inference mode: under that its tensors could not be written to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from threading import get_ident  # the plain one: hosts' code is told another number meanwhile (thread_number.py)
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..guards.gradient_answers import GIVEN, MODE, MODES, WEIGHT, Answers, Asked, Row
from ..system.process_settings import replaced
from .source_hashes import is_host_code

_INFERENCE = "is_inference_mode_enabled"
_OF_TENSORS: dict[Any, str] = {
    torch.Tensor.requires_grad.__get__: "requires_grad",  # type: ignore[attr-defined]
    torch.Tensor.is_inference: "is_inference",
}


class AskedGradients(TorchFunctionMode):
    """Answers for a call, and notes what was asked."""

    def __init__(
        self,
        answers: Answers,
        tensors: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        named: Mapping[str, Mapping[str, bool]],
    ) -> None:
        """answers: of the call. tensors, weights: what stands for them. named: of each weight, what it answers."""
        super().__init__()
        self._modes = answers[0]
        self._places: dict[int, tuple[str, Any, Mapping[str, bool]]] = {}
        for one, (name, own) in zip(weights, named.items(), strict=True):
            self._places[id(one)] = WEIGHT, name, own
        for number, (one, own) in enumerate(zip(tensors, answers[1], strict=False)):
            self._places[id(one)] = GIVEN, number, own
        self._rows: dict[Asked, bool] = {}

    @property
    def rows(self) -> list[Row]:
        """What was asked, with the answers."""
        return [[*asked, answer] for asked, answer in self._rows.items()]

    @contextmanager
    def told(self) -> Iterator[None]:
        """Inside the block code of the host on this thread is answered so; no other code and thread is."""
        here = get_ident()

        def answered(name: str, plain: Callable[[], bool]) -> Callable[[], bool]:
            def ask() -> bool:
                if get_ident() != here or not is_host_code(sys._getframe(1).f_code):
                    return plain()
                return self._note(MODE, None, name, self._modes.get(name, False)) or plain()

            return ask

        with ExitStack() as stack:
            stack.enter_context(self)
            for name, plain in MODES.items():
                stack.enter_context(replaced(torch, name, answered(name, plain)))
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = _OF_TENSORS.get(func)
        if name is None or not is_host_code(sys._getframe(1).f_code):
            return func(*args, **(kwargs or {}))
        place = self._places.get(id(args[0]))
        if place is not None:
            kind, at, own = place
            return self._note(kind, at, name, own[name])
        if name == "is_inference":  # what is computed in inference mode is of it
            return self._note(MODE, None, _INFERENCE, self._modes.get(_INFERENCE, False))
        return func(*args, **(kwargs or {}))

    def _note(self, kind: str, place: Any, name: str, answer: bool) -> bool:
        self._rows[kind, place, name] = answer
        return answer
