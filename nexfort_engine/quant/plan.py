# SPDX-License-Identifier: Apache-2.0
"""Which linear layers of a network are packed, as what, and why the others stay as they are; and packing them.

Layers are chosen by structure, or by a list of them with what each was measured to do to the picture. Each is then
multiplied both ways with rows of normal numbers: one that is further from its full product than the budget stays as it
is. Real inputs may have larger outliers than such rows; what becomes of the picture only a picture shows.

The network that comes in stays as it is: packed is a copy, which shares every weight that is not packed.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..modules.tree import foreign
from ..reporting.report import first_line
from ..weights.subclass_unwrap import is_plain
from .matmul import FP8, MULTIPLE, missing
from .quant_types import QuantType
from .quantized_linear import SCALE, QuantisedLinear

BUDGET = 0.1  # of the norm of a layer's full product: what dispatch/verify.py allows a region with products in fp8
_ROWS = 32  # that a layer is measured with
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
Chooser = Callable[[nn.Module], dict[str, str | None]]


@dataclass(frozen=True)
class Row:
    """One linear layer: its place and sizes, and either its type or the reason why it stays as it is.

    error: of its product to the full one, a relative norm; None where none was taken. full, taken: bytes of the weight.
    rows: of its input in the call that was looked at; None where none was.
    """

    layer: str
    columns: int
    inner: int
    type: str | None
    reason: str | None
    error: float | None
    full: int
    taken: int
    rows: int | None = None


@dataclass(frozen=True)
class Quantisation:
    """What was done to the networks of a pipeline; `str` of it is the plan for people, layers alike in one line."""

    type: str
    budget: float
    parts: dict[str, list[Row]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold."""
        parts = {part: [dict(row.__dict__) for row in rows] for part, rows in self.parts.items()}
        return {"type": self.type, "budget": self.budget, "parts": parts, "notes": list(self.notes)}

    def summary(self, part: str) -> str:
        """One line about one network."""
        rows = self.parts[part]
        packed = [row for row in rows if row.type is not None]
        full, taken = sum(row.full for row in rows), sum(row.taken for row in rows)
        line = f"{len(packed)} of {len(rows)} linear layers as {self.type}, {_mib(full)} of weights in {_mib(taken)}"
        if packed:
            worst = max(packed, key=lambda row: row.error or 0.0)
            line += f", the largest error {worst.error:.3f} ({worst.layer})"
        return line

    def __str__(self) -> str:
        lines = []
        for part, rows in self.parts.items():
            lines.append(f"{part}: {self.summary(part)}")
            alike: dict[tuple[Any, ...], list[float]] = {}
            for row in rows:
                reason = re.sub(r"\d+\.\d+", "#", row.reason or "")  # a measured number splits no group
                key = (re.sub(r"\b\d+\b", "*", row.layer), row.columns, row.inner, row.rows, row.type, reason)
                alike.setdefault(key, []).append(math.nan if row.error is None else row.error)
            for (place, columns, inner, given, name, reason), errors in alike.items():
                what = name or f"as it is: {reason}"
                worst = max(errors)
                error = "" if math.isnan(worst) else f"  error up to {worst:.4f}"
                size = f"{columns}x{inner}" + ("" if given is None else f", {given} row{'s' * (given != 1)}")
                lines.append(f"  {len(errors):>3} x  {place}  {size}{error}  {what}")
        return "\n".join([*lines, *(f"note: {text}" for text in self.notes)])


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


# ---- choosing ----------------------------------------------------------------------------------------------


def by_structure(net: nn.Module) -> dict[str, str | None]:
    """Linear layer -> why it is better left alone, or None.

    Those that stand in no block of a list of blocks are what a picture comes in and goes out through, and embeddings.
    One that is alone beside a norm gives its shift and scale: its input is one row for each picture.
    """
    owners, blocks = dict(net.named_modules()), blocks_of(net)
    found: dict[str, str | None] = {path: None for path, _ in linear_layers(net)}
    ends = [] if blocks or len(found) < 2 else [next(iter(found)), next(reversed(found))]
    for path in found:
        owner = owners[path.rpartition(".")[0]]
        if path in ends or (blocks and not path.startswith(blocks)):
            found[path] = "it stands outside the blocks: a first or last layer, or an embedding"
        elif _gives_shift_and_scale(owner):
            found[path] = "it shifts and scales what a norm gives, from one row for each picture"
    return found


def blocks_of(net: nn.Module) -> tuple[str, ...]:
    """The places of all blocks in lists of blocks, blocks within blocks too, each with a point at its end."""
    owners = dict(net.named_modules())
    return tuple(f"{path}." for path, module in owners.items() if _is_block(path, module, owners))


def _is_block(path: str, module: nn.Module, owners: Mapping[str, nn.Module]) -> bool:
    above = path.rpartition(".")[0]
    return bool(path) and isinstance(owners[above], nn.ModuleList) and any(True for _ in module.children())


