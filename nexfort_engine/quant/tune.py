# SPDX-License-Identifier: Apache-2.0
"""Measurements of the user's own card for the choices of `card_figures.py`: rates, and layers of int8 files.

A layer is timed by the host's operator and by the engine's kernel in each form, with numbers of its own size. A form
whose result is further from float64 than the host's is left out. What was measured is kept at once, so that a run that
ends early goes on the next time. Microseconds are of the card's own clock, by events around replays of a CUDA graph.
"""

from __future__ import annotations

import datetime
import functools
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch

from ..kernels.quantize_rows import op as quantize_rows
from ..kernels.scaled_linear import choice, launch
from .card_figures import CardFigures

T = torch.Tensor
GROUP = 256
COPIES = 4  # weights that are used in turn, so that none is in the card's cache
SAMPLE = 64  # rows that are compared with float64
CODE = 2  # of bfloat16, as comfy_kitchen counts
ROWS = 4224  # of a picture of 1024x1024 with its prompt
SIDE = 8192  # of the matmuls that rates are taken of
COPIED = 1 << 29  # bytes of the copy that the memory's rate is taken of
SLACK = 1.1  # times the host's distance to float64
COMPILERS = 4  # processes at most, each of which takes half a GiB of the card
COMPILING = 0.6  # of the time that is left, at most


@dataclass(frozen=True)
class Layer:
    """One linear layer. up: it is silu(layer) times another one."""

    inner: int
    columns: int
    up: bool = False

    @property
    def key(self) -> choice.Layer:
        """Its place in a table of `choice.py`."""
        return -self.columns if self.up else self.columns, self.inner


MODELS: dict[str, tuple[Layer, ...]] = {
    "z-image": (
        Layer(3840, 11520),
        Layer(3840, 3840),
        Layer(3840, 10240),
        Layer(3840, 10240, True),
        Layer(10240, 3840),
    ),
    "qwen-image": (Layer(3072, 3072), Layer(3072, 12288), Layer(12288, 3072)),
    "wan": (Layer(5120, 5120), Layer(5120, 13824), Layer(13824, 5120)),
    "flux": (Layer(3072, 9216), Layer(3072, 12288), Layer(3072, 21504), Layer(15360, 3072)),
}


def microseconds(run: Callable[[int], Any], least: float = 0.05) -> tuple[float, str]:
    """Of one call of `run`, which is given the number of the call; and whether a CUDA graph had them.

    least: seconds that are measured.
    """
    for number in range(COPIES):
        run(number)
    torch.cuda.synchronize()
    how, each = "graph", 2 * COPIES
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for number in range(each):
                run(number)
        replay: Callable[[], Any] = graph.replay
    except RuntimeError:
        how = "queue"
        torch.cuda.synchronize()

        def replay() -> None:
            for number in range(each):
                run(number)

    def timed(times: int) -> float:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(times):
            replay()
        ended.record()
        torch.cuda.synchronize()
        return float(began.elapsed_time(ended)) / 1e3

    replay()
    times = max(2, math.ceil(least / max(timed(2) / 2, 1e-6)))
    return min(timed(times) for _ in range(3)) / times / each * 1e6, how


def distance(found: T, truth: T) -> float:
    """Relative, of the rows that are compared."""
    return float((found[:SAMPLE].double() - truth).norm() / truth.norm())


@dataclass
class Given:
    """Numbers of a layer: x in bfloat16 (rows, K) with outliers, weights in int8 with scales, and those in full."""

    x: T
    weights: list[tuple[T, T]]
    full: list[T]
    bias: T


