# SPDX-License-Identifier: Apache-2.0
"""Layers in int8 alone, as models have them: ComfyUI's operator, the engine's kernels in each form, and bfloat16.

    python -m benchmarks.int8_linear --models z-image,qwen-image --rows 1024,4224
    python -m benchmarks.int8_linear --parts blocks --models wan --rows 14040

Prints a JSON line for each measurement, in microseconds, and last the rows of `kernels/scaled_linear/choice.py` that
they make. Part `products` is of one layer each: comfy_kitchen's operator as a whole; the engine's kernel for its input,
and for its product in each form; cuBLAS in bfloat16, int8 and fp8; and how far results are from float64. Part `rows` is
of the first kernel behind each kind of norm and activation. Part `blocks` is of a transformer block without attention,
lowered as an artefact is: with the host's operator, with the engine's kernels, and with what is before or behind a
layer left to Inductor. Calls are taken from a CUDA graph, or where one cannot be captured from a full queue, and use
several weights in turn, so that none is in the card's cache. ComfyUI is not needed, its package comfy_kitchen is.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from nexfort_engine.kernels.quantize_rows import op as quantize_rows
from nexfort_engine.kernels.scaled_linear import choice, launch
from nexfort_engine.quant.tune import (
    CODE,
    COPIES,
    GROUP,
    MODELS,
    Given,
    Layer,
    distance,
    given,
    host,
    microseconds,
    ours,
    truth_of,
)

from . import card

T = torch.Tensor
COMPILERS = 12  # processes


WIDTHS = {"z-image": (3840, 10240), "qwen-image": (3072, 12288), "wan": (5120, 13824), "flux": (3072, 12288)}


# ---- products ------------------------------------------------------------------------------------------------


def products(layer: Layer, count: int) -> Iterator[dict[str, Any]]:
    """Measurements of a layer with so many rows."""
    values = given(layer, count)
    truth = truth_of(layer, values)
    theirs = host(layer, values)
    yield told("host", *microseconds(theirs), distance=distance(theirs(0), truth))
    rows = launch.rows_in_int8(values.x[None], "", GROUP)
    yield told("rows", *microseconds(lambda _: launch.rows_in_int8(values.x[None], "", GROUP)))
    few = (choice.FEW_ROWS,) if count < choice.MANY else ()
    for form in choice.forms(torch.cuda.get_device_capability(), up=layer.up) + few:
        run = ours(layer, values, rows, form)
        yield told("ours", *microseconds(run), distance=distance(run(0), truth), form=form)
    if not layer.up:
        yield from libraries(values, rows)


def libraries(values: Given, rows: tuple[T, T]) -> Iterator[dict[str, Any]]:
    """cuBLAS: in bfloat16 with a bias, and products alone in int8 and fp8."""

    def half(number: int) -> T:
        return torch.nn.functional.linear(values.x, values.full[number % COPIES], values.bias)

    yield told("bfloat16", *microseconds(half))
    if rows[0].shape[0] > 16:
        yield told(
            "cublas int8", *microseconds(lambda number: torch._int_mm(rows[0], values.weights[number % COPIES][0].t()))
        )
    if torch.cuda.get_device_capability() < (8, 9):
        return
    narrow = torch.float8_e4m3fn
    x, weights = values.x.to(narrow), [weight.to(narrow) for weight in values.full]
    ones = [torch.ones(shape, device="cuda") for shape in ((len(x), 1), (1, len(weights[0])))]

    def eighths(number: int) -> T:
        weight = weights[number % COPIES].t()
        return torch._scaled_mm(x, weight, scale_a=ones[0], scale_b=ones[1], out_dtype=torch.bfloat16)

    yield told("cublas fp8 by row", *microseconds(eighths))
    for form in choice.forms(torch.cuda.get_device_capability()):
        scales = ones[0].flatten(), ones[1].flatten()

        def mine(number: int, form: choice.Form = form, scales: tuple[T, T] = scales) -> T:
            weight = weights[number % COPIES]
            return launch.product(x, scales[0], weight, scales[1], form, torch.bfloat16)

        yield told("ours in fp8", *microseconds(mine), form=form)


def told(what: str, time: float, how: str, **more: Any) -> dict[str, Any]:
    """A measurement as it is printed."""
    return {"what": what, "us": round(time, 1), "how": how} | more


def measured(layer: Layer, found: Sequence[dict[str, Any]]) -> str:
    """The row of choice.MEASURED that measurements of a layer make: the product, and what the host takes for both."""
    best = min((row for row in found if row["what"] == "ours"), key=lambda row: float(row["us"]))
    (theirs,) = (row for row in found if row["what"] == "host")
    (rows,) = (row for row in found if row["what"] == "rows")
    columns = -layer.columns if layer.up else layer.columns
    return f"({columns}, {layer.inner}): {choice.Measured(best['form'], best['us'] + rows['us'], theirs['us'])!r},"


# ---- rows ----------------------------------------------------------------------------------------------------


def kinds(inner: int, count: int) -> Iterator[dict[str, Any]]:
    """The kernel for rows behind each kind, and beside each what it moves at least, in bytes."""
    draw = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(1, count, 2 * inner, generator=draw, device="cuda").bfloat16()
    first, second = x[..., :inner], x[..., inner:]
    parts = torch.randn(1, 1, 6 * inner, generator=draw, device="cuda").bfloat16().chunk(6, -1)
    for kind in quantize_rows.KINDS:
        more: dict[str, Any] = {"factor": parts[1], "shift": parts[0]} if kind.endswith("norm") else {}
        more |= {"second": second} if kind == "swiglu" else {}
        time, how = microseconds(lambda _, kind=kind, more=more: launch.rows_in_int8(first, kind, GROUP, **more))
        yield told(f"rows of {kind or 'nothing'}", time, how, bytes=count * inner * (5 if kind == "swiglu" else 3))


# ---- blocks --------------------------------------------------------------------------------------------------


def linear(x: T, weight: T, scale: T, bias: T | None = None) -> T:
    """What ComfyUI's layers call."""
    return torch.ops.comfy_kitchen.int8_linear(x, weight, scale, bias, CODE, True, GROUP)  # type: ignore


