# SPDX-License-Identifier: Apache-2.0
"""What the tests of the cache share: an empty store, and for bundles a second one and a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from nexfort_engine.cache.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


@pytest.fixture
def target(tmp_path: Path) -> Store:
    return Store(tmp_path / "target")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "all.nexfort"
