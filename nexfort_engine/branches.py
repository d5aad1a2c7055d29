# SPDX-License-Identifier: Apache-2.0
"""What a block's code asked about sizes while it was captured, also where torch answered without leaving a guard.

Torch takes for granted that a size which may vary is at least 2, so `if x.shape[0] == 1` is answered by that alone, and
nothing is left to check when a call of batch 1 comes. Here every answer given to the block's own code is noted; it is
among the conditions of the artefact. Answers given to torch's own code choose between equal results and are not.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

_TORCH = str(Path(torch.__file__).parent)
# the way from a comparison in the block's code to the shape environment
_BETWEEN = (f"{_TORCH}/__init__.py", f"{_TORCH}/fx/experimental/", f"{_TORCH}/_utils", f"{_TORCH}/utils/_stats.py")


@contextlib.contextmanager
def noted() -> Iterator[list[tuple[Any, Any, Any]]]:
    """Note (shape environment, expression, answer) for each question of code outside torch inside the block.

    Replaces one method of torch's for the length of the block; the caller holds the capture's lock.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    original = ShapeEnv.evaluate_expr
    answers: list[tuple[Any, Any, Any]] = []

    def evaluate_expr(self: Any, expr: Any, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, expr, *args, **kwargs)
        if asked_by_block(sys._getframe(1)):
            answers.append((self, expr, answer))
        return answer

    ShapeEnv.evaluate_expr = evaluate_expr  # type: ignore[assignment,method-assign]
    try:
        yield answers
    finally:
        ShapeEnv.evaluate_expr = original  # type: ignore[method-assign]


def asked_by_block(frame: Any) -> bool:
    """Whether the code that asked, below torch's machinery for symbolic sizes, lies outside torch."""
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    return frame is not None and not frame.f_code.co_filename.startswith(_TORCH)


def relations(env: Any, answers: list[tuple[Any, Any, Any]]) -> list[Any]:
    """The noted answers of one shape environment as relations that held at capture."""
    import sympy

    found = []
    for asked, expr, answer in answers:
        if asked is env and answer in (True, False, sympy.true, sympy.false):
            found.append(env.replace(expr if answer else sympy.Not(expr)))
    return found
