# SPDX-License-Identifier: Apache-2.0
"""Layers in int8 of ComfyUI's files by the engine's own kernels: which, what goes along, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.nn import functional

pytest.importorskip("comfy_kitchen", reason="the operators are of a package that ComfyUI requires")
import int8_blocks  # it needs that package
from comfy_kitchen.registry import registry
from int8_blocks import BLOCKS, WIDTH, graph_of, linear, random, size, weights
from subjects import graphs_as_they_are

import nexfort_engine
from nexfort_engine.cache.store import Store
from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.config.option_catalogue import OPTION_ROWS
from nexfort_engine.engine import Engine
from nexfort_engine.kernels.quantize_rows import op as quantize_rows
from nexfort_engine.kernels.scaled_linear import choice
from nexfort_engine.kernels.scaled_linear import op as scaled_linear
from nexfort_engine.passes import int8_linear
from nexfort_engine.passes.int8_linear import int8_linears, left

T = torch.Tensor
KITCHEN = torch.ops.comfy_kitchen.int8_linear.default


def _calls(graph: torch.fx.GraphModule, target: Any) -> list[Any]:
    return [node for node in graph.graph.nodes if node.target is target]


def _kinds(graph: torch.fx.GraphModule) -> list[str]:
    """What each input is computed of on its way to int8."""
    modulated = ("", " with a factor", " with a shift", " with both")
    calls = _calls(graph, quantize_rows.operator())
    return [n.args[6] + modulated[(n.args[4] is not None) + 2 * (n.args[5] is not None)] for n in calls]


def _behind(graph: torch.fx.GraphModule) -> list[str]:
    """What is computed behind each product."""
    found = []
    for node in _calls(graph, scaled_linear.operator()):
        up, gate, residual = (node.args[i] is not None for i in (5, 8, 9))
        names = {node.args[10]: bool(node.args[10]), "up": up, "gate": gate, "residual": residual}
        found.append(" ".join(name for name, there in names.items() if there))
    return found


EXPECTED = {
    "sandwich": (
        5,
        ["rms_norm with a factor", "", "rms_norm with a factor", ""],
        ["", "", "silu up", ""],
    ),
    "gated": (
        6,
        ["layer_norm with both", "", "layer_norm with both", "gelu_tanh"],
        ["", "", "", "gate residual", "", "gate residual"],
    ),
    "halves": (5, ["layer_norm", "swiglu", "", "gelu_tanh"], ["", "residual", "gelu", "", "residual"]),
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_what_is_before_and_behind_goes_along(kind: str) -> None:
    graph = graph_of(kind)
    count, before, behind = EXPECTED[kind]
    assert int8_linears(graph) == count and int8_linears(graph) == 0 and not left(graph)
    graph.graph.lint()
    assert not _calls(graph, KITCHEN)
    assert _kinds(graph) == before
    assert _behind(graph) == behind


def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_linear, "_DEVICE", "cpu")
    monkeypatch.setattr(int8_linear, "LEAST", 1)
    monkeypatch.setattr(quantize_rows, "DTYPES", (torch.float16, torch.bfloat16, torch.float32))


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are taken on a CPU too, of any number of rows and in any dtype."""
    _on_cpu(monkeypatch)


@settings(max_examples=10)
@given(
    st.sampled_from(list(BLOCKS)),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    st.integers(1, 3),
    st.integers(1, 70),
    st.integers(0, 2**16),
)
def test_a_block_is_as_near_to_the_truth_as_comfy_kitchens(
    kind: str, dtype: torch.dtype, batch: int, tokens: int, seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        _on_cpu(patch)
        graph = graph_of(kind, dtype, "cpu", 64)
        assert int8_linears(graph) == EXPECTED[kind][0]
    graph.recompile()
    make = random(seed)
    w = weights(kind, dtype, make)
    x, modulation = make((batch, tokens, WIDTH), dtype), make((batch, BLOCKS[kind][2] * WIDTH), dtype)
    block = BLOCKS[kind][0]
    (ours,) = graph(*w, x, modulation)
    theirs = block(w, x, modulation)
    wide = [part.double() if part.is_floating_point() and part.dtype == dtype else part for part in w]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(int8_blocks, "linear", _truth)
        truth = block(wide, x.double(), modulation.double())
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    # what rounding does to few numbers is chance
    assert size(ours - truth) <= 1.15 * size(theirs - truth) + 5e-3 * size(truth), (kind, dtype, batch, tokens, seed)


def _truth(x: T, w: Any, bias: T | None = None, act: str | None = None, group: int = int8_blocks.GROUP) -> T:
    if act == "gelu_tanh":
        x = functional.gelu(x, approximate="tanh")
    elif act == "swiglu":
        x = functional.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]
    return int8_blocks.truth(x, w, group) + (0 if bias is None else bias)


