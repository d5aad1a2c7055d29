# SPDX-License-Identifier: Apache-2.0
"""Products in fp8 and the gates behind them in one launch: which of a graph are computed so, and what comes of it.

The kernel is that of test_geglu_linear.py, where it is compiled and interpreted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_blocks
import pytest
import torch
from emulated import Emulated
from gates import WIDTH, chunked, exported, gate_first, layer_like, sliced, split, whole_read
from torch.nn.functional import gelu, linear

from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.kernels.geglu_linear import fp8_op as geglu_linear_fp8
from nexfort_engine.kernels.gluon_support import DESCRIPTORS
from nexfort_engine.lowering import inductor
from nexfort_engine.passes import low_precision as precision
from nexfort_engine.passes.geglu_linear import LEAST, gated_linears
from nexfort_engine.passes.low_precision import low_precision
from nexfort_engine.quant import matmul
from nexfort_engine.quant.matmul import FP8, narrowed
from nexfort_engine.quant.quant_types import quant_type
from nexfort_engine.quant.quantized_linear import SCALE, QuantisedLinear

pytest.importorskip("triton", reason="the kernels are Triton's")
Tensor = torch.Tensor
aten = torch.ops.aten
INNER = 192
ROWS = (2, LEAST // 2, INNER)


@pytest.fixture(autouse=True)
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are taken however small, as on a card that has them."""
    monkeypatch.setattr(precision, "gain", lambda *_: 1.0)
    monkeypatch.setattr(matmul, "missing", lambda _: None)


@pytest.mark.parametrize("bias", [None, torch.ones(6)])
def test_the_operator_knows_its_result_without_computing_it(bias: Tensor | None) -> None:
    (x, x_scale), (weight, weight_scale) = narrowed(torch.randn(8, 5), FP8), narrowed(torch.randn(6, 5), FP8)
    given = (x, weight, x_scale, weight_scale, bias, torch.half)
    # test_schema compares inputs by torch.allclose, which does not know fp8 (torch 2.11)
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(geglu_linear_fp8.operator(), given, test_utils=tests, raise_exception=True)


# ---- which products --------------------------------------------------------------------------------------------------


def _graph(
    function: Callable[..., Any],
    rows: tuple[int, ...] = ROWS,
    width: int = WIDTH,
    dtype: torch.dtype = torch.half,
    device: str = "cuda:0",
) -> torch.fx.GraphModule:
    """The graph of a function of rows and a layer, its products brought to fp8."""
    graph = exported(function, layer_like(width, rows[-1], dtype), rows, dtype, device)
    assert low_precision(graph) > 0
    return graph


def _calls(graph: torch.fx.GraphModule, target: Any) -> list[torch.fx.Node]:
    return [node for node in graph.graph.nodes if node.target is target]


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
@pytest.mark.parametrize("function", [chunked, split, sliced])
def test_a_product_and_the_gate_behind_it_are_one_call(function: Callable[..., Tensor], dtype: torch.dtype) -> None:
    """Which is no further from what the narrow factors give in full than product and gate are."""
    graph, plain = (_graph(function, dtype=dtype) for _ in range(2))
    assert gated_linears(graph) == 1 and gated_linears(graph) == 0
    graph.graph.lint()
    assert len(_calls(graph, geglu_linear_fp8.operator())) == 1
    assert not _calls(graph, aten._scaled_mm.default) and not _calls(graph, aten.gelu.default)
    assert not _calls(graph, aten.t.default), "what looked at the weight is gone too"
    generator = torch.Generator().manual_seed(0)
    shapes = [(2 * WIDTH, INNER), (2 * WIDTH,), (3, 5, INNER)]
    w, b, x = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
    (ours,), (theirs,) = (Emulated(one).run(w, b, x) for one in (graph, plain))
    assert ours.dtype == theirs.dtype == dtype and ours.shape == theirs.shape == (3, 5, WIDTH)
    full = [values.double() * scale.double() for values, scale in (narrowed(x.flatten(0, 1), FP8), narrowed(w, FP8))]
    truth = function(full[0].view(3, 5, INNER), full[1], b.double())
    near, far = ((found.double() - truth).norm() for found in (theirs, ours))
    assert far <= near and far <= 1e-2 * truth.norm()


