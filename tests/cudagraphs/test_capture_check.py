# SPDX-License-Identifier: Apache-2.0
"""What would make a capture fail is noted while a step runs, and the step gives what it always gives."""

from __future__ import annotations

import threading

import pytest
import torch

from nexfort_engine.cudagraphs.capture_check import CaptureCheck
from nexfort_engine.runtime import artifact
from nexfort_engine.system.kernel_launches import noted_triton_launches


def test_a_step_that_stays_on_one_device_has_no_reason() -> None:
    x = torch.randn(2, 3, 8, 8)
    with CaptureCheck() as check, torch.inference_mode():
        found = torch.nn.functional.conv2d(x, torch.ones(4, 3, 3, 3)).relu() * 2.0 + torch.tensor(1.0)
    assert check.reason is None
    assert torch.equal(found, torch.nn.functional.conv2d(x, torch.ones(4, 3, 3, 3)).relu() * 2.0 + 1.0)


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: bool((x > 0).all()),
        lambda x: torch.equal(x, x),
        lambda x: torch.unique(x),
        lambda x: x.__setitem__(x > -100, torch.arange(16.0)),  # of one number newer torch makes a `masked_fill_`
    ],
    ids=["item", "mask", "nonzero", "bool", "equal", "unique", "masked assignment"],
)
def test_code_that_waits_is_named(waits) -> None:
    with CaptureCheck() as check:
        waits(torch.randn(4, 4))
    assert "waits for the GPU" in (check.reason or "")


def test_copies_between_devices_are_named() -> None:
    one = torch.tensor(2.0)
    for copied in (lambda: torch.randn(4).to("meta"), lambda: one.to("meta")):
        with CaptureCheck() as check:
            copied()
        assert check.reason == "its code copies between the GPU and main memory (_to_copy)"
    with CaptureCheck() as check:
        torch.randn(4, device="meta") * torch.tensor(2.0)
    assert check.reason is None, "a tensor of one number is passed by value"


def test_triton_kernels_of_others_are_named_in_this_thread_only() -> None:
    jit = pytest.importorskip("triton.runtime.jit")
    before, names = jit.JITFunction.run, []

    class Kernel:
        __name__ = "others_kernel"

    def launch() -> None:
        with pytest.raises(Exception):  # noqa: B017  # it is no kernel, whatever comes of it
            jit.JITFunction.run(Kernel(), grid=None, warmup=False)

    with noted_triton_launches(names.append):
        launch()
        other = threading.Thread(target=launch)
        other.start()
        other.join()
    assert names == ["others_kernel"] and jit.JITFunction.run is before


def test_threads_that_watch_at_once_leave_things_as_they_were() -> None:
    jit = pytest.importorskip("triton.runtime.jit")
    before, entered, left = jit.JITFunction.run, threading.Event(), threading.Event()

    def other() -> None:
        with CaptureCheck():
            entered.set()
            left.wait(30)

    thread = threading.Thread(target=other)
    with CaptureCheck():
        thread.start()
        assert entered.wait(30)
    assert jit.JITFunction.run is not before, "the other still watches"
    left.set()
    thread.join()
    assert jit.JITFunction.run is before


def test_an_operator_that_is_a_program_is_run_and_named() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    q = torch.randn(1, 1, 16, 8)
    with CaptureCheck() as check:
        found = flex.flex_attention(q, q, q)
    assert found.shape == q.shape and check.reason is not None


def test_functions_of_torch_compile_run_inside_and_are_compiled_afterwards_as_their_user_wants() -> None:
    from torch._dynamo import eval_frame

    double, x = torch.compile(lambda x: x * 2, backend="eager", fullgraph=True), torch.randn(4)
    for stance in ("default", "eager_on_recompile"):
        with torch.compiler.set_stance(stance):
            with CaptureCheck() as one, CaptureCheck() as other:
                found = double(x)
            assert torch.equal(found, x * 2)
            assert one.reason is None and other.reason is None and eval_frame._stance.stance == stance
            with pytest.raises(ZeroDivisionError), CaptureCheck():
                double(1 / 0)
            assert eval_frame._stance.stance == stance


def test_operators_of_others_are_known_where_they_are_not_watched_again() -> None:
    @torch.library.custom_op("nexfort_tests::of_others", mutates_args=())
    def of_others(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    class Artefact:
        unwatched = foreign = False
        note_watched, note_foreign = artifact.Artefact.note_watched, artifact.Artefact.note_foreign

    x, own, artefact = torch.randn(4), Artefact(), Artefact()
    for _ in range(2):
        with CaptureCheck() as check:
            with check.around(own):
                x.relu()
            assert not check.foreign
            with check.around(artefact):
                of_others(x)
            assert check.foreign
            with check.around(own):
                x.relu()
        assert check.foreign and artefact.foreign and not own.foreign
        artefact.unwatched = own.unwatched = True
