# SPDX-License-Identifier: Apache-2.0
"""Pictures of one kind: a picture that begins eager stays so, and the next one is compiled from its first step on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from backbones import make
from large_rows import few
from pretended_graph import pretend
from subjects import Subject, ask_instead, distance, equal_bits, graphs_as_they_are, ran

import nexfort_engine
from nexfort_engine.compilation import handover
from nexfort_engine.cudagraphs.host_constants import Remembering
from nexfort_engine.lowering import inductor
from nexfort_engine.runtime.engine_state import Picture
from nexfort_engine.runtime.forward_context import ForwardContext

pytestmark = pytest.mark.usefixtures("threads", "artefact_cache")
OPTIONS = {"options": {"compile.background": True}}


class Name:
    """Of a picture."""


@dataclass
class Host:
    """A host that says which picture a call is a step of, with a gate before what is lowered."""

    tiny: Subject
    began: threading.Event
    opened: threading.Event
    now: Picture | None = None

    def begin(self, steps: int = 4, ended: Callable[[], int] = lambda: 0) -> None:
        """Another picture begins."""
        self.now = Picture(Name(), steps, ended)

    def ran(self, **call: Any) -> tuple[int, list[torch.Tensor]]:
        """How many artefacts run in one step, and its result."""
        return ran(lambda: self.tiny.run(**call))

    def all(self) -> int:
        """How many regions a step calls."""
        regions = [region for region in self.tiny.engine.regions if region.bindings]
        assert len(regions) > 4
        return len(regions)

    def finish(self) -> None:
        """Everything that was begun is made."""
        self.opened.set()
        background = self.tiny.engine.builder.background
        assert background is not None and background.join(60)


def host_of(module: Any, patch: pytest.MonkeyPatch, began: threading.Event, opened: threading.Event) -> Host:
    tiny = Subject(module, nexfort_engine.compile(module.module, options=OPTIONS))
    made = Host(tiny, began, opened)
    ask_instead(patch, tiny.engine, picture=lambda args, kwargs: made.now)
    return made


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[Callable[..., Host]]:
    """Graphs run as they are, nothing is stored yet, and lowering waits until the host opens the gate."""
    tmp_path.chmod(0o700)
    with graphs_as_they_are(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEXFORT_CACHE_DIR", str(tmp_path))
        began, opened, own = threading.Event(), threading.Event(), inductor.lower

        def slow(*args: Any) -> None:
            if threading.current_thread() is not threading.main_thread():  # where newer torch is tried out first
                began.set()
                assert opened.wait(60)
            own(*args)

        patch.setattr(inductor, "lower", slow)
        patch.setattr(handover, "SHORT", 0.0)  # a first step begins to make what it lacks
        yield lambda **kind: host_of(make("torch_dit", **kind), patch, began, opened)
        opened.set()


@pytest.fixture
def host(quick: Callable[..., Host]) -> Host:
    return quick()


def test_a_picture_that_began_eager_is_eager_to_its_end(host: Host) -> None:
    host.begin()
    count, found = host.ran()
    assert count == 0 and equal_bits(found, host.tiny.eager_before)
    host.finish()
    for seed in (1, 2, 3):
        count, found = host.ran(seed=seed)
        assert count == 0 and equal_bits(found, host.tiny.eager(seed=seed)), "all is there by now"


def _begun(
    host: Host, monkeypatch: pytest.MonkeyPatch, steps: int, short: float, begins: Sequence[float] = ()
) -> list[int]:
    """How often something was begun to be made, after each step of a picture. begins: what a clock says at each."""
    monkeypatch.setattr(handover, "SHORT", short)
    clock = [0.0]
    if begins:
        monkeypatch.setattr(handover.time, "perf_counter", lambda: clock[0])
    host.begin(steps)
    background, begun = host.tiny.engine.builder.background, []
    assert background is not None
    for step in range(steps):
        clock[0] = begins[step] if begins else 0.0
        count, found = host.ran()
        assert count == 0 and equal_bits(found, host.tiny.eager_before)
        begun.append(background.begun)
    host.finish()
    return begun


def test_a_short_picture_begins_with_what_it_lacks_in_its_last_step(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _begun(host, monkeypatch, 4, 60.0) == [0, 0, 0, 1]
    host.begin()
    host.ran()  # one looks for what was made
    host.finish()
    host.begin()
    assert host.ran()[0] == host.all()


def test_a_longer_one_as_soon_as_that_is_known(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _begun(host, monkeypatch, 6, 1e-9) == [0, 0, 0, 1, 1, 1]


def test_a_second_step_that_loads_kernels_makes_no_picture_long(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    begins = [1000.0, 1010.0, 1013.0, 1013.1, 1013.2, 1013.3]  # of its steps
    assert _begun(host, monkeypatch, 6, 5.0, begins) == [0, 0, 0, 0, 0, 1]


def test_one_of_a_single_step_at_once(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _begun(host, monkeypatch, 1, 60.0) == [1]


def test_a_picture_that_is_cut_short_leaves_it_to_the_next_one(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "SHORT", 60.0)
    background = host.tiny.engine.builder.background
    assert background is not None
    for begun in (0, 1):
        host.begin(4)
        for _ in range(2):
            count, found = host.ran()
            assert count == 0 and equal_bits(found, host.tiny.eager_before)
        assert background.begun == begun
    host.finish()


@pytest.mark.parametrize("of_a_picture", [True, False])
def test_a_step_that_lacks_artefacts_is_not_observed(
    quick: Callable[..., Host], monkeypatch: pytest.MonkeyPatch, of_a_picture: bool
) -> None:
    pretend(monkeypatch)
    seen, own = [], Remembering.__torch_dispatch__

    def noted(self: Remembering, func: Any, *rest: Any) -> Any:
        seen.append(func)
        return own(self, func, *rest)

    monkeypatch.setattr(Remembering, "__torch_dispatch__", noted)
    host = quick()
    with Remembering():
        host.tiny.eager()
    whole = len(seen)
    seen.clear()
    for _ in range(2):
        if of_a_picture:
            host.begin()
        count, found = host.ran()
        assert count == 0 and equal_bits(found, host.tiny.eager_before)
        assert len(seen) < whole / 4, "beyond the first block it ran under the modes of an observed step"
        seen.clear()
    host.finish()
    for _ in range(2):  # one looks for what was made
        if of_a_picture:
            host.begin()
        host.ran()
    assert seen, "a step that has all is observed, or the test proves nothing"


def test_the_next_picture_is_compiled_from_its_first_step(host: Host) -> None:
    host.begin()
    host.ran()
    host.finish()
    host.ran()
    pictures = []
    for _ in range(2):
        host.begin()
        counts, found = zip(*(host.ran(seed=seed) for seed in (1, 2)), strict=True)
        assert min(counts) == host.all()
        assert all(distance(one, host.tiny.eager(seed=seed)) < 1e-4 for seed, one in zip((1, 2), found, strict=True))
        pictures.append(found)
    assert all(map(equal_bits, *pictures)), "the same seed gives the same bits"
    assert not host.tiny.report.as_dict()["eager"]


def test_a_step_looks_for_what_was_made_and_has_the_rest_made(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plan does not see is made beside the same picture, so that the next one need not be eager too."""
    own, planned = host.tiny.engine.builder.planner.calls, []

    def calls(session: ForwardContext) -> Any:
        planned.append(1)
        return [wanted for wanted in own(session) if not planned[1:] and wanted.region.path != "blocks.1"][:2]

    monkeypatch.setattr(host.tiny.engine.builder.planner, "calls", calls)
    host.begin()
    for _ in range(12):
        count, found = host.ran()
        assert count == 0 and equal_bits(found, host.tiny.eager_before)
        host.finish()
    host.begin()
    assert host.ran()[0] == host.all()


