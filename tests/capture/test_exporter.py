# SPDX-License-Identifier: Apache-2.0
"""Captures: a graph stands for its block at every call that its conditions and guards allow, or there is no graph.

`Probe` asks that of each block here: at other sizes, numbers and options the graph gives what the block gives, or the
conditions refuse the call; where the block itself refuses it, they must.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from large_rows import few
from probe import Probe, T, block_of, x
from torch import nn
from torch.nn.utils import parametrizations

from nexfort_engine.capture import exporter
from nexfort_engine.capture.exporter import capture, spec_key
from nexfort_engine.capture.types import Example
from nexfort_engine.guards.call_spec import Flat, flatten_call
from nexfort_engine.guards.option_recorder import Refused
from nexfort_engine.modules.memory_format import tensor_meta
from nexfort_engine.modules.tree import WeightSlots
from nexfort_engine.runtime import artifact

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


def test_an_argument_may_be_called_as_the_tracer_calls_its_own() -> None:
    probe = Probe(block_of(lambda b, h, mod, self_=None, module=None: b.linear(h) * mod), x(), mod=x(1, 1), module=None)
    assert probe.agrees(x(3), mod=x(1, 1, seed=3), module=None)


def test_constants_of_the_code_are_kept_and_large_foreign_tensors_are_not() -> None:
    probe = Probe(block_of(lambda b, h: h * torch.tensor([0.5] * 8)), x())
    assert [c.tolist() for c in probe.captured.constants] == [[0.5] * 8]
    assert probe.agrees(x(3))
    outside = torch.zeros(300, 300)
    with pytest.raises(Refused, match="90000 elements"):
        Probe(block_of(lambda b, h: h + outside.sum()), x())


class _Layer(nn.Module):
    """What layers do with sizes: heads, a branch, a slice, attention to something shorter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, h: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        gate, value = self.inner(self.norm(h)).chunk(2, -1)
        heads = [t.reshape(t.shape[0], -1, 2, 4).transpose(1, 2) for t in (value, seen, seen)]
        given = nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(h.shape)
        return h + self.outer(given * torch.sigmoid(gate)) + (seen[:, -1:] if h.shape[1] > seen.shape[1] else h[:, :1])