def gated_block(w: Sequence[T], x: T, modulation: T) -> T:
    """Layer norms with modulation, gates and residuals, GELU: Qwen-Image, Wan, Flux; attention gives its values."""
    width = x.shape[-1]
    parts = modulation.unsqueeze(1).chunk(6, -1)
    h = torch.addcmul(parts[0], torch.nn.functional.layer_norm(x, [width], eps=1e-6), 1 + parts[1])
    seen = linear(h, *w[0:2]) * linear(h, *w[2:4]) + linear(h, *w[4:6])
    x = torch.addcmul(x, linear(seen, *w[6:8]), parts[2])
    h = torch.addcmul(parts[3], torch.nn.functional.layer_norm(x, [width], eps=1e-6), 1 + parts[4])
    h = torch.nn.functional.gelu(linear(h, *w[8:10]), approximate="tanh")
    return torch.addcmul(x, linear(h, *w[10:12]), parts[5])


def sandwich_block(w: Sequence[T], x: T, modulation: T) -> T:
    """RMS norms before and behind layers, SwiGLU of two: Z-Image; attention gives its values."""
    width = x.shape[-1]
    parts = modulation.unsqueeze(1).chunk(6, -1)

    def normed(value: T) -> T:
        return torch.nn.functional.rms_norm(value, [width], eps=1e-5)

    h = normed(x) * (1 + parts[0])
    seen = linear(h, *w[0:2]) * linear(h, *w[2:4]) + linear(h, *w[4:6])
    x = x + parts[1].tanh() * normed(linear(seen, *w[6:8]))
    h = normed(x) * (1 + parts[2])
    h = torch.nn.functional.silu(linear(h, *w[8:10])) * linear(h, *w[12:14])
    return x + parts[3].tanh() * normed(linear(h, *w[10:12]))


def blocks(model: str, count: int) -> Iterator[dict[str, Any]]:
    """A block by the host's operator and by the engine's kernels, with each part of the pass left out."""
    from nexfort_engine.passes import int8_linear as passed
    from nexfort_engine.passes.epilogue_match import Epilogue
    from nexfort_engine.passes.prologue_match import Prologue

    block = sandwich_block if model == "z-image" else gated_block
    width, hidden = WIDTHS[model]
    sizes = [(width, width)] * 4 + [(hidden, width), (width, hidden)] + [(hidden, width)] * (model == "z-image")
    values = [given(Layer(inner, columns), 1).weights[0] for columns, inner in sizes]
    draw = torch.Generator("cuda").manual_seed(0)
    x, modulation = (
        torch.randn(shape, generator=draw, device="cuda").bfloat16() for shape in ((1, count, width), (1, 6 * width))
    )
    inputs = [*(part for pair in values for part in pair), x, modulation]
    eager = block(inputs[:-2], x, modulation)
    ways: dict[str, dict[str, Any]] = {
        "host": {},
        "ours": {},
        "ours, rows without what is before": {"prologue": lambda x, *_: Prologue(x)},
        "ours, products without what is behind": {
            "epilogue": lambda node, *_: Epilogue(node),
            "swiglu": lambda *_: None,
        },
        "ours, rows for each layer": {"_key": lambda layer: (layer.node,)},
    }
    for name, changed in ways.items():
        kept = {part: getattr(passed, part) for part in changed}
        for part, other in changed.items():
            setattr(passed, part, other)
        try:
            code = lowered(block, inputs, name != "host")
        finally:
            for part, other in kept.items():
                setattr(passed, part, other)
        (found,) = code(list(inputs))
        far = float((found.double() - eager.double()).norm() / eager.double().norm())
        yield told(name, *microseconds(lambda _, code=code: code(list(inputs))), to_host=far)


