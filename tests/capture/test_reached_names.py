# SPDX-License-Identifier: Apache-2.0
"""What a capture's code reaches by name: code that finds modules for an import is none of it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from nexfort_engine.capture.reached_names import rows_of
from nexfort_engine.capture.source_hashes import walked

FINDER = """
import sys
class Finder:
    def find_spec(self, *_):
        sys.meta_path.count(self)
"""
BLOCK = """
from torch import nn
class Block(nn.Module):
    def forward(self, x):
        import reached_late
        return x * reached_late.FACTOR
"""


def test_an_import_hook_is_no_code_of_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = {"reached_finder": FINDER, "reached_block": BLOCK, "reached_late": "FACTOR = 2"}
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    finder, module = (importlib.import_module(name) for name in ("reached_finder", "reached_block"))
    monkeypatch.setattr(sys, "meta_path", [finder.Finder(), *sys.meta_path])
    block: nn.Module = module.Block()
    try:
        with walked() as codes:
            assert float(block(torch.ones(()))) == 2.0
        assert finder.Finder.find_spec.__code__ in codes, "the finder was not asked"
        rows, only_here = rows_of(block, codes, {})
        assert only_here == "" and not [row for row in rows if row[0] == finder.__name__]
    finally:
        for name in sources:
            sys.modules.pop(name, None)
