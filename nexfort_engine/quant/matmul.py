# SPDX-License-Identifier: Apache-2.0
"""Products of two narrow factors: numbers brought to fp8 or int8 with their scales, and what multiplies them where.

Written in operators of aten, so that the same code runs on tensors and writes a graph. What a device multiplies itself
(torch 2.11): NVIDIA's cards from sm_89 on fp8, but for two factors in e5m2, and with a scale for each row only two in
e4m3; int8 on a CPU and on NVIDIA's cards, there more than 16 rows; fp8 with one scale on a CPU. Where it does not, the
narrow numbers are multiplied in float32, which gives the same within its rounding.
"""

from __future__ import annotations

from typing import Any

import torch

from ..config.pass_catalogue import NEEDS

aten = torch.ops.aten
FP8 = torch.float8_e4m3fn
NAMES = {FP8: "fp8", torch.int8: "int8"}
MULTIPLE = 16  # of both sizes of a weight, which the products ask for
_LARGEST = {FP8: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
_FEWEST = 16  # rows that a product in int8 has to have more than, on a card
_SMALLEST = 1e-12  # of the largest number of a row: rows of zeros have a scale too


def missing(device_type: str, dtype: torch.dtype = FP8) -> str | None:
    """Why products in fp8, or int8, are not for this machine, or None."""
    name = NAMES[dtype]
    oldest = NEEDS[name].oldest
    if device_type != "cuda" or torch.version.hip is not None:
        return f"products in {name} are for NVIDIA's cards; everything runs at the model's own precision"
    found = torch.cuda.get_device_capability()
    if found >= oldest:
        return None
    expected = ".".join(map(str, oldest))
    return f"the card's compute capability is {found[0]}.{found[1]}, products in {name} need {expected} or newer"


def narrowed(x: Any, dtype: torch.dtype, *, per_tensor: bool = False) -> tuple[Any, Any]:
    """x (rows, inner) in a narrow dtype, and its scales (rows, 1) in float32; per_tensor: one, (1, 1).

    x is about the narrow numbers times the scale, and zeros stay zeros.
    """
    wide = aten.to.dtype(x, torch.float32)
    # the largest by their bits, which have the order of the numbers (with NaN above all) and take one instruction each
    bits = aten.amax.default(aten.view.dtype(aten.abs.default(wide), torch.int32), [0, 1] if per_tensor else [-1], True)
    largest = aten.clamp_min.default(aten.view.dtype(bits, torch.float32), _SMALLEST)
    steps = aten.mul.Tensor(wide, aten.mul.Tensor(aten.reciprocal.default(largest), _LARGEST[dtype]))
    if dtype == torch.int8:
        steps = aten.round.default(steps)
    scale = aten.mul.Tensor(largest, 1 / _LARGEST[dtype])
    # the product takes rows that lie one after another
    return aten.clone.default(aten.to.dtype(steps, dtype), memory_format=torch.contiguous_format), scale


def times_rows(x: tuple[Any, Any], weight: tuple[Any, Any], bias: Any, like: torch.Tensor) -> Any:
    """(rows, inner) times (columns, inner) transposed, both narrowed to e4m3 by row, plus bias, as `like`; on a card.

    Scales by row give bfloat16 (torch 2.11), to which a bias of another dtype is added afterwards.
    """
    whole = like.dtype == torch.bfloat16
    result = aten._scaled_mm.default(
        x[0],
        aten.t.default(weight[0]),
        x[1],
        aten.t.default(weight[1]),
        bias if whole else None,
        None,
        torch.bfloat16,
        True,
    )
    if whole:
        return result
    result = aten.to.dtype(result, like.dtype)
    return result if bias is None else aten.add.Tensor(result, bias)


def with_zeros(x: Any) -> Any:
    """x (rows, inner) with rows of zeros behind: a card multiplies no few rows in int8.

    In any case, because asking how many there are would make two artefacts.
    """
    return aten.constant_pad_nd.default(x, [0, 0, 0, _FEWEST])


def times_whole_rows(x: tuple[Any, Any], weight: tuple[Any, Any], bias: Any, like: torch.Tensor) -> Any:
    """(rows, inner) times (columns, inner) transposed, both narrowed to int8 by row, plus bias, as `like`; on a card.

    x: `with_zeros` before it was narrowed, where nothing has to be copied for it. Summed in whole numbers of 32 bits,
    scaled in float32.
    """
    result = aten.to.dtype(aten._int_mm.default(x[0], aten.t.default(weight[0])), torch.float32)
    result = aten.mul.Tensor(aten.mul.Tensor(result, x[1]), aten.t.default(weight[1]))
    if bias is not None:
        result = aten.add.Tensor(result, aten.to.dtype(bias, torch.float32))
    return _without_zeros(aten.to.dtype(result, like.dtype))


def _without_zeros(result: Any) -> Any:
    return aten.slice.Tensor(result, 0, 0, -_FEWEST)


def times(x: tuple[Any, Any], weight: tuple[Any, Any], bias: Any, like: torch.Tensor, *, per_tensor: bool) -> Any:
    """(rows, inner) times (columns, inner) transposed, both narrowed in any way, plus bias, in the dtype of `like`."""
    (values, scale), (packed, steps) = x, weight
    kinds, fp8_card = {values.dtype, packed.dtype}, like.device.type == "cuda" and missing("cuda") is None
    if fp8_card and kinds == {FP8} and not per_tensor:
        return times_rows(x, weight, bias, like)
    if kinds == {torch.int8}:
        result = _whole_numbers(values, packed, like.device.type)
    elif (fp8_card and FP8 in kinds) or like.device.type == "cpu":
        if per_tensor:
            result = aten._scaled_mm.default(values, aten.t.default(packed), scale, steps, None, None, like.dtype)
            return result if bias is None else result + bias.to(like.dtype)
        one = torch.ones((), device=like.device)
        result = aten._scaled_mm.default(values, aten.t.default(packed), one, one, None, None, torch.float32)
    else:
        result = values.float() @ packed.float().t()
    result = result * scale * steps.t()
    return (result if bias is None else result + bias.float()).to(like.dtype)


def _whole_numbers(values: torch.Tensor, packed: torch.Tensor, device_type: str) -> torch.Tensor:
    """The product of int8 as float32."""
    if device_type not in ("cpu", "cuda"):
        return values.float() @ packed.float().t()
    if device_type == "cpu":
        return torch._int_mm(values, packed.t()).float()
    return _without_zeros(torch._int_mm(with_zeros(values), packed.t())).float()