def _gives_shift_and_scale(owner: nn.Module) -> bool:
    below = list(owner.children())
    alone = sum(isinstance(child, nn.Linear) for child in below) == 1
    return alone and any("norm" in type(child).__name__.lower() for child in below)


def by_likeness(measured: Mapping[str, float], top_percentage: float, where: str) -> Chooser:
    """Layers by what they were measured to do to the picture: of those in `where`, the best so many percent."""
    best = sorted(measured, key=lambda name: measured[name], reverse=True)
    kept = set(best[: math.floor(len(best) * top_percentage / 100 + 1e-9)])

    def choose(net: nn.Module) -> dict[str, str | None]:
        found: dict[str, str | None] = {}
        for path, _ in linear_layers(net):
            found[path] = None if path in kept else f"it is not in {where}"
            if path in measured and path not in kept:
                found[path] = f"its ssim of {measured[path]:g} is not among the best {top_percentage:g} %"
        return found

    return choose


def linear_layers(net: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Every linear layer with its place, once each."""
    return ((path, module) for path, module in net.named_modules() if isinstance(module, nn.Linear))


# ---- packing -----------------------------------------------------------------------------------------------


def quantise(
    net: nn.Module,
    kind: QuantType,
    chosen: Mapping[str, str | None],
    budget: float,
    given: Mapping[str, int] | None = None,
) -> tuple[Any, list[Row]]:
    """A copy of a network whose chosen layers are packed, and what became of each; `chosen` as a Chooser gives it.

    given: layer -> rows of its input, of those that a call was seen to run.
    """
    exchanged: dict[int, Any] = {}
    rows = []
    for path, layer in linear_layers(net):
        reason, error = chosen[path] or unfit(layer, kind), None
        packed = None
        if reason is None:
            packed, error, reason = _within(layer, kind, budget)
        full = layer.weight.nbytes
        taken = full
        if packed is not None:
            exchanged[id(layer)] = packed
            taken = packed.weight.nbytes + packed.get_buffer(SCALE).nbytes
        name = kind.name if packed is not None else None
        seen = (given or {}).get(path)
        rows.append(Row(path, layer.out_features, layer.in_features, name, reason, error, full, taken, seen))
    return sharing_copy(net, exchanged), rows


def sharing_copy(net: nn.Module, exchanged: Mapping[int, Any] | None = None) -> Any:
    """A copy of a network that shares every tensor with it. exchanged: id of a module -> what takes its place."""
    tensors = (value for module in net.modules() for table in _tables(module) for value in table.values())
    memo: dict[int, Any] = {id(value): value for value in tensors if isinstance(value, torch.Tensor)}
    return copy.deepcopy(net, {**memo, **(exchanged or {})})


def _tables(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module._parameters, module._buffers, module.__dict__


def unfit(layer: nn.Linear, kind: QuantType) -> str | None:
    """Why a layer cannot be packed as `kind`, or None."""
    weight = layer.weight
    if isinstance(layer, QuantisedLinear):
        return f"it is packed already, as {layer.kind.name}"
    if type(layer) is not nn.Linear:
        return f"it is a {type(layer).__qualname__}, whose code may do more than torch.nn.Linear's"
    carried = foreign(layer)
    if carried is not None:
        return f"it carries {carried}"
    if not is_plain(weight) or weight.dtype not in _DTYPES:
        return f"its weight is a {type(weight).__qualname__} of {weight.dtype}, expected a plain one in floating point"
    if weight.device.type == "meta":
        return "its weights are not loaded"
    if kind.activation is None:
        return None
    if layer.in_features % MULTIPLE or layer.out_features % MULTIPLE:
        return f"a weight of {layer.out_features}x{layer.in_features}; expected multiples of {MULTIPLE}"
    if weight.device.type == "cuda" and kind.activation != torch.int8:
        problem = missing("cuda")
        if FP8 not in (kind.weight, kind.activation):
            problem = problem or "no card multiplies two factors in e5m2"
        return problem and f"{problem}; a weightonly type and int8_dynamic are for this card"
    return None


def _within(
    layer: nn.Linear, kind: QuantType, budget: float
) -> tuple[QuantisedLinear | None, float | None, str | None]:
    """The packed layer with its error, or why it stays as it is."""
    weight = layer.weight
    draw = torch.Generator().manual_seed(0)  # the caller's random numbers stay as they are
    x = torch.randn(_ROWS, layer.in_features, generator=draw).to(weight.device)
    with torch.no_grad():
        packed = QuantisedLinear(layer, kind)
        try:
            found = packed(x)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as refusal:  # of an operator: its own condition on sizes, layout or the card
            return None, None, f"its product is refused here: {first_line(refusal)}"
        bias = layer.bias.float() if layer.bias is not None else 0.0
        wanted = torch.nn.functional.linear(x, weight.float())
        error = float((found - bias - wanted).norm() / wanted.norm().clamp_min(1e-30))
    if not error <= budget:  # not a number is over it too
        return None, error, f"its error of {error:.3f} is over the budget of {budget:g}"
    return packed, error, None
