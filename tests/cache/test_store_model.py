# SPDX-License-Identifier: Apache-2.0
"""The store against a model of it, and against altered bytes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from stores import KEY, OTHER, put

from nexfort_engine.cache import index
from nexfort_engine.cache.store import Entry, Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


# -- against a model -----------------------------------------------------------------------------------------


class StoreMachine(RuleBasedStateMachine):
    """Any order of operations against a dictionary: the store lists what was put there and not removed."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="nexfort-test-"))
        self.model: dict[tuple[str, int], str] = {}

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    @rule(primary=st.sampled_from([KEY, OTHER]), variant=st.integers(0, 2))
    def commit(self, primary: str, variant: int) -> None:
        entry = put(Store(self.root), primary, variant=variant)
        assert self.model.setdefault((primary, variant), entry.id) == entry.id

    @rule(primary=st.sampled_from([KEY, OTHER]), fault=st.sampled_from(["manifest.json", "payload"]))
    def damage(self, primary: str, fault: str) -> None:
        for entry in Store(self.root).candidates(primary)[:1]:
            path = entry.path / fault
            path.unlink() if path.is_file() else shutil.rmtree(path)
            del self.model[primary, entry.manifest["variant"]]

    @rule(primary=st.sampled_from([KEY, OTHER]))
    def set_aside(self, primary: str) -> None:
        store = Store(self.root)
        for entry in store.candidates(primary)[-1:]:
            store.set_aside(entry, "test")
            del self.model[primary, entry.manifest["variant"]]

    @rule(keep=st.integers(0, 4))
    def prune(self, keep: int) -> None:
        store = Store(self.root)
        store.prune(keep * 12)
        left = {(entry.primary, entry.manifest["variant"]) for entry in store.entries()}
        assert left <= self.model.keys() and len(left) == min(keep, len(self.model))
        self.model = {name: self.model[name] for name in left}

    @rule()
    def clear(self) -> None:
        Store(self.root).clear()
        self.model = {}

    @rule(content=st.binary(max_size=50))
    def scribble_on_the_index(self, content: bytes) -> None:
        if self.root.exists():
            (self.root / index.NAME).write_bytes(content)

    @invariant()
    def the_store_holds_what_the_model_holds(self) -> None:
        store = Store(self.root)
        entries = store.entries()
        assert {(one.primary, one.manifest["variant"]): one.id for one in entries} == self.model
        assert all(entry.verify() is None for entry in entries)
        assert {row["id"] for row in store.rows()} == set(self.model.values())


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)


@pytest.fixture(scope="module")
def one_entry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, Entry, bytes]]:
    store = Store(tmp_path_factory.mktemp("store") / "cache")
    entry = put(store, guards={"dims": [1, 2]})
    yield store, entry, (entry.path / "manifest.json").read_bytes()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_mutation_of_a_manifest_raises_or_loads_altered_bytes(
    data: st.DataObject, one_entry: tuple[Store, Entry, bytes]
) -> None:
    store, entry, text = one_entry
    at = data.draw(st.integers(0, len(text)))
    mutated = text[:at] + data.draw(st.binary(max_size=4)) + text[at + data.draw(st.integers(0, 4)) :]
    if not entry.path.exists():
        put(store, guards={"dims": [1, 2]})
    (entry.path / "manifest.json").write_bytes(mutated)
    for found in store.candidates(KEY):
        if found.verify() is None:
            assert found.manifest["files"] == entry.manifest["files"]
            assert found.manifest["guards"] == entry.manifest["guards"]
