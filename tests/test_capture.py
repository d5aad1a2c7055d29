# SPDX-License-Identifier: Apache-2.0
"""Captures: a graph stands for its block at every call that its conditions and guards allow, or there is no graph.

`Probe` asks that of each block here: at other sizes, numbers and options the graph gives what the block gives, or the
conditions refuse the call; where the block itself refuses it, they must.
"""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

from nexfort_engine import artefact as artefacts  # noqa: E402
from nexfort_engine import capture as capture_module  # noqa: E402
from nexfort_engine.capture import Captured, Example, capture, spec_key  # noqa: E402
from nexfort_engine.modulestate import WeightSlots  # noqa: E402
from nexfort_engine.readset import Refused  # noqa: E402
from nexfort_engine.signature import Flat, Unsupported, flatten_call, tensor_meta  # noqa: E402
from nexfort_engine.sources import hash_source, sources_changed  # noqa: E402

T = torch.Tensor


class Block(nn.Module):
    """A block around a function of itself and its arguments, with one weight."""

    def __init__(self, function: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.randn(10, 8))
        for name, value in attributes.items():
            setattr(self, name, value)
        self.__dict__["function"] = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self).run(self, *args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def block_of(function: Callable[..., Any], **attributes: Any) -> Block:
    """A block whose forward is the function: of a class of its own, so that nothing has to be read from it."""
    torch.manual_seed(0)
    kind = type("Block", (Block,), {"run": function})
    return kind(function, **attributes).eval().requires_grad_(False)


class Probe:
    """A block captured at one call, and compared with its graph at others."""

    def __init__(self, block: nn.Module, *args: Any, dynamic: bool = True, **kwargs: Any) -> None:
        self.block, flat = block, Flat()
        self.spec = flatten_call(args, kwargs, flat)
        self.captured: Captured = capture(block, Example.of(self.spec, flat), dynamic=dynamic)
        manifest = artefacts.manifest_of(self.captured, "block", "Block")
        self.artefact = artefacts.Artefact("id", "primary", manifest)
        graph, weights, constants = self.captured.graph, self.artefact.weights, self.captured.constants
        self.artefact.code = lambda inputs: graph(*inputs[: len(weights)], *constants, *inputs[len(weights) :])
        assert self.refuses(*args, **kwargs) is None, "its own call"
        self.agrees(*args, **kwargs)

    def refuses(self, *args: Any, **kwargs: Any) -> str | None:
        """Why a call may not use the graph."""
        flat = Flat()
        if flatten_call(args, kwargs, flat) != self.spec:
            return "another structure"
        return self.artefact.broken_by(flat)

    def graph(self, *args: Any, **kwargs: Any) -> Any:
        """What the graph gives."""
        flat = Flat()
        flatten_call(args, kwargs, flat)
        binding = artefacts.Binding(self.artefact, self.block)
        with torch.no_grad():
            return binding.run(WeightSlots(self.block).read(), flat, [t.contiguous() for t in flat.tensors])

    def agrees(self, *args: Any, **kwargs: Any) -> bool:
        """Whether the graph may serve a call. If so, results, changed arguments and written options are compared."""
        given = copy.deepcopy((args, kwargs))
        theirs = copy.deepcopy((args, kwargs))
        refused = self.refuses(*args, **kwargs)
        try:
            with torch.no_grad():
                wanted = self.block(*theirs[0], **theirs[1])
        except Exception as error:
            assert refused is not None, f"the block raises {error!r} and the graph would not"
            return False
        if refused is not None:
            return False
        found = self.graph(*given[0], **given[1])
        assert same(found, wanted), "another result than the block's"
        assert same(given, theirs), "other changes to the arguments than the block's"
        return True


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    return a == b


def x(batch: int = 2, length: int = 6, width: int = 8, seed: int = 1) -> T:
    return torch.randn(batch, length, width, generator=torch.Generator().manual_seed(seed))


# ---- sizes ----------------------------------------------------------------------------------------------------------


def test_one_capture_serves_every_batch_and_length() -> None:
    probe = Probe(block_of(lambda b, h: h + b.linear(F.layer_norm(h, (8,)))), x())
    for batch in (1, 2, 3, 4):
        for length in (2, 5, 6, 64):
            assert probe.agrees(x(batch, length))
    assert probe.refuses(x(width=9)[..., :8].repeat(1, 1, 2))


def test_sizes_that_are_equal_by_chance_stay_apart() -> None:
    def joint(b: Any, image: T, text: T) -> tuple[T, T]:
        h = b.linear(torch.cat([text, image], 1))
        h = F.scaled_dot_product_attention(h, h, h)
        return h[:, text.shape[1] :], h[:, : text.shape[1]]

    probe = Probe(block_of(joint), x(8, 8), x(8, 8, seed=2))  # batch, both lengths and the width: all of them 8
    for batch, image, text in ((2, 16, 5), (1, 5, 16), (3, 7, 7), (8, 2, 3)):
        assert probe.agrees(x(batch, image), x(batch, text))
    assert probe.refuses(x(2, 6), x(3, 6)), "two batches that differ"


def test_a_size_that_follows_from_others_is_checked() -> None:
    def masked(b: Any, image: T, text: T, mask: T) -> T:
        return torch.cat([text, image], 1) * mask.unsqueeze(-1)

    probe = Probe(block_of(masked), x(2, 6), x(2, 5), torch.ones(2, 11))
    assert probe.agrees(x(3, 9), x(3, 4), torch.ones(3, 13))
    assert not probe.agrees(x(3, 9), x(3, 4), torch.ones(3, 12))


def test_a_window_needs_sizes_that_it_divides() -> None:
    def windows(b: Any, h: T) -> T:
        return b.linear(h.unflatten(1, (-1, 4))).flatten(1, 2)

    probe = Probe(block_of(windows), x(2, 8))
    assert probe.agrees(x(2, 12)) and probe.agrees(x(1, 64))
    assert not probe.agrees(x(2, 10))


@pytest.mark.parametrize(
    "branch",
    [
        lambda b, h: h * 2 if h.shape[1] > 10 else h,
        lambda b, h: h * 2 if h.shape[1] % 4 == 0 else h,
        lambda b, h: h * 2 if h.shape[1] == 6 else h,
        lambda b, h: h * (2 if h.shape[1] / h.shape[0] > 4.5 else 3),
        lambda b, h: h * int(math.sqrt(h.shape[1])),
        lambda b, h: h * round(h.shape[1] / 8),
        lambda b, h: h * max(h.shape[1], 10),
        lambda b, h: torch.cat([h] * (2 if h.shape[1] < 8 and h.shape[0] > 1 else 1), -1),
    ],
)
def test_code_that_branches_on_a_size_is_followed_or_refused(branch: Any) -> None:
    for length in (6, 8, 11, 12):
        probe = Probe(block_of(branch), x(2, length))
        for batch in (1, 2, 3):
            for other in (2, 5, 6, 8, 11, 12, 16, 100):
                probe.agrees(x(batch, other))


def test_reading_past_the_end_of_a_table_is_refused_as_in_eager() -> None:
    probe = Probe(block_of(lambda b, h: h + b.table[: h.shape[1]]), x(2, 6))
    assert probe.agrees(x(2, 9)) and probe.agrees(x(2, 10))
    assert not probe.agrees(x(2, 11))


def test_a_slice_that_is_longer_than_its_source_is_clamped_as_in_eager() -> None:
    probe = Probe(block_of(lambda b, h, n: b.linear(h[:, :n])), x(2, 6), 4)
    for length, n in ((6, 5), (6, 6), (6, 7), (3, 100), (9, 2)):
        probe.agrees(x(2, length), n)


def test_padding_to_a_multiple_is_followed_or_refused() -> None:
    probe = Probe(block_of(lambda b, h: F.pad(h, (0, 0, 0, -h.shape[1] % 4))), x(2, 8))
    for length in (8, 12, 9, 10, 11, 3):
        probe.agrees(x(2, length))


def test_resizing_by_a_factor_serves_other_sizes() -> None:
    image = torch.randn(2, 8, 6, 6)
    probe = Probe(block_of(lambda b, h: F.interpolate(h, scale_factor=2.0, mode="nearest")), image)
    for batch, height, width in ((1, 6, 6), (2, 5, 9), (3, 16, 4)):
        assert probe.agrees(torch.randn(batch, 8, height, width))


def test_fixed_sizes_are_fixed() -> None:
    probe = Probe(block_of(lambda b, h: b.linear(h)), x(), dynamic=False)
    assert not probe.agrees(x(3)) and not probe.agrees(x(length=7)) and probe.agrees(x(seed=3))


# ---- numbers --------------------------------------------------------------------------------------------------------


def test_a_number_is_data() -> None:
    probe = Probe(block_of(lambda b, h, n: b.linear(h).repeat(1, n, 1) * n), x(), 3)
    assert probe.agrees(x(), 5) and probe.agrees(x(1, 9), 2)


@pytest.mark.parametrize(
    "branch",
    [
        lambda b, h, n: h * 2 if n > 10 else h,
        lambda b, h, n: h * 2 if n == 7 else h,
        lambda b, h, n: h * [1, 2, 3, 4][n % 4],
        lambda b, h, n: h.sum(n % 2),
        lambda b, h, n: h.flatten(n % 3),
        lambda b, h, n: h if n else h * 2,
        lambda b, h, n: {7: h, 8: h * 2}.get(n, h * 3),
        lambda b, h, n: h * float(n),
        lambda b, h, n: h * n**0.5,
        lambda b, h, n: h * 2 if isinstance(n, int) else h,
        lambda b, h, n: h * 2 if type(n) is int else h,
        lambda b, h, n: h * (n if n is not None and n in (1, 7) else 3),
    ],
)
def test_code_that_branches_on_a_number_is_followed_or_refused(branch: Any) -> None:
    for number in (0, 1, 7, 12):
        try:
            probe = Probe(block_of(branch), x(), number)
        except (Refused, TypeError, RuntimeError):
            continue  # no graph is the other right answer
        for other in (-1, 0, 1, 2, 7, 8, 11, 12, 100):
            probe.agrees(x(), other)


def test_code_that_branches_on_the_size_of_what_it_does_not_use_is_followed_or_refused() -> None:
    probe = Probe(block_of(lambda b, h, mask: h * 2 if mask.shape[1] > 10 else h), x(), torch.ones(2, 12))
    for length in (5, 10, 11, 12, 30):
        probe.agrees(x(), torch.ones(2, length))


def test_a_number_that_nothing_depends_on_may_be_any() -> None:
    probe = Probe(block_of(lambda b, h, size: b.linear(h)), x(), (64, 48))
    assert probe.agrees(x(), (32, 96)) and probe.agrees(x(), (1, 1))


# ---- structure ------------------------------------------------------------------------------------------------------


def test_what_is_none_and_what_is_not_are_two_structures() -> None:
    block = block_of(lambda b, h, mask=None: h if mask is None else h * mask)
    probe = Probe(block, x(), mask=None)
    assert not probe.agrees(x(), mask=torch.ones(2, 6, 1)) and not probe.agrees(x())
    assert Probe(block, x(), mask=torch.ones(2, 6, 1)).agrees(x(3, 9), mask=torch.zeros(3, 9, 1))


def test_nested_arguments_and_results_keep_their_kinds() -> None:
    block = block_of(lambda b, pair, more: (pair[0] + more["a"], [pair[1], None, 0.5]))
    probe = Probe(block, (x(), x(seed=2)), {"a": 1})
    found = probe.graph((x(), x(seed=2)), {"a": 1})
    assert type(found) is tuple and type(found[1]) is list and found[1][1:] == [None, 0.5]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda b, h: {"sample": h}, "mapping"),
        (lambda b, h: (h, h.shape[1]), "number"),
        (lambda b, h: None, "no tensor"),
        (lambda b, h: h + torch.randn_like(h), "random"),
        (lambda b, h: F.dropout(h, 0.5, training=True), "random"),
        (lambda b, h: h + b.table.add_(1)[0], "its own weights or buffers"),
    ],
)
def test_what_no_artefact_can_hold_is_refused(function: Any, reason: str) -> None:
    with pytest.raises((Refused, Unsupported), match=reason):
        Probe(block_of(function), x())