# ---- which layers ----------------------------------------------------------------------------------------------------


def _one(w: Any, x: T, modulation: T) -> T:
    return linear(x, w[1:3])


@pytest.mark.parametrize(
    ("reason", "how"),
    [
        ("31 rows, for which the host has kernels", {"tokens": 31}),
        ("torch.float32 of torch.float32", {"dtype": torch.float32}),
        ("it is computed on cpu", {"device": "cpu"}),
    ],
)
def test_layers_stay_that_the_kernels_are_not_for(reason: str, how: dict[str, Any]) -> None:
    if "tokens" in how:

        def first(w: Any, x: T, modulation: T) -> T:
            return linear(x[0], w[1:3])

        graph = graph_of("sandwich", function=first, **how)
    else:
        graph = graph_of("sandwich", function=_one, **how)
    assert int8_linears(graph) == 0 and len(_calls(graph, KITCHEN)) == 1
    (told,) = left(graph)
    assert told.startswith("a layer in int8 stays comfy_kitchen::int8_linear: ") and reason in told


def _changed(at: int, shape: tuple[int, ...], dtype: torch.dtype, device: str = "cuda:0") -> Callable[[list[T]], None]:
    def change(w: list[T]) -> None:
        w[at] = torch.empty(shape, dtype=dtype, device=device)

    return change


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("another device", _changed(1, (768, WIDTH), torch.int8, "cpu")),
        ("another device", _changed(2, (768, 1), torch.float32, "cpu")),
        ("with scales in torch.float16", _changed(2, (768, 1), torch.half)),
        ("scales or a bias of another size than 768", _changed(2, (768, 2), torch.float32)),
    ],
)
def test_layers_with_odd_weights_stay(reason: str, change: Callable[[list[T]], None]) -> None:
    graph = graph_of("sandwich", change=change, function=_one)
    assert int8_linears(graph) == 0 and reason in left(graph)[0]


@pytest.mark.parametrize(
    ("reason", "group", "inner"),
    [("in groups of 4", 4, WIDTH), ("in groups of 1024", 1024, WIDTH), ("rows of 200 numbers", 0, 200)],
)
def test_rows_that_the_kernels_do_not_take_stay(reason: str, group: int, inner: int) -> None:
    def cut(w: Any, x: T, modulation: T) -> T:
        return linear(x[..., :inner].contiguous(), (w[1][:, :inner].contiguous(), w[2]), group=group)

    graph = graph_of("sandwich", function=cut)
    assert int8_linears(graph) == 0 and reason in left(graph)[0]


def test_groups_that_do_not_divide_a_row_stay() -> None:
    def cut(w: Any, x: T, modulation: T) -> T:
        return linear(x[..., :192].contiguous(), (w[1][:, :192].contiguous(), w[2]), group=256)

    graph = graph_of("sandwich", function=cut)
    assert int8_linears(graph) == 0 and "rows of 192 numbers are rotated in groups of 256" in left(graph)[0]


def test_what_was_measured_to_lose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = choice.Measured(choice.FORMS[0], 100.0, 90.0)
    monkeypatch.setattr(choice, "MEASURED", {(9, 0): {(3 * WIDTH, WIDTH): slow}})
    monkeypatch.setattr(int8_linear, "_card", lambda _: (9, 0))
    graph = graph_of("sandwich")
    assert int8_linears(graph) == 4 and "was measured to be no faster" in left(graph)[0]
    monkeypatch.setattr(int8_linear, "_card", lambda _: (8, 9))
    assert int8_linears(graph_of("sandwich")) == 5


def test_it_is_on_for_gpus_unless_switched_off() -> None:
    for mode in ("O2", "O3", "max-autotune"):
        asked = CompileConfig.parse(mode)
        assert asked.lowering_options("cuda")["nexfort.int8_linear"]
        assert not asked.lowering_options("cpu")["nexfort.int8_linear"]
    off = CompileConfig.parse({"mode": "O2", "options": {"fuse.int8_linear": False}})
    assert not off.lowering_options("cuda")["nexfort.int8_linear"]


