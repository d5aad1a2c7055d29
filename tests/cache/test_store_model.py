# SPDX-License-Identifier: Apache-2.0
"""The store against a model of it: any order of operations, by two views of one directory over a base cache."""

from __future__ import annotations

import os
import shutil

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from stores import KEY, OTHER, SIZE, loaded, make_base, put, quick_folder, snapshot

from nexfort_engine.cache import index
from nexfort_engine.cache.store import Entry, Store

Name = tuple[str, int]
KEYS, VARIANTS, VIEWS = st.sampled_from([KEY, OTHER]), st.integers(0, 3), st.integers(0, 1)


class StoreMachine(RuleBasedStateMachine):
    """The model is a dictionary in the order of use, a set of pins, and what the base holds."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = quick_folder()
        self.root, base = self.folder / "cache", self.folder / "base"
        self.below = {(KEY, variant): entry for variant, entry in zip((2, 3), make_base(base, 2, 3), strict=True)}
        self.untouched = snapshot(base)
        if hasattr(os, "getuid"):
            os.environ["NEXFORT_CACHE_BASE_OWNER"] = str(os.getuid())
        # as two processes have them: each with what it remembers of the index, of what it skips and of what it copied
        self.views = [Store(self.root, base), Store(self.root, base)]
        self.model: dict[Name, str] = {}
        self.pinned: set[Name] = set()

    def teardown(self) -> None:
        os.environ.pop("NEXFORT_CACHE_BASE_OWNER", None)
        for path in self.folder.rglob("*"):
            if path.is_dir():
                path.chmod(0o700)
        shutil.rmtree(self.folder)

    def forget(self, name: Name) -> None:
        del self.model[name]
        self.pinned.discard(name)

    def own(self, view: int, primary: str) -> list[Entry]:
        return [entry for entry in self.views[view].candidates(primary) if not entry.base]

    @rule(view=VIEWS, primary=KEYS, variant=VARIANTS)
    def commit(self, view: int, primary: str, variant: int) -> None:
        entry = put(self.views[view], primary, variant=variant)
        assert entry.persistent and self.model.setdefault((primary, variant), entry.id) == entry.id

    @rule(view=VIEWS, primary=KEYS, variant=VARIANTS)
    def adopt(self, view: int, primary: str, variant: int) -> None:
        made = put(Store(self.folder / "elsewhere"), primary, variant=variant)
        with self.views[view].stage() as staged:
            shutil.rmtree(staged / "payload")
            shutil.copytree(made.payload, staged / "payload")
            entry = self.views[view].adopt(made.manifest, staged)
        assert entry.persistent and self.model.setdefault((primary, variant), entry.id) == entry.id == made.id

    @rule(view=VIEWS, primary=KEYS)
    def use(self, view: int, primary: str) -> None:
        for entry in self.own(view, primary)[-1:]:
            assert loaded(self.views[view], entry) == {"ab/kernel.py": b"code", "artefact.bin": b"codecode"}
            self.views[view].touch(entry)
            self.views[view].note_shape(entry, f"{entry.manifest['variant']}x4x64x64")
            assert entry.shapes == [f"{entry.manifest['variant']}x4x64x64"]
            name = (primary, entry.manifest["variant"])
            self.model[name] = self.model.pop(name)

    @rule(view=VIEWS, primary=KEYS, pinned=st.booleans())
    def pin(self, view: int, primary: str, pinned: bool) -> None:
        for entry in self.own(view, primary)[:1]:
            assert self.views[view].pin(entry.id[:12], pinned).pinned is pinned
            name = (primary, entry.manifest["variant"])
            (self.pinned.add if pinned else self.pinned.discard)(name)

    @precondition(lambda self: self.model)
    @rule(view=VIEWS, data=st.data())
    def remove(self, view: int, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.model)), unique=True, max_size=3))
        assert self.views[view].remove([self.model[name] for name in names]).entries == len(names)
        for name in names:
            self.forget(name)

    @rule(view=VIEWS, primary=KEYS, fault=st.sampled_from(["manifest.json", "payload", "artefact.bin"]))
    def damage(self, view: int, primary: str, fault: str) -> None:
        for entry in self.own(view, primary)[:1]:
            path = entry.payload / fault if "." in fault and fault != "manifest.json" else entry.path / fault
            path.unlink() if path.is_file() else shutil.rmtree(path)
            for found in self.own(1 - view, primary):
                if (problem := found.verify()) is not None:
                    self.views[1 - view].set_aside(found, problem)
            self.forget((primary, entry.manifest["variant"]))

    @rule(view=VIEWS, primary=KEYS)
    def set_aside(self, view: int, primary: str) -> None:
        for entry in self.own(view, primary)[-1:]:
            self.views[view].set_aside(entry, "test")
            self.forget((primary, entry.manifest["variant"]))

    @rule(keep=st.integers(0, 6))
    def prune(self, keep: int) -> None:
        """The least recently used go, but never a pinned one."""
        left = len(self.model)
        for name in list(self.model):
            if left > keep and name not in self.pinned:
                self.forget(name)
                left -= 1
        store = Store(self.root)
        store.prune(keep * SIZE + store._staging.size())  # copies that are loaded count as well

    @rule(view=VIEWS, pinned=st.booleans())
    def clear(self, view: int, pinned: bool) -> None:
        gone = [name for name in self.model if pinned or name not in self.pinned]
        assert self.views[view].clear(pinned=pinned).entries == len(gone)
        for name in gone:
            self.forget(name)

    @rule(content=st.binary(max_size=50))
    def scribble_on_the_index(self, content: bytes) -> None:
        if self.root.exists():
            (self.root / index.NAME).write_bytes(content)

    @invariant()
    def the_store_holds_what_the_model_holds(self) -> None:
        below = {name: entry for name, entry in self.below.items() if name not in self.model}
        for store in (*self.views, Store(self.root, self.folder / "base")):
            entries = {(one.primary, one.manifest["variant"]): one for one in store.entries()}
            assert {name: one.id for name, one in entries.items()} == self.model
            assert {name for name, one in entries.items() if one.pinned} == self.pinned
            rows = {row["id"]: row for row in store.rows()}
            assert rows.keys() == {*self.model.values(), *(entry.id for entry in below.values())}
            assert all(row["problem"] is None for row in rows.values())
            assert {row["id"] for row in rows.values() if row["pinned"]} == {self.model[name] for name in self.pinned}
            expected = {*(v for (k, v) in self.model if k == KEY), *(v for (k, v) in below if k == KEY)}
            assert {one.manifest["variant"] for one in store.candidates(KEY)} == expected
        assert all(problem is None for _, problem in store.verify_all())
        assert snapshot(self.folder / "base") == self.untouched


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)