def test_a_list_that_is_changed_is_refused() -> None:
    def pops(b: Any, h: T, control: list[T]) -> T:
        return h + control.pop()

    with pytest.raises(Refused, match="changes a list"):
        Probe(block_of(pops), x(), [x(), x(seed=2)])


def test_dropout_that_is_off_is_nothing_random() -> None:
    assert Probe(block_of(lambda b, h: F.scaled_dot_product_attention(h, h, h, dropout_p=0.0)), x()).agrees(x(3))
    assert Probe(block_of(lambda b, h: F.dropout(h, 0.5, training=b.training)), x()).agrees(x(3))


def test_changes_to_arguments_are_made_again() -> None:
    def in_place(b: Any, image: T, text: T) -> tuple[T, T]:
        image += b.linear(image)
        text[:, 1:].mul_(2)
        return image, text

    probe = Probe(block_of(in_place), x(), x(seed=2))
    assert sorted(probe.artefact.mutated) == [0, 1]
    assert probe.agrees(x(3, 7), x(3, 5, seed=2))
    outside = x(2, 8, 6).transpose(1, 2)  # not contiguous: the graph gets a copy, which must be copied back
    wanted = outside.clone()
    probe.block(wanted, x(seed=2))
    probe.graph(outside, x(seed=2))
    assert torch.allclose(outside, wanted, atol=1e-5)