@pytest.mark.parametrize(
    ("card", "told", "reason"),
    [
        ((9, 0), {"available": True, "capabilities": ["int8_linear"]}, ""),
        ((9, 0), {"available": False, "unavailable_reason": "built for CUDA 13"}, "built for CUDA 13"),
        ((9, 0), {"available": True, "disabled": True}, "switched off"),
        ((9, 0), {"available": True, "capabilities": []}, "have no int8_linear"),
        ((7, 5), {"available": True, "capabilities": ["int8_linear"]}, "need 8.0 or newer"),
    ],
)
def test_without_comfy_kitchens_cuda_kernels_it_is_not_active(
    card: tuple[int, int], told: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What stands for the numbers of the file is another back end then."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: card)
    monkeypatch.setattr(registry, "list_backends", lambda: {"cuda": told})
    config = CompileConfig.parse({"mode": "O2", "options": {"fuse.int8_linear": True}})
    engine = Engine(torch.nn.Linear(8, 8), config, Store(tmp_path))
    assert engine.builder.finder.options("cuda")["nexfort.int8_linear"] is (not reason)
    notes = [note for note in engine.report.as_dict()["notes"] if "fuse.int8_linear is not active" in note]
    assert len(notes) == bool(reason) and reason in " ".join(notes)


class _Int8(torch.nn.Module):
    """A block that computes in comfy_kitchen's int8."""

    def __init__(self) -> None:
        super().__init__()
        made = weights("sandwich", torch.float32, random(0))[1:3]
        self.weight, self.scale = (torch.nn.Parameter(part, requires_grad=False) for part in made)

    def forward(self, x: T) -> T:
        return linear(x, (self.weight, self.scale))


class _OtherInt8(_Int8):
    """One of another kind."""


class _Half(torch.nn.Linear):
    """A block without such layers."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


class _OtherHalf(_Half):
    """One of another kind."""


class _Net(torch.nn.Module):
    def __init__(self, *kinds: type[torch.nn.Module]) -> None:
        super().__init__()
        self.lists = torch.nn.ModuleList(torch.nn.ModuleList([kind(), kind()]) for kind in kinds)

    def forward(self, x: T) -> list[T]:
        return [block(x) for blocks in self.lists for block in blocks]


@pytest.mark.parametrize("kinds", [(_Int8, _OtherInt8), (_Half, _OtherHalf)])
def test_a_model_with_such_layers_is_told_once_without_asking(
    kinds: tuple[type[torch.nn.Module], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what it costs. One without such layers misses nothing."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(registry, "list_backends", lambda: {"cuda": {"available": False}})
    with graphs_as_they_are():
        compiled = nexfort_engine.compile(_Net(*kinds))
        finder = compiled._nexfort_engine.builder.finder
        options = finder.options
        monkeypatch.setattr(finder, "options", lambda _: options("cuda"))
        with torch.inference_mode():
            compiled(random(1)((4, WIDTH), torch.float32))
    report = compiled.report.as_dict()
    assert report["artefacts_compiled"] == 2 and not report["eager"]
    notes = [note for note in report["notes"] if "int8_linear" in note]
    assert len(notes) == (_Int8 in kinds)
    for note in notes:
        assert note.startswith("fuse.int8_linear is not active: comfy_kitchen has no CUDA kernels here")
        assert OPTION_ROWS["fuse.int8_linear"].gain in note


def test_an_operator_with_more_arguments_is_taken_while_they_say_nothing() -> None:
    """As newer versions of the package have it."""
    library = torch.library.Library("comfy_kitchen_newer", "FRAGMENT")
    library.define(
        "int8_linear(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, int output_dtype_code, "
        "bool convrot=False, int convrot_groupsize=256, str? input_act=None, float input_act_eps=1e-06, "
        "Tensor? residual=None) -> Tensor"
    )
    newer = torch.ops.comfy_kitchen_newer.int8_linear.default
    graph = graph_of("sandwich", function=_one)
    (call,) = _calls(graph, KITCHEN)
    call.target = newer
    layer = int8_linear.Layer(call, int8_linear._given(call))
    assert int8_linear._odd(layer) is None
    call.kwargs = {"residual": call.args[0]}
    assert "its arguments are" in (int8_linear._odd(int8_linear.Layer(call, int8_linear._given(call))) or "")
    library._destroy()


# ---- what is shared, and what must not be ----------------------------------------------------------------------------


def _written_between(w: Any, x: T, modulation: T) -> Any:
    h = x * 2
    first = linear(h, w[5:7])
    h.add_(1)
    return first, linear(h, w[7:9])


def _input_of_norm_written(w: Any, x: T, modulation: T) -> Any:
    h = x * 2
    normed = functional.rms_norm(h, [WIDTH], w[0], 1e-5)
    h.add_(1)
    return linear(normed, w[1:3]) + h.sum()


def _norm_read_elsewhere(w: Any, x: T, modulation: T) -> Any:
    normed = functional.rms_norm(x, [WIDTH], w[0], 1e-5)
    return linear(normed, w[1:3]), normed + 1


def _both_of_a_sum(w: Any, x: T, modulation: T) -> Any:
    return linear(x, w[5:7]) + linear(x + 1, w[7:9])


def _twice_itself(w: Any, x: T, modulation: T) -> Any:
    first = linear(x, w[5:7])
    return functional.silu(first) * first, linear(x, w[7:9])


def _gate_written(w: Any, x: T, modulation: T) -> Any:
    gate = modulation[:, None, :WIDTH] * 2
    h = linear(x, w[3:5]) * gate
    gate.zero_()
    return x + h


def _residual_written_later(w: Any, x: T, modulation: T) -> Any:
    h = x * 2
    made = h + linear(x, w[3:5])
    h.zero_()
    made.mul_(3)
    return made, h


def _modulation_of_other_rows(w: Any, x: T, modulation: T) -> Any:
    return linear(functional.rms_norm(x, [WIDTH], w[0], 1e-5) * (1 + x.mean(-1, keepdim=True)), w[1:3])


def _per_token(w: Any, x: T, modulation: T) -> Any:
    h = functional.rms_norm(x, [WIDTH], w[0], 1e-5) * x.tanh()
    return x + linear(h, w[3:5]) * x.sigmoid()


def _plus_itself(w: Any, x: T, modulation: T) -> Any:
    h = linear(x, w[3:5])
    return torch.addcmul(h, h, modulation[:, None, :WIDTH])


def _times_itself(w: Any, x: T, modulation: T) -> Any:
    h = functional.rms_norm(x, [WIDTH], w[0], 1e-5)
    return linear(h * h, w[1:3])


def _shifted_by_itself(w: Any, x: T, modulation: T) -> Any:
    h = functional.rms_norm(x, [WIDTH], w[0], 1e-5)
    return linear(torch.addcmul(h, h, modulation[:, None, :WIDTH]), w[1:3])


def _gated_by_itself(w: Any, x: T, modulation: T) -> Any:
    h = functional.silu(x)
    return linear(h * h, w[1:3]) + linear(functional.silu(x) * x, w[1:3])


def _chain(w: Any, x: T, modulation: T) -> Any:
    for _ in range(3):
        x = x + linear(functional.rms_norm(x, [WIDTH], w[0], 1e-5), w[3:5])
    return x


@pytest.mark.parametrize(
    ("function", "rows", "before", "behind"),
    [
        (_written_between, 2, ["", ""], ["", ""]),
        (_input_of_norm_written, 1, [""], [""]),
        (_norm_read_elsewhere, 1, [""], [""]),
        (_both_of_a_sum, 2, ["", ""], ["residual", ""]),
        (_twice_itself, 1, [""], ["", ""]),
        (_gate_written, 1, [""], [""]),
        (_residual_written_later, 1, [""], ["residual"]),
        (_modulation_of_other_rows, 1, [""], [""]),
        (_per_token, 1, ["rms_norm with a factor"], ["gate residual"]),
        (_plus_itself, 1, [""], [""]),
        (_times_itself, 1, [""], [""]),
        (_shifted_by_itself, 1, [""], [""]),
        (_gated_by_itself, 2, ["", "swiglu"], ["residual", ""]),
        (_chain, 3, ["rms_norm"] * 3, ["residual"] * 3),
    ],
)
def test_the_order_of_reads_and_writes_stays(
    function: Callable[..., Any], rows: int, before: list[str], behind: list[str], on_cpu: None
) -> None:
    graph = graph_of("sandwich", torch.float32, "cpu", 64, function=function)
    int8_linears(graph)
    graph.graph.lint()
    graph.recompile()
    assert len(_calls(graph, quantize_rows.operator())) == rows
    assert _kinds(graph) == before and sorted(_behind(graph)) == sorted(behind)
    make = random(0)
    w = weights("sandwich", torch.float32, make)
    inputs = make((2, 5, WIDTH), torch.float32), make((2, 4 * WIDTH), torch.float32)
    found = graph(*w, *(part.clone() for part in inputs))
    wanted = function(w, *(part.clone() for part in inputs))
    for ours, theirs in zip(found, wanted if isinstance(wanted, tuple) else [wanted], strict=True):
        assert size(ours - theirs) <= 0.02 * size(theirs)