def given(layer: Layer, rows: int, device: str = "cuda") -> Given:
    """Random numbers of a layer, the same in each run."""
    draw = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> T:
        return torch.randn(*shape, generator=draw, device=device)

    x = normal(rows, layer.inner)
    x[:, :: layer.inner // 16] *= 10
    whole = [normal(layer.columns, layer.inner) / layer.inner**0.5 for _ in range(COPIES)]
    quantised = []
    for weight in whole:
        steps, scale = quantize_rows.quantized(weight, GROUP)
        quantised.append((steps, scale[:, None]))
    return Given(x.bfloat16(), quantised, [weight.bfloat16() for weight in whole], normal(layer.columns).bfloat16())


def truth_of(layer: Layer, values: Given) -> T:
    """Of the first rows, in float64, with weights as they are and rows in full."""
    x = values.x[:SAMPLE].double()
    x = (x.unflatten(-1, (-1, GROUP)) @ quantize_rows.hadamard(GROUP, x)).flatten(-2)
    first, second = (x @ (w.double() * s.double()).t() for w, s in values.weights[:2])
    first = first + values.bias.double() if not layer.up else first
    return torch.nn.functional.silu(first) * second if layer.up else first


def host(layer: Layer, values: Given) -> Callable[[int], T]:
    """comfy_kitchen's operator, which brings its input to int8 itself."""
    import comfy_kitchen  # noqa: F401  # the operators

    def linear(number: int, bias: T | None) -> T:
        weight, scale = values.weights[number % COPIES]
        return torch.ops.comfy_kitchen.int8_linear(values.x, weight, scale, bias, CODE, True, GROUP)  # type: ignore

    def both(number: int) -> T:
        return torch.nn.functional.silu(linear(number, None)) * linear(number + 1, None)

    return both if layer.up else lambda number: linear(number, values.bias)


def ours(layer: Layer, values: Given, rows: tuple[T, T], form: choice.Form) -> Callable[[int], T]:
    """The engine's product in a form, of rows in int8."""

    def run(number: int) -> T:
        weight, other = values.weights[number % COPIES], values.weights[(number + 1) % COPIES]
        more: dict[str, Any] = {"up": other, "activation": "silu"} if layer.up else {"bias": values.bias}
        return launch.product(*rows, *weight, form, torch.bfloat16, **more)

    return run


# ---- what is kept ---------------------------------------------------------------------------------------------


def begun(name: str) -> CardFigures:
    """Figures of a card of which nothing is measured yet."""
    return CardFigures(name, str(torch.__version__), datetime.date.today().isoformat())


@dataclass(frozen=True)
class Measurement:
    """One that is still to come. add: measures, and gives the figures with what was found. layer: None of a rate."""

    text: str
    add: Callable[[CardFigures], CardFigures]
    layer: Layer | None = None


def missing(figures: CardFigures, *, fp8: bool, int8: bool, layers: bool) -> list[Measurement]:
    """What is not measured yet. fp8, int8, layers: whether the card has such matmuls, and the host its operator."""
    rates = {"memory": True, "half": True, "fp8": fp8, "int8": int8}
    wanted = [name for name, there in rates.items() if there and name not in figures.rates]
    found = [Measurement(f"rate of {name}", functools.partial(_with_rate, name)) for name in wanted]
    for layer in dict.fromkeys(layer for each in MODELS.values() for layer in each) if layers else ():
        if layer.key not in figures.layers:
            text = f"{'SwiGLU of ' * layer.up}{layer.columns}x{layer.inner} in int8"
            found.append(Measurement(text, functools.partial(_with_layer, layer), layer))
    return found


def _with_rate(name: str, figures: CardFigures) -> CardFigures:
    return figures.with_rate(name, rate(name))


def _with_layer(layer: Layer, figures: CardFigures) -> CardFigures:
    return figures.with_layer(layer.key, measured(layer))


def rate(name: str) -> float:
    """Operations a second of a large matmul, or bytes a second of a copy."""
    if name == "memory":
        source, target = (torch.empty(COPIED, dtype=torch.uint8, device="cuda") for _ in range(2))
        return 2 * COPIED / microseconds(lambda _: target.copy_(source))[0] * 1e6
    x, w = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    one = torch.ones((), device="cuda")
    if name == "fp8":
        x, w = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
    elif name == "int8":
        x, w = (x * 30).to(torch.int8), (w * 30).to(torch.int8)

    def matmul(_: int) -> T:
        if name == "fp8":
            return torch.ops.aten._scaled_mm.default(x, w.t(), one, one, None, None, torch.bfloat16)
        return torch.ops.aten._int_mm.default(x, w.t()) if name == "int8" else x @ w.t()

    return 2.0 * SIDE**3 / microseconds(matmul)[0] * 1e6


def measured(layer: Layer, count: int = ROWS, device: str = "cuda") -> choice.Measured:
    """A layer by the host's operator and by the fastest form of the engine's kernel. RuntimeError: none is right."""
    values = given(layer, count, device)
    truth, theirs = truth_of(layer, values), host(layer, values)
    most = SLACK * distance(theirs(0), truth)
    rows = launch.rows_in_int8(values.x[None], "", GROUP)
    before = microseconds(lambda _: launch.rows_in_int8(values.x[None], "", GROUP))[0]
    found = []
    for form in forms_of(layer):
        run = ours(layer, values, rows, form)
        if distance(run(0), truth) <= most:
            found.append((microseconds(run)[0], form))
    if not found:
        raise RuntimeError(f"no form of the kernel computes a layer of {layer.columns}x{layer.inner} as it should")
    each, form = min(found, key=lambda one: one[0])
    return choice.Measured(form, round(each + before, 1), round(microseconds(theirs)[0], 1))


def forms_of(layer: Layer) -> tuple[choice.Form, ...]:
    """The forms that this card may take for a layer."""
    card = torch.cuda.get_device_capability()
    plain = choice.descriptors_missing(card) is not None
    return tuple(form for form in choice.forms(card, up=layer.up) if not (form.grouped and plain))


def compiled(layer: Layer, count: int = ROWS) -> None:
    """Have Triton's cache hold the kernels of a layer, by a call of each."""
    values = given(layer, count)
    rows = launch.rows_in_int8(values.x[None], "", GROUP)
    for form in forms_of(layer):
        ours(layer, values, rows, form)(0)
    torch.cuda.synchronize()


def ahead(layers: Sequence[Layer], seconds: float) -> list[Layer]:
    """Those layers whose kernels are compiled within so many seconds, by processes of their own.

    None of them runs when this returns, so that nothing else uses the card.
    """
    count = min(COMPILERS, (os.cpu_count() or 1) - 1, len(layers))
    if count < 2:
        return list(layers)
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        futures = {layer: pool.submit(compiled, layer) for layer in layers}
        wait(futures.values(), max(0.0, seconds))
        for future in futures.values():
            future.cancel()
    return [layer for layer, future in futures.items() if not future.cancelled()]


@dataclass(frozen=True)
class Taken:
    """A measurement that was taken. figures: with what was found. problem: why there is nothing more in them, or ""."""

    what: Measurement
    figures: CardFigures
    problem: str = ""


def run(
    figures: CardFigures,
    left: Sequence[Measurement],
    seconds: float,
    keep: Callable[[CardFigures], object],
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Taken]:
    """Measure what is left until the time is up. keep: is given the figures after each measurement.

    What fails, for want of memory for example, is left out with the reason.
    """
    until = clock() + seconds
    rates, layers = ([one for one in left if (one.layer is None) is is_rate] for is_rate in (True, False))
    ready: list[Layer] | None = None
    for one in [*rates, *layers]:
        if one.layer is not None and ready is None:
            ready = ahead([other.layer for other in layers if other.layer is not None], COMPILING * (until - clock()))
        if clock() > until:
            return
        if one.layer is not None and one.layer not in (ready or ()):
            continue
        try:
            figures = one.add(figures)
        except RuntimeError as error:  # of torch or Triton, out of memory too
            yield Taken(one, figures, str(error).partition("\n")[0])
            continue
        keep(figures)
        yield Taken(one, figures)