def test_constants_of_the_code_are_kept_and_large_foreign_tensors_are_not() -> None:
    probe = Probe(block_of(lambda b, h: h * torch.tensor([0.5] * 8)), x())
    assert [c.tolist() for c in probe.captured.constants] == [[0.5] * 8]
    assert probe.agrees(x(3))
    outside = torch.zeros(300, 300)
    with pytest.raises(Refused, match="90000 elements"):
        Probe(block_of(lambda b, h: h + outside.sum()), x())


# ---- options --------------------------------------------------------------------------------------------------------


def test_a_tensor_from_the_options_is_an_input() -> None:
    probe = Probe(block_of(lambda b, h, options: h * options["sigmas"]), x(), {"sigmas": torch.tensor([2.0])})
    assert probe.captured.options == [(0, "sigmas")]
    assert probe.agrees(x(), {"sigmas": torch.tensor([9.0])})
    assert not probe.agrees(x(), {}) and not probe.agrees(x(), {"sigmas": 3.0})


def test_a_value_from_the_options_is_a_condition() -> None:
    probe = Probe(block_of(lambda b, h, options: h * options.get("scale", 1.0)), x(), {"scale": 2.0})
    assert probe.agrees(x(), {"scale": 2.0, "other": 1})
    assert not probe.agrees(x(), {"scale": 3.0}) and not probe.agrees(x(), {})


