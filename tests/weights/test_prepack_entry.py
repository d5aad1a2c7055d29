# SPDX-License-Identifier: Apache-2.0
"""What a graph computes of its weights alone: computed once, kept no longer than it is true.

What is taken out of a graph for that is in graph/test_const_subgraph.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prepared_weights import WIDE, Both, Host, Normed, x
from probe import Probe
from torch import nn

from nexfort_engine.cache.store import Store
from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.dispatch import prepack_cache
from nexfort_engine.engine import Engine
from nexfort_engine.lowering import inductor, worker
from nexfort_engine.lowering.loaded_code import PreparingCode
from nexfort_engine.runtime.artifact import Binding
from nexfort_engine.weights.lease import layers_in
from nexfort_engine.weights.prepack_entry import PrepackEntry, room_for


@pytest.mark.parametrize("in_a_worker", [False, True])
def test_an_artefact_with_a_preparation_is_called_like_any_other(tmp_path: Path, in_a_worker: bool) -> None:
    block = Normed()
    probe, payload = Probe(block, x()), tmp_path / "payload"
    options: Mapping[str, object] = {"nexfort.prepare": True}
    if in_a_worker:
        (tmp_path / "graph").write_bytes(worker.pack(probe.captured))
        job = {"modules": [], "probes": None, "device": "cpu", "spread": False, "file": str(tmp_path / "graph")}
        worker.work({**job, "payload": str(payload), "options": options})
    else:
        inductor.lower(probe.captured, payload, options)
    code = inductor.load(payload, {}, [], len(probe.captured.weights))
    assert isinstance(code, PreparingCode)
    given_weights = probe.weights
    for rows in (5, 1, 17):
        (found,) = code([*given_weights, x(rows)])
        (kept,) = code.run([*given_weights, x(rows)], code.prepare(given_weights))
        assert torch.allclose(found, block(x(rows)), atol=1e-5) and torch.equal(found, kept)


def test_a_layer_is_spared_if_all_of_its_weights_are() -> None:
    root = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    slots = [(root[0]._parameters, "weight"), (root[0]._parameters, "bias")]
    slots += [(root[1]._parameters, "bias"), (root[3]._parameters, "weight")]
    assert layers_in(root, slots) == [root[0], root[3]] and not layers_in(root, [])


# ---- how long they are kept --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """What one of the engines compiles, the others load."""
    return Store(tmp_path_factory.mktemp("store"))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, store: Store) -> tuple[Engine, Host, list[int]]:
    """An engine of two blocks, its host, and the numbers of the blocks that were prepared."""
    prepare, made = Binding.prepare, []
    host, root = Host(), Both()

    def counted(self: Binding, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        made.append(next(i for i, block in enumerate(root.blocks) if any(w is block.out.weight for w in weights)))
        return prepare(self, weights)

    monkeypatch.setattr(Binding, "prepare", counted)
    return Engine(root, CompileConfig.parse("freezing"), store, provider=host), host, made  # type: ignore[arg-type]


def agrees(engine: Engine, seed: int = 0) -> bool:
    root = engine.root
    with torch.inference_mode():
        found = engine.call(root.forward, (x(seed=seed),), {})
        assert not engine.report.as_dict()["eager"]
        return torch.allclose(found, root(x(seed=seed)), atol=1e-5)


@pytest.mark.parametrize("capturing", [False, True])
def test_a_step_keeps_its_result_whatever_becomes_of_what_the_host_holds(
    made: tuple[Engine, Host, list[int]], monkeypatch: pytest.MonkeyPatch, capturing: bool
) -> None:
    """Giving back waits for the device, which ends a capture: then it is done another time."""
    from nexfort_engine.dispatch import memory_reclaim

    engine, host, _ = made
    asked = []

    def release(layers: list[nn.Module], _: object) -> int:
        asked.append(layers)
        raise RuntimeError("Fault failed")

    monkeypatch.setattr(memory_reclaim, "layers_in", lambda root, _: [root])
    monkeypatch.setattr(memory_reclaim, "is_capturing", lambda: capturing)
    monkeypatch.setattr(host, "release", release, raising=False)
    engine.state.hold_twice()
    assert agrees(engine)
    assert engine.state.held_twice is capturing and len(asked) == (not capturing)
    assert any("not given back (RuntimeError: Fault failed)" in note for note in engine.report.as_dict()["notes"]) is (
        not capturing
    )


@pytest.mark.parametrize("host", [None, Host()], ids=["no host", "one that never says"])
def test_where_nobody_says_when_weights_change_the_artefact_is_what_it_is_without(
    host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if host is not None:
        monkeypatch.setattr(host, "reports_versions", False, raising=False)
    kept = Store(tmp_path)
    frozen, plain = (Engine(Both(), CompileConfig.parse(mode), kept, provider=host) for mode in ("freezing", "O2"))
    assert agrees(frozen) and not any(binding.prepares for region in frozen.regions for binding in region.bindings)
    assert [row["token"] for row in frozen.report.as_dict()["inactive"]] == ["freezing"]
    assert agrees(plain) and plain.report.as_dict()["artefacts_compiled"] == 0
    assert not plain.report.as_dict()["inactive"]


def test_they_are_made_once_for_each_block(made: tuple[Engine, Host, list[int]]) -> None:
    engine, _, blocks = made
    assert all(agrees(engine, seed) for seed in range(3))
    assert blocks == [0, 1]


def test_they_are_made_again_when_the_host_says_that_weights_changed(made: tuple[Engine, Host, list[int]]) -> None:
    engine, host, blocks = made
    assert agrees(engine)
    with torch.no_grad():
        engine.root.blocks[1].direction.data.neg_()  # type: ignore[union-attr,index]
    host.said = "two"
    assert agrees(engine) and blocks == [0, 1, 0, 1]


def test_they_are_not_kept_where_the_host_cannot_say(made: tuple[Engine, Host, list[int]]) -> None:
    engine, host, blocks = made
    assert agrees(engine)
    host.said = None
    for factor in (2.0, -1.0):
        with torch.no_grad():
            engine.root.blocks[0].direction.data.mul_(factor).add_(0.1)  # type: ignore[union-attr,index]
        assert agrees(engine)
    host.said = "one"
    assert agrees(engine), "what was kept before went when nobody could say"
    assert blocks == [0, 1, 0, 1]


def test_another_tensor_in_a_weights_place_is_seen_at_once(made: tuple[Engine, Host, list[int]]) -> None:
    engine, _, blocks = made
    assert agrees(engine)
    engine.root.blocks[0].direction = nn.Parameter(torch.randn(WIDE, WIDE), requires_grad=False)  # type: ignore[union-attr,index]
    assert agrees(engine) and blocks == [0, 1, 0]
    engine.root.blocks[1].direction.data = torch.randn(WIDE, WIDE)  # type: ignore[union-attr,index]
    assert agrees(engine) and blocks == [0, 1, 0, 1]


def test_they_go_when_the_engine_gives_its_memory_back(made: tuple[Engine, Host, list[int]]) -> None:
    engine, _, blocks = made
    assert agrees(engine)
    assert all(binding.kept for region in engine.regions for binding in region.bindings)
    engine.release()
    assert not any(binding.kept for region in engine.regions for binding in region.bindings)
    assert agrees(engine) and blocks == [0, 1, 0, 1]


def test_where_memory_is_short_they_go_and_the_step_runs_again(
    made: tuple[Engine, Host, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _, blocks = made
    assert agrees(engine)
    run, runs, always = Binding.run, [], []

    def short(self: Binding, *args: Any) -> Any:
        runs.append(args[-1] is not None)
        if runs[-1] or always:  # with what is kept, or in any case
            raise torch.OutOfMemoryError("out of memory")
        return run(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Binding, "run", short)
        assert agrees(engine) and runs == [True, False, False]
        assert not any(binding.kept for region in engine.regions for binding in region.bindings)
        assert agrees(engine) and runs[3:] == [False, False], "none are kept from then on"
        always.append(True)
        with pytest.raises(torch.OutOfMemoryError):  # nothing is held: it is for the host to deal with
            agrees(engine)
    assert agrees(engine) and blocks == [0, 1]
    assert any("memory was short" in note for note in engine.report.as_dict()["notes"])


def test_a_step_with_code_of_others_in_it_is_not_run_again(
    made: tuple[Engine, Host, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _, _ = made
    assert agrees(engine)
    run, runs = Binding.run, []

    def short(self: Binding, *args: Any) -> Any:
        runs.append(self)
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(Binding, "run", short)
    with torch.inference_mode(), pytest.raises(torch.OutOfMemoryError):
        engine.call(lambda x, options: engine.root(x), (x(), {"a patch": print}), {})
    assert (
        len(runs) == 1
        and not engine.state.keeps
        and not any(binding.kept for region in engine.regions for binding in region.bindings)
    )
    monkeypatch.setattr(Binding, "run", run)
    assert agrees(engine)


def test_another_thread_may_let_go_of_them_at_any_moment(
    made: tuple[Engine, Host, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _, blocks = made
    assert agrees(engine)
    run = Binding.run

    def released(self: Binding, *args: Any) -> Any:
        engine.release()
        return run(self, *args)

    monkeypatch.setattr(Binding, "run", released)
    assert agrees(engine) and blocks == [0, 1, 1]


def test_without_room_they_are_made_for_each_call_and_once(
    made: tuple[Engine, Host, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _, blocks = made
    monkeypatch.setattr(prepack_cache, "room_for", lambda *_: False)
    monkeypatch.setattr(PreparingCode, "__call__", None)
    assert agrees(engine) and agrees(engine, 1) and blocks == [0, 1, 0, 1]
    assert not any(binding.kept for region in engine.regions for binding in region.bindings)


def test_others_are_asked_for_room_only_where_what_is_free_does_not_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: Any = [SimpleNamespace(device=torch.device("cuda"))]
    free, asked = [3 << 30], []

    def more(device: torch.device) -> int:
        asked.append(device)
        return 1 << 30

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free[0], 1 << 40))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 1 << 20)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 1 << 20)
    assert room_for(kept, more) and not asked
    free[0] = 3 << 29
    assert room_for(kept, more) and asked == [torch.device("cuda")]
    free[0] = 1 << 29
    assert not room_for(kept, more)


def test_they_hold_on_to_no_weight() -> None:
    weight = torch.randn(4)
    kept = PrepackEntry.of([torch.ones(2)], "one", [weight])
    assert kept.holds("one", [weight]) and not kept.holds("two", [weight]) and not kept.holds(None, [weight])
    del weight
    assert kept.made_of[0]() is None and not kept.holds("one", [torch.randn(4)])  # type: ignore[misc]