@pytest.mark.parametrize(("dtype", "biased"), [(torch.half, True), (torch.bfloat16, True), (torch.half, False)])
def test_a_layer_that_was_packed_ahead_is_found_too(dtype: torch.dtype, biased: bool) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(INNER, 2 * WIDTH, bias=biased).to(dtype)
    layer = QuantisedLinear(plain, quant_type("fp8_e4m3_e4m3_dynamic")).requires_grad_(False)
    held = [layer.weight.data, layer.weight_scale, *([plain.bias.data] if biased else [])]

    def function(x: Tensor, w: Tensor, s: Tensor, b: Tensor | None = None) -> Tensor:
        given = {"weight": w, SCALE: s, **({} if b is None else {"bias": b})}
        value, gate = torch.func.functional_call(layer, given, x).chunk(2, -1)
        return value * gelu(gate)

    graph = exported(function, held, ROWS, dtype, "cuda:0")
    assert gated_linears(graph) == 1
    graph.graph.lint()
    for said in _calls(graph, aten._assert_tensor_metadata.default):
        graph.graph.erase_node(said)  # of a device that is not there
    x = torch.randn(3, 5, INNER).to(dtype)
    (found,) = Emulated(graph).run(*held, x)
    wanted = chunked(x.double(), layer.full_weight(torch.float64), plain.bias.double() if biased else None)
    assert found.dtype == dtype and float((found.double() - wanted).norm() / wanted.norm()) < 0.06