def test_code_in_the_options_is_refused_and_the_refusal_is_guarded() -> None:
    block = block_of(lambda b, h, options: options["patches"]["attn1_patch"][0](h) if "patches" in options else h)
    with pytest.raises(Refused, match=r"options\['patches'\]\['attn1_patch'\]") as refusal:
        Probe(block, x(), {"patches": {"attn1_patch": [torch.sin]}})
    from nexfort_engine.readset import checker

    check = checker(refusal.value.guards)  # type: ignore[attr-defined]
    assert check([{"patches": {"attn1_patch": [torch.cos]}}]) and not check([{}])


@pytest.mark.parametrize(
    "writes",
    [
        lambda b, h, o: o.update(activations_shape=list(h.shape)),
        lambda b, h, o: o.update(block_index=3, name="x", deep=(1, [2.5, None])),
        lambda b, h, o: o.update(cache=h * 2),
        lambda b, h, o: o.update(length=h.shape[1] * 2 + 1),
        lambda b, h, o: o.pop("scale", None),
        lambda b, h, o: o.__delitem__("scale"),
        lambda b, h, o: o["nested"].update(inner=1),
        lambda b, h, o: o["nested"].update(inner=h.sum()),
        lambda b, h, o: o.__setitem__(("a", 1), 5),
        lambda b, h, o: o["items"].append(1),
    ],
)
def test_what_a_block_writes_into_the_options_is_written_or_refused(writes: Any) -> None:
    def block(b: Any, h: T, options: dict[str, Any]) -> T:
        writes(b, h, options)
        return b.linear(h)

    given = {"scale": 1.0, "nested": {"old": 1}, "items": [0]}
    try:
        probe = Probe(block_of(block), x(), given)
    except Refused:
        return  # the block then runs eager, which is right as well
    probe.agrees(x(3, 9), copy.deepcopy(given))


def test_what_is_written_into_a_copy_goes_nowhere() -> None:
    def block(b: Any, h: T, options: dict[str, Any]) -> T:
        extra = {**options.copy(), "made": h}
        extra["img_slice"] = [h.shape[1], 2 * h.shape[1]]
        return extra["made"] * 2

    probe = Probe(block_of(block), x(), {"scale": 1.0})
    assert probe.agrees(x(3, 9), {"scale": 2.0}) and not probe.artefact.writes


# ---- the block stays itself -----------------------------------------------------------------------------------------