def test_where_a_part_is_there_already_the_whole_picture_is_eager(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as after a process that ended while it compiled."""
    host.begin()
    host.ran()
    host.finish()
    host.begin()
    host.ran()
    last = next(region for region in reversed(host.tiny.engine.regions) if region.bindings)
    host.tiny.engine.state.store.remove([binding.artefact.id for binding in last.bindings])
    again = host_of(host.tiny.tiny, monkeypatch, host.began, host.opened)
    again.begin()
    before = again.tiny.report.calls
    count, found = again.ran()
    assert equal_bits(found, again.tiny.eager_before)
    assert again.tiny.report.calls == before + 1
    assert count, "some ran, before the step began anew"
    again.finish()
    assert again.ran()[0] == 0
    again.begin()
    assert again.ran()[0] == again.all()
    assert again.tiny.report.as_dict()["artefacts_compiled"] == 1


def test_a_long_picture_is_taken_over_in_its_middle_and_the_report_says_so(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(handover.time, "perf_counter", lambda: clock[0])
    ended = [0]
    host.begin(50, lambda: ended[0])
    host.ran()
    host.finish()
    for step in (1, 2):
        ended[0], clock[0] = step, 1000.0 + step
        assert host.ran()[0] == (0 if step == 1 else host.all()), step  # the first one looks
    (note,) = [note for note in host.tiny.report.as_dict()["notes"] if "took over" in note]
    assert "step 2 of 50" in note and "48 s" in note


@pytest.mark.parametrize(("steps", "seconds"), few([(50, 0.5), (0, 100.0), (20, 1.0)], [(20, 1.0)]))
def test_one_whose_rest_is_short_is_not(
    host: Host, monkeypatch: pytest.MonkeyPatch, steps: int, seconds: float
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(handover.time, "perf_counter", lambda: clock[0])
    ended = [0]
    host.begin(steps, lambda: ended[0])
    host.ran()
    host.finish()
    for step in range(1, 4):
        ended[0], clock[0] = step, 1000.0 + step * seconds
        assert host.ran()[0] == 0
    assert not [note for note in host.tiny.report.as_dict()["notes"] if "took over" in note]


def test_a_new_size_in_the_middle_of_the_making_is_eager_and_then_compiled(host: Host) -> None:
    host.begin()
    host.ran()
    assert host.began.wait(60)
    host.begin()
    call = {"size": (8, 4), "length": 5, "batch": 1}
    count, found = host.ran(**call)
    assert count == 0 and equal_bits(found, host.tiny.eager(**call))
    host.finish()
    host.begin()
    mark = host.tiny.report.mark()
    count, found = host.ran(**call)
    assert count == host.all() and distance(found, host.tiny.eager(**call)) < 1e-4
    assert not host.tiny.report.since(mark)["artefacts"]


def test_weights_that_change_meanwhile_are_in_the_next_picture(host: Host) -> None:
    """As with a LoRA: the artefacts take weights as arguments."""
    host.begin()
    before = host.ran()[1]
    assert host.began.wait(60)
    with torch.no_grad():
        for weight in host.tiny.module.parameters():
            weight.mul_(1.25)
    assert equal_bits(host.ran()[1], host.tiny.eager()) and not equal_bits(host.tiny.eager(), before)
    host.finish()
    host.begin()
    count, found = host.ran()
    assert count == host.all() and distance(found, host.tiny.eager()) < 1e-4


def test_switched_off_meanwhile_it_is_the_plain_network(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.begin()
    host.ran()
    assert host.began.wait(60)
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setenv("NEXFORT_DISABLE", "1")
            count, found = host.ran()
        assert count == 0 and equal_bits(found, host.tiny.eager_before)
        assert equal_bits(host.tiny.eager(), host.tiny.eager_before), "as with the node bypassed"
        host.finish()
    host.begin()
    assert host.ran()[0] == host.all()


def test_two_networks_each_have_their_pictures(quick: Callable[..., Host]) -> None:
    """The high and the low noise of a video: each run of a sampler is a picture of its own."""
    hosts = [quick(), quick(depth=3)]
    for one in hosts:
        one.begin()
    for one in hosts:
        count, found = one.ran()
        assert count == 0 and equal_bits(found, one.tiny.eager_before)
    hosts[0].finish()
    for one in hosts:
        one.ran()
        one.finish()
    for one in hosts:
        one.ran()
        one.finish()
        one.begin()
        assert one.ran()[0] == one.all()


def test_a_verification_waits_for_a_compiled_picture(host: Host) -> None:
    host.tiny.engine.verify_next()
    host.begin()
    for _ in range(3):
        host.ran()
        host.finish()
    assert not host.tiny.report.verifications
    host.begin()
    host.ran()
    assert host.tiny.report.verifications == 1


def test_a_cancel_ends_the_step_while_it_compiles(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(Exception):
        pass

    host.begin()
    host.ran()
    assert host.began.wait(60)
    block = host.tiny.module.blocks[0]
    own = type(block).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise Stop

    monkeypatch.setattr(type(block), "forward", forward)
    ask_instead(monkeypatch, host.tiny.engine, stops=lambda: (Stop,))
    with pytest.raises(Stop):
        host.ran()
    monkeypatch.setattr(type(block), "forward", own)
    host.finish()
    host.begin()
    assert host.ran()[0] == host.all()


# ---- the process ends while it compiles ------------------------------------------------------------------------------

ENDS = """
import json, os, sys, threading, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
from backbones import make
import nexfort_engine
from nexfort_engine.compilation import support
from nexfort_engine.lowering import inductor

support.reason_for("cpu", Path(os.environ["NEXFORT_CACHE_DIR"]))  # a newer torch lowers something for that

own, made, left = inductor.lower, [], int(sys.argv[2])

def lower(*args):
    if len(made) >= left:
        time.sleep(600)
    own(*args)
    made.append(1)

inductor.lower = lower
tiny = make("torch_dit")
compiled = nexfort_engine.compile(tiny.module, options={"options": {"compile.background": True}})
args, kwargs = tiny.make_inputs()
with torch.inference_mode():
    eager = tiny.module(*args, **kwargs)
    first = compiled(*args, **kwargs)
    background = compiled._nexfort_engine.builder.background
    while background.busy and compiled.report.as_dict()["artefacts_compiled"] < left:
        time.sleep(0.05)
    if not background.busy:
        compiled(*args, **kwargs)
told = compiled.report.as_dict()
print(json.dumps([torch.equal(eager, first), background.busy, told["artefacts_compiled"], told["artefacts_loaded"]]))
"""


@pytest.mark.large  # test_background.py ends such a thread within one process
@pytest.mark.slow
def test_an_exit_while_it_compiles_loses_nothing_that_was_made(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    support = Path(__file__).resolve().parents[1] / "support"
    environment = {**os.environ, "NEXFORT_CACHE_DIR": str(tmp_path), "NEXFORT_WORKERS": "0"}

    def ended(left: int) -> list[Any]:
        command = [sys.executable, "-c", ENDS, str(support), str(left)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        return list(json.loads(done.stdout.splitlines()[-1]))

    assert ended(2) == [True, True, 2, 0], "it was still at work when the process ended"
    is_eager, busy, compiled, loaded = ended(100)
    assert is_eager and not busy and loaded == 2 and compiled > 2, "only what was not made yet"