def _with_another(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Two layers of one input are one product."""
    return chunked(x, w, b) + linear(x, w, b)[..., :WIDTH]


@pytest.mark.parametrize("function", [whole_read, gate_first, _with_another])
def test_what_is_no_such_gate_stays(function: Callable[..., Any]) -> None:
    graph = _graph(function)
    before = len(graph.graph.nodes)
    assert gated_linears(graph) == 0 and len(graph.graph.nodes) == before


@pytest.mark.parametrize(
    "other",
    [{"rows": (1, LEAST - 1, INNER)}, {"device": "cpu"}, {"width": 192}, {"rows": (2, LEAST, 96)}],
    ids=["few rows", "on a CPU", "odd columns", "odd rows"],
)
def test_products_stay_that_the_kernel_is_not_for(other: dict[str, Any]) -> None:
    assert gated_linears(_graph(chunked, **other)) == 0


def _slowly(mm: torch.fx.Node) -> None:
    mm.update_arg(7, False)


def _scaled_again(mm: torch.fx.Node) -> None:
    mm.update_arg(5, mm.args[2])


def _weight_across(mm: torch.fx.Node) -> None:
    weight: Any = mm.args[1]
    weight.target = aten.permute.default
    weight.args = (*weight.args, [1, 0])


def _read_before_its_bias(mm: torch.fx.Node) -> None:
    (output,) = mm.graph.find_nodes(op="output")
    output.update_arg(0, (*output.args[0], mm))


def _bias_of_a_row(mm: torch.fx.Node) -> None:
    (add,) = (node for node in mm.graph.nodes if node.target is aten.add.Tensor)
    (converted,) = mm.users
    add.update_arg(1, converted)


def _bias_of_one(mm: torch.fx.Node) -> None:
    """A number for all columns, of which the kernel would read as many as there are columns."""
    (add,) = (node for node in mm.graph.nodes if node.target is aten.add.Tensor)
    value = add.args[1].meta["val"]
    add.args[1].meta["val"] = value.new_empty(1)


def _bias_in_32_bits(mm: torch.fx.Node) -> None:
    (add,) = (node for node in mm.graph.nodes if node.target is aten.add.Tensor)
    add.args[1].meta["val"] = add.args[1].meta["val"].float()


def _twice_the_bias(mm: torch.fx.Node) -> None:
    (add,) = (node for node in mm.graph.nodes if node.target is aten.add.Tensor)
    add.kwargs = {"alpha": 2}


def _in_32_bits(mm: torch.fx.Node) -> None:
    (shaped,) = (node for node in mm.graph.nodes if node.target is aten.reshape.default and "val" in node.meta)
    shaped.meta["val"] = shaped.meta["val"].float()


def _with_two_biases(mm: torch.fx.Node) -> None:
    (add,) = (node for node in mm.graph.nodes if node.target is aten.add.Tensor)
    mm.update_arg(4, add.args[1])


def _of_other_numbers(mm: torch.fx.Node) -> None:
    for node in mm.graph.nodes:
        if node.target is aten.to.dtype and node.args[1] == FP8:
            node.update_arg(1, torch.float8_e5m2)


@pytest.mark.parametrize(
    "change",
    [
        *(_slowly, _scaled_again, _weight_across, _read_before_its_bias, _bias_of_a_row),
        *(_bias_of_one, _bias_in_32_bits, _twice_the_bias, _with_two_biases, _of_other_numbers),
    ],
    ids=lambda f: f.__name__,
)
def test_products_that_are_something_else_stay(change: Callable[[torch.fx.Node], None]) -> None:
    graph = _graph(chunked)
    (mm,) = _calls(graph, aten._scaled_mm.default)
    change(mm)
    assert gated_linears(graph) == 0 and _calls(graph, aten._scaled_mm.default) == [mm]


def test_a_look_at_the_weight_that_others_read_stays() -> None:
    graph = _graph(chunked)
    (mm,) = _calls(graph, aten._scaled_mm.default)
    weight: Any = mm.args[1]
    (output,) = graph.graph.find_nodes(op="output")
    output.update_arg(0, (*output.args[0], weight))
    assert gated_linears(graph) == 1 and _calls(graph, aten.t.default) == [weight]
    graph.graph.lint()


def _tensorwise(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    factors = [narrowed(part, FP8, per_tensor=True) for part in (x.reshape(-1, INNER), w)]
    (rows, scale), (weight, steps) = factors
    given = (rows, aten.t.default(weight), scale, aten.t.default(steps), None, None, x.dtype, True)
    value, gate = aten._scaled_mm.default(*given).reshape(*x.shape[:-1], 2 * WIDTH).chunk(2, -1)
    return value * gelu(gate)


def test_products_with_one_scale_for_all_stay() -> None:
    weights = layer_like(WIDTH, INNER, torch.half)
    assert gated_linears(exported(_tensorwise, weights, ROWS, torch.half, "cuda:0")) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", gpu_blocks.PAYING)
def test_a_gated_product_is_no_further_from_the_truth_than_in_more_launches(kind: str, tmp_path: Path) -> None:
    """At the sizes that it was lowered with and at others; the truth is of the narrow factors."""
    if torch.cuda.get_device_capability() not in DESCRIPTORS:
        pytest.skip("the kernel is for cards of compute capability 9.0")
    blocks = {}
    for on in (True, False):
        asked = CompileConfig.parse({"mode": "O3", "options": {"fuse.gated_linear": on}}).lowering_options("cuda")
        asked["nexfort.prepare"] = False
        inductor.lower(gpu_blocks.captured(kind), tmp_path / str(on), asked)
        text = "".join(file.read_text() for file in (tmp_path / str(on)).rglob("*.py"))
        assert ("multiply_gated_in_groups" in text) is on and ("_scaled_mm" in text) is not on
        blocks[on] = inductor.load(tmp_path / str(on), {}, [])
    _, dtype, shapes, ((given, _),) = gpu_blocks.PAYING[kind]
    generator = torch.Generator("cuda").manual_seed(0)
    w, *b = (torch.randn(s, device="cuda", generator=generator).mul(s[-1] ** -0.5).to(dtype) for s in shapes)
    for batch, tokens in (given[:2], (1, 1), (3, 100), (1, 4096), (2, 129)):
        x = torch.randn(batch, tokens, given[2], device="cuda", generator=generator).to(dtype)
        full = [values.double() * scale for values, scale in (narrowed(x.flatten(0, 1), FP8), narrowed(w, FP8))]
        truth = gpu_blocks.paying([full[1], *(part.double() for part in b)], full[0].view(x.shape))
        ours, theirs = ((blocks[on]([w, *b, x])[0] - truth).norm() for on in (True, False))
        assert ours <= 1.1 * theirs, (batch, tokens, float(ours / theirs))
    x[0, 0] = float("nan")
    assert blocks[True]([w, *b, x])[0][0, 0].isnan().all()