def lowered(block: Callable[..., T], inputs: list[T], fused: bool) -> Callable[[list[T]], list[T]]:
    """A block as an artefact has it, for any number of tokens, with the engine's kernels or without."""
    from nexfort_engine.capture.types import Captured
    from nexfort_engine.config.compile_config import CompileConfig
    from nexfort_engine.guards.shape_guards import Conditions
    from nexfort_engine.lowering import inductor

    class Lifted(torch.nn.Module):
        def forward(self, weights: list[T], x: T, modulation: T) -> list[T]:
            return [block(weights, x, modulation)]

    weights = inputs[:-2]
    dims = ([{} for _ in weights], {1: torch.export.Dim.AUTO}, {})
    with torch.no_grad():
        graph = torch.export.export(Lifted(), (weights, *inputs[-2:]), dynamic_shapes=dims, strict=False).graph_module
    count = len(weights)
    before = (graph, list(range(count)), [], [], [], [], [], Conditions([], []), [], [], None, [], [], {})
    captured = Captured(*before, ["comfy_kitchen"], [True] * count)
    options = CompileConfig.parse({"mode": "O2", "options": {"fuse.int8_linear": fused}}).lowering_options("cuda")
    options["nexfort.prepare"] = False
    payload = Path(tempfile.mkdtemp(prefix="int8-")) / "payload"
    inductor.lower(captured, payload, options)
    return inductor.load(payload, {}, ["comfy_kitchen"])


# ---- the command ---------------------------------------------------------------------------------------------


def compiled(layer: Layer, count: int) -> None:
    """Have Triton's cache hold the kernels of a layer, by a call of each."""
    values = given(layer, count)
    rows = launch.rows_in_int8(values.x[None], "", GROUP)
    for form in choice.forms(torch.cuda.get_device_capability(), up=layer.up):
        ours(layer, values, rows, form)(0)
        if not layer.up and torch.cuda.get_device_capability() >= (8, 9):
            narrow, ones = torch.float8_e4m3fn, torch.ones(max(count, layer.columns), device="cuda")
            x, weight = values.x.to(narrow), values.full[0].to(narrow)
            launch.product(x, ones[:count], weight, ones[: layer.columns], form, torch.bfloat16)
    card.settle()


def main(argv: list[str] | None = None) -> int:
    """Measure and print. SystemExit without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help=", ".join(MODELS))
    parser.add_argument("--rows", default="4224", help="numbers of rows; the first makes the table")
    parser.add_argument("--parts", default="products,rows,blocks")
    args = parser.parse_args(argv)
    models, parts = args.models.split(","), args.parts.split(",")
    counts = [int(count) for count in args.rows.split(",")]
    if unknown := {*models} - MODELS.keys() or {*parts} - {"products", "rows", "blocks"}:
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        raise SystemExit("layers in int8 are of a GPU, and torch finds none here")
    layers = dict.fromkeys(layer for model in models for layer in MODELS[model])
    told_of = {"gpu": card.name(), "torch": torch.__version__}
    lines = []
    if "products" in parts:
        with ProcessPoolExecutor(COMPILERS, multiprocessing.get_context("spawn")) as pool:
            list(pool.map(compiled, layers, [counts[0]] * len(layers)))
        for layer in layers:
            for count in counts:
                found = []
                for row in products(layer, count):
                    found.append(row)
                    show(told_of | layer.__dict__ | {"rows": count} | row)
                if count == counts[0]:
                    lines.append(measured(layer, found))
    for inner in dict.fromkeys(layer.inner for layer in layers) if "rows" in parts else ():
        for count in counts:
            for row in kinds(inner, count):
                show(told_of | {"inner": inner, "rows": count} | row)
    for model in models if "blocks" in parts else ():
        for count in counts:
            for row in blocks(model, count):
                show(told_of | {"block": model, "rows": count} | row)
    if lines:
        print(
            "\n".join([f"    {torch.cuda.get_device_capability()}: {{", *(f"        {one}" for one in lines), "    },"])
        )
    return 0


def show(row: dict[str, Any]) -> None:
    """Print a measurement as soon as there is one."""
    print(json.dumps(row, default=repr), flush=True)


if __name__ == "__main__":
    sys.exit(main())
