# SPDX-License-Identifier: Apache-2.0
"""Captures that fail: what is raised is what ended the capture, and not what its end raises because of that."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nexfort_engine.cudagraphs import graph_capture


class Memory:
    """Memory of graphs whose capture cannot be ended: an error in it has ended it already, as CUDA says."""

    @contextlib.contextmanager
    def captured(self, graph: Any, stream: Any = None) -> Iterator[None]:
        yield
        raise RuntimeError("operation failed due to a previous error during capture")


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda **_: object())
    monkeypatch.setattr(graph_capture, "fragile", lambda: False)


def test_the_first_error_is_raised() -> None:
    def run() -> None:
        raise ValueError("cuBLAS error: 13")

    with pytest.raises(ValueError, match="cuBLAS error: 13"):
        graph_capture.captured(Memory(), run, fills=False)


def test_an_error_of_the_end_alone_is_raised() -> None:
    with pytest.raises(RuntimeError, match="previous error"):
        graph_capture.captured(Memory(), lambda: 1, fills=False)