@pytest.mark.parametrize("layers", few([2, exporter._MANY_LAYERS], [exporter._MANY_LAYERS]))
def test_a_block_of_many_layers_is_captured_faster_and_the_same(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(_Layer() for _ in range(layers))

        def forward(self, h: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                h = layer(h, seen)
            return h

    block, found = Block(), []
    for many in (exporter._MANY_LAYERS, 1000):
        monkeypatch.setattr(exporter, "_MANY_LAYERS", many)
        FakeTensorMode.cache_clear()
        probe = Probe(block, x(2, 6), x(2, 5, seed=2))
        found.append(probe.captured)
        assert (FakeTensorMode.cache_hits > 0) == (layers >= many)
        assert probe.agrees(x(3, 9), x(3, 7, seed=2)) and not probe.agrees(x(3, 5), x(3, 7, seed=2))
    one, other = ((c.graph.code, c.conditions.as_json(), c.guards, c.reads, c.sources) for c in found)
    assert one == other


def test_a_new_dict_is_a_result_and_one_that_was_given_is_none() -> None:
    probe = Probe(block_of(lambda b, h: (b.linear(h), {"last": h[:, -1:], "more": {}, "of": [None]})), x())
    assert probe.agrees(x(3, 9))
    assert list(probe.graph(x())[1]) == ["last", "more", "of"]
    with pytest.raises(Refused, match="a mapping that it was given"):
        Probe(block_of(lambda b, h, options: (b.linear(h), options)), x(), {})


# ---- sizes and numbers ----------------------------------------------------------------------------------------------


def test_a_number_that_slices_may_vary() -> None:
    """Slicing by a plain number leaves slices in the graph that take everything; by a free one it does not."""
    probe = Probe(block_of(lambda b, h, n: torch.cat([h[:, :n] * 2, b.linear(h[:, n:])], 1)), x(), 3)
    assert probe.agrees(x(3, 9), 5) and probe.agrees(x(2, 6), 2)


def test_a_size_that_is_a_product_is_free_of_what_its_factors_were_taken_for() -> None:
    block = block_of(lambda b, h, seen: b.linear(h).reshape(h.shape[0] // seen.shape[-1], seen.shape[-1], -1, 8))
    probe = Probe(block, x(6), torch.zeros(2, 3))
    assert probe.agrees(x(3), torch.zeros(1, 3)) and probe.agrees(x(2), torch.zeros(1, 2))
    assert not probe.agrees(x(4), torch.zeros(1, 3)), "four are no multiple of three"
    bounded = Probe(block_of(lambda b, h: b.linear(h) + h[:, 2:4].sum(1, keepdim=True) * (h.shape[1] > 3)), x())
    assert bounded.agrees(x(2, 4)) and not bounded.agrees(x(2, 3)), "the code asked for more than three"


def test_the_library_a_convolution_is_for_binds_no_size(monkeypatch: pytest.MonkeyPatch) -> None:
    before, asked = torch.get_num_threads(), []
    choose = torch._C._select_conv_backend
    monkeypatch.setattr(torch._C, "_select_conv_backend", lambda *a, **k: asked.append(1) or choose(*a, **k))
    torch.set_num_threads(1)  # then NNPACK takes batches of 16 and more
    try:
        block = block_of(lambda b, h: nn.functional.conv2d(h, b.table[:4].view(4, 8, 1, 1)))
        probe = Probe(block, torch.randn(2, 8, 6, 6))
        assert asked and probe.agrees(torch.randn(20, 8, 6, 6)) and probe.agrees(torch.randn(1, 8, 6, 6))
    finally:
        torch.set_num_threads(before)


def test_numpy_takes_the_root_of_a_number_that_depends_on_sizes() -> None:
    probe = Probe(block_of(lambda b, h: h * np.sqrt(h.numel() / h.shape[0])), x())
    assert probe.agrees(x(3, 9)) and not hasattr(torch.SymFloat, "sqrt")


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


@pytest.mark.parametrize("captured", [1, 4, 8])
@pytest.mark.parametrize(
    "asks",
    [
        lambda tensor: tensor.shape[0] > 6,
        lambda tensor: tensor.numel() == 4,
        lambda tensor: tensor.dtype == torch.float64,
        lambda tensor: tensor.dim() > 1,
    ],
    ids=["size", "numel", "dtype", "rank"],
)
def test_a_tensor_of_the_options_that_code_only_asks_about_is_a_condition(asks: Any, captured: int) -> None:
    block = block_of(lambda b, h, options: b.linear(h) * (2.0 if asks(options["a"]) else 3.0))
    probe = Probe(block, x(), {"a": torch.ones(captured)})
    assert probe.agrees(x(), {"a": torch.ones(captured)})
    for other in (torch.ones(1), torch.ones(4), torch.ones(8), torch.ones(4).double(), torch.ones(8, 1)):
        probe.agrees(x(), {"a": other})  # the same result, or it refuses the call


def test_code_in_the_options_is_refused_and_the_refusal_is_guarded() -> None:
    block = block_of(lambda b, h, options: options["patches"]["attn1_patch"][0](h) if "patches" in options else h)
    with pytest.raises(Refused, match=r"options\['patches'\]\['attn1_patch'\]") as refusal:
        Probe(block, x(), {"patches": {"attn1_patch": [torch.sin]}})
    from nexfort_engine.guards.option_guards import checker

    check = checker(refusal.value.guards)  # type: ignore[attr-defined]
    assert check([{"patches": {"attn1_patch": [torch.cos]}}]) and not check([{}])


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


def test_a_parametrised_weight_is_computed_in_the_graph() -> None:
    block = block_of(lambda b, h: b.linear(h))
    parametrizations.weight_norm(block.linear).requires_grad_(False)
    probe = Probe(block, x())
    assert probe.agrees(x(3))
    block.linear.parametrizations.weight.original0.mul_(3)
    assert probe.agrees(x(2))


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


def test_an_example_takes_no_memory_while_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    given, trace = list[int](), exporter._trace

    def traced(one: Any, args: Any, dims: Any) -> Any:
        given.extend(tensor.untyped_storage().nbytes() for tensor in args[1])
        return trace(one, args, dims)

    monkeypatch.setattr(exporter, "_trace", traced)
    probe = Probe(block_of(lambda b, h, more: b.linear(h) + more[0].mT), x(), [x().mT])
    assert probe.agrees(x(3), [x(3).mT]) and given == [0, 0]


@pytest.mark.parametrize("error", [Refused, ValueError])
def test_what_a_failed_capture_was_given_goes_with_it(error: type[Exception]) -> None:
    def fails(block: nn.Module, h: T) -> T:
        raise error("not this one")

    block, flat = block_of(fails), Flat()
    example = Example.of(flatten_call((x(),), {}, flat), flat)
    weights = [torch.zeros_like(weight) for weight in WeightSlots(block).read()]
    gone, told = list(map(weakref.ref, weights)), ""
    gc.disable()
    try:
        try:
            capture(block, example, weights=weights)
        except error as failed:
            told = str(failed)
        del weights
        assert told == "not this one" and [ref() for ref in gone] == [None] * len(gone)
    finally:
        gc.enable()


def test_captures_in_threads_that_end_do_not_crash_the_process() -> None:
    # torch 2.11 for CUDA without a device lets the first thread that traces own a device guard, and crashes after it
    code = """
import threading, torch
from torch import nn
from nexfort_engine.capture.exporter import Example, capture
from nexfort_engine.guards.call_spec import Flat, flatten_call
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
    root = Path(exporter.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-1500:]


class Streams(nn.Module):
    """A block that works through a video in chunks: it keeps the last frames for the next one."""

    def __init__(self, keep: Any) -> None:
        super().__init__()
        self.linear, self.last, self.keep = nn.Linear(8, 8), None, keep

    def forward(self, h: T) -> T:
        before, self.last = self.last, self.keep(h)
        return self.linear(h) if before is None else self.linear(h) + before


def _written(table: T, h: T) -> T:
    table[:, 2:] += h[0, :1, 2:]
    return table


@pytest.mark.parametrize(
    ("keep", "refused"),
    [
        (lambda h: h[:, -1:].clone(), True),
        (lambda h: h, True),
        (lambda h: [h[:, -1:] * 0 + 1], True),
        (lambda h: h.chunk(2, 1)[1].mean(1, keepdim=True), True),
        (lambda h: h.max(1, keepdim=True)[0], True),
        (lambda h: _written(h.new_zeros(1, 8), h), True),
        (lambda h: torch.arange(float(h.shape[1]))[:, None], False),
        (lambda h: h.new_zeros(h.shape[1], 1) + torch.ones_like(h[0, :, :1]), False),
    ],
    ids=[
        "a part",
        "the input",
        "in a list",
        "split off",
        "a maximum",
        "written to",
        "a table of sizes",
        "of its shape",
    ],
)
def test_what_a_block_keeps_of_its_inputs_refuses_it_and_a_table_does_not(keep: Any, refused: bool) -> None:
    block = Streams(keep).eval().requires_grad_(False)
    flat = Flat()
    spec = flatten_call((x(),), {}, flat)
    if refused:
        with pytest.raises(Refused, match="keeps a tensor that it made of its inputs"):
            capture(block, Example.of(spec, flat))
    else:
        graph = capture(block, Example.of(spec, flat)).graph
        assert len(next(n for n in graph.graph.nodes if n.op == "output").args[0]) == 1
        assert not [n for n in graph.graph.nodes if "arange" in str(n.target) or "zeros" in str(n.target)]
    assert block.last is None


class Counts(nn.Module):
    """A block whose every other call is another: it counts them in `kind` of attribute."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(8, 8), kind
        if kind == "a buffer":
            self.register_buffer("number", torch.zeros(()))
        else:
            self.number = torch.zeros(()) if kind == "a tensor" else 0

    def forward(self, h: T) -> T:
        self.number = self.number + 1
        return self.linear(h) * self.number


@pytest.mark.parametrize("kind", ["a number", "a tensor", "a buffer"])
def test_a_block_that_counts_its_calls_is_refused(kind: str) -> None:
    block, flat = Counts(kind).eval().requires_grad_(False), Flat()
    with pytest.raises(Refused, match=r"it counts in its attribute number|keeps a tensor"):
        capture(block, Example.of(flatten_call((x(),), {}, flat), flat))
    assert not block.number


# ---- what is stored beside it ---------------------------------------------------------------------------------------


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
    manifest = artifact.manifest_of(probe.captured, "Block", None, {})
    again = artifact.Artefact("id", "primary", json.loads(json.dumps(manifest)))
    assert again.output == probe.artefact.output and again.guards == probe.artefact.guards
    flat = Flat()
    flatten_call((x(3), (5, 6), {"scale": 2.0}), {}, flat)
    assert again.guard_failure(flat) is None


class PadsOddImages(nn.Module):
    """Gives a layer of its own a size of the call, as the downsampling of T2I adapters does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv2d(3, 3, 1), nn.AvgPool2d(2)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.pool.padding = [h.shape[2] % 2, h.shape[3] % 2]  # type: ignore[assignment]
        return self.conv(self.pool(h))


def test_an_attribute_that_is_made_of_the_sizes_of_a_call_is_no_state_of_the_block() -> None:
    probe = Probe(PadsOddImages(), torch.randn(2, 3, 8, 6))
    assert probe.agrees(torch.randn(1, 3, 4, 10))