class Caches(nn.Module):
    """A block that keeps a tensor on itself, and may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.cache: Any = None
        self.fails = False

    def forward(self, h: T) -> T:
        if self.cache is None:
            self.cache = torch.arange(8.0)
        if self.fails:
            raise ValueError("it fails")
        return self.linear(h) + self.cache


@pytest.mark.parametrize("fails", [False, True])
def test_a_block_is_the_same_after_a_capture(fails: bool) -> None:
    block = Caches().eval().requires_grad_(False)
    block.fails = fails
    tables = [(sub, type(sub), dict(vars(sub)), dict(sub._parameters), dict(sub._buffers)) for sub in block.modules()]
    flat = Flat()
    spec = flatten_call((x(),), {}, flat)
    if fails:
        with pytest.raises(ValueError, match="it fails"):
            capture(block, Example.of(spec, flat))
    else:
        capture(block, Example.of(spec, flat))
    for sub, kind, attributes, parameters, buffers in tables:
        assert type(sub) is kind
        for now, then in ((vars(sub), attributes), (sub._parameters, parameters), (sub._buffers, buffers)):
            assert list(now) == list(then) and all(now[name] is value for name, value in then.items())
    assert block.cache is None
    block.fails = False
    assert type(block(x())) is torch.Tensor


def test_a_hook_keeps_a_block_from_being_captured() -> None:
    block = block_of(lambda b, h: b.linear(h))
    handle = block.linear.register_forward_hook(lambda *_: None)
    with pytest.raises(Refused, match="forward hook on linear"):
        Probe(block, x())
    handle.remove()
    assert Probe(block, x()).agrees(x(3))


def test_a_weight_that_is_no_plain_tensor_is_refused() -> None:
    class Odd(torch.Tensor):
        pass

    block = block_of(lambda b, h: h + b.odd, odd=torch.ones(8).as_subclass(Odd))
    with pytest.raises(Refused, match="Odd"):
        Probe(block, x())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_capture_does_not_depend_on_the_mode_it_is_made_in(mode: Any) -> None:
    block = block_of(lambda b, h: h.add_(b.linear(h)))
    with mode():
        probe = Probe(block, x())
    assert probe.agrees(x(3, 4))


def test_captures_in_threads_that_end_do_not_crash_the_process() -> None:
    # torch 2.11 for CUDA without a device lets the first thread that traces own a device guard, and crashes after it
    code = """
import threading, torch
from torch import nn
from nexfort_engine.capture import Example, capture
from nexfort_engine.signature import Flat, flatten_call
def work():
    flat = Flat()
    spec = flatten_call((torch.ones(2, 4),), {}, flat)
    capture(nn.Linear(4, 4).eval().requires_grad_(False), Example.of(spec, flat))
    done.append(1)
done = []
for _ in range(3):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
assert len(done) == 3
"""
    root = Path(capture_module.__file__).parents[2 - 1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-1500:]


# ---- what is stored beside it ---------------------------------------------------------------------------------------


def test_sources_are_those_of_the_code_that_was_walked() -> None:
    probe = Probe(block_of(lambda b, h: b.linear(h)), x())
    # a filter of torch's log and a hook of the garbage collector, both the test runner's, run in between
    found = {k: v for k, v in probe.captured.sources.items() if k.partition(".")[0] not in ("conftest", "hypothesis")}
    assert found == {__name__: hash_source(__file__)}
    assert sources_changed(probe.captured.sources) is None


def test_a_changed_or_missing_source_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "some_host.py"
    file.write_text("def double(x):\n    return x * 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import some_host  # type: ignore[import-not-found]

    probe = Probe(block_of(lambda b, h: some_host.double(b.linear(h))), x())
    found = {k for k in probe.captured.sources if k.partition(".")[0] not in ("conftest", "hypothesis")}
    assert found == {__name__, "some_host"}
    file.write_text("def double(x):\n    return x + x\n")
    assert sources_changed(probe.captured.sources) == "some_host"
    assert sources_changed({"never_imported": "0"}) == "never_imported"
    monkeypatch.delitem(sys.modules, "some_host")
    assert sources_changed(probe.captured.sources) == "some_host"


def test_the_key_of_a_call_holds_no_size() -> None:
    def key(*args: Any) -> list[Any]:
        flat = Flat()
        spec = flatten_call(args, {}, flat)
        return spec_key(spec, flat, [tensor_meta(t) for t in flat.tensors])

    assert key(x(), (4, 8)) == key(x(3, 9), (5, 9))
    calls = ((x(),), (x().half(),), (x()[0],), (x(), None), (x(), 1), (x(), True))
    assert len({str(key(*args)) for args in calls}) == 6


def test_the_manifest_is_text_and_comes_back_as_it_was() -> None:
    import json

    block = block_of(lambda b, h, size, options: (h * options["scale"], [None, (h, "x")]))
    probe = Probe(block, x(), (3, 4), {"scale": 2.0})
    manifest = artefacts.manifest_of(probe.captured, "block", "Block")
    again = artefacts.Artefact("id", "primary", json.loads(json.dumps(manifest)))
    assert again.output == probe.artefact.output and again.guards == probe.artefact.guards
    flat = Flat()
    flatten_call((x(3), (5, 6), {"scale": 2.0}), {}, flat)
    assert again.broken_by(flat) is None
