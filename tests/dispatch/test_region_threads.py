# SPDX-License-Identifier: Apache-2.0
"""Errors, nested networks, several engines and threads: each call is whole, and the module is plain afterwards.

Captured graphs run as they are here (subjects.py), which leaves out Inductor and nothing else.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import net_pairs  # noqa: E402
from net_pairs import Net, Pair, Part, x  # noqa: E402
from torch import nn  # noqa: E402

from nexfort_engine.dispatch import forward_shim  # noqa: E402

T = torch.Tensor
unlowered, pair = net_pairs.unlowered, net_pairs.pair  # fixtures


def test_an_error_between_regions_leaves_the_module_plain(pair: Pair) -> None:
    pair.net.fails = True
    with pytest.raises(ValueError, match="between two regions"), torch.no_grad():
        pair.compiled(x())
    assert not forward_shim._installed and not any("forward" in vars(sub) for sub in pair.net.modules())
    pair.net.fails = False
    new = pair.agrees(x())
    assert not new["artefacts"] and not new["eager"]


def test_a_network_inside_a_network_keeps_to_its_own_engine(tmp_path: Path) -> None:
    inner = Pair(Net(), tmp_path / "inner")

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Part(8), Part(8)])

        def forward(self, h: T) -> T:
            given = h
            for block in self.blocks:
                h = block(h)
            return inner.compiled(given).sum(-1, keepdim=True) + h

    outer = Pair(Outer(), tmp_path / "outer")
    outer.agrees(x())
    assert outer.report.as_dict()["artefacts_compiled"] == 1
    assert inner.report.as_dict()["artefacts_compiled"] == 2
    assert not outer.reasons() and not inner.reasons()


def test_two_engines_share_a_module(pair: Pair, tmp_path: Path) -> None:
    other = Pair(pair.net, tmp_path / "other", {"mode": "jit:disable-runtime-fusion"})
    other.agrees(x())
    pair.agrees(x())
    assert not forward_shim._installed
    assert other.report.as_dict()["artefacts_compiled"] == pair.report.as_dict()["artefacts_compiled"] == 2


def test_threads_that_start_together_make_each_artefact_once(tmp_path: Path) -> None:
    pair = Pair(Net(), tmp_path)
    with torch.no_grad():
        wanted = pair.net(x())
    problems: list[Any] = []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait(30)
        try:
            with torch.no_grad():
                if not torch.allclose(pair.compiled(x()), wanted, atol=1e-5):
                    problems.append("another result")
        except Exception as error:  # shown by the assertion below
            problems.append(error)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    data = pair.report.as_dict()
    assert not problems and not data["eager"]
    assert data["artefacts_compiled"] == 2 and data["calls"] == 4
    assert not forward_shim._installed


def test_a_step_beside_an_export_in_another_thread_runs_compiled(tmp_path: Path) -> None:
    """Torch says for the whole process that something is exported; in the thread that does it the block is plain."""
    pair, inside, seen = Pair(Net(), tmp_path), threading.Event(), threading.Event()
    pair.agrees(x())
    with torch.export._trace._ignore_backend_decomps(), torch.backends.nnpack.flags(enabled=True):
        pair.agrees(x(3))  # as an export sets them: nothing is captured below, as two exports at once break each other
    before = pair.report.as_dict()["calls"]

    class Waits(nn.Module):
        def forward(self, h: T) -> T:
            found = pair.compiled(h)
            inside.set()
            assert seen.wait(60)
            return found

    exported: list[Any] = []

    def export() -> None:
        with torch.no_grad():
            exported.append(torch.export.export(Waits(), (x(),), strict=False))

    beside = threading.Thread(target=export)
    beside.start()
    assert inside.wait(60)
    traced = pair.report.as_dict()["eager"]
    assert [row["reason"] for row in traced] == ["it is being traced by torch.compile or torch.export"]
    pair.agrees(x(3))
    seen.set()
    beside.join(60)
    data = pair.report.as_dict()
    assert exported, "the export is as it would be alone"
    assert data["eager"] == traced and data["calls"] == before + 1
