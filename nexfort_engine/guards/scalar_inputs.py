# SPDX-License-Identifier: Apache-2.0
"""Strengths: numbers in a list or dictionary of a module that its code multiplies tensors with.

They are there to be changed (the scale of a LoRA or of an IP-Adapter), so an artefact takes them as inputs. While a
block is captured a `Strength` stands for each: multiplying a tensor with it is a multiplication by an input, comparing
it with a number is noted and has to come out the same in later calls, and any other use begins the capture again with
the number as it is, which then is compared like every attribute. A plain attribute that holds a number is left alone:
it is a setting such as an epsilon.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

Key = str | int
Place = tuple[str, str, tuple[Key, ...]]  # path of the module, attribute, keys from there to the number
_TAG = "strength"  # how one is described among the attributes that a capture read
_DEPTH = 2  # of containers in containers
_COMPARISONS = {name: getattr(operator, name) for name in ("lt", "le", "eq", "ne", "gt", "ge")}
_PRODUCTS = (torch.mul, torch.multiply, torch.Tensor.mul, torch.Tensor.multiply)
_IN_PLACE = (torch.Tensor.mul_, torch.Tensor.multiply_, torch.Tensor.__imul__)
# torch computes a tensor of these times a Python number in float32
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class StrengthUsed(Exception):
    """A number was used in another way than as a factor; the capture begins again with it as it is."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.place = place


class Strength:
    """Stands for a number during a capture. tensor: the input that holds it, float32 without dimensions.

    asked: [comparison, what it was compared with, what came out]. used: whether it was used in another way.
    """

    __slots__ = ("_place", "_value", "asked", "tensor", "used")

    def __init__(self, place: Place, value: float, tensor: torch.Tensor) -> None:
        self._place, self._value, self.tensor, self.used = place, value, tensor, False
        self.asked: list[list[Any]] = []

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return float  # so that `isinstance(scale, float)` is answered as for the number itself

    def _as_it_is(self, *_args: Any, **_kwargs: Any) -> Any:
        self.used = True  # code may catch what is raised here
        raise StrengthUsed(self._place)

    def _compared(self, name: str, other: Any) -> bool:
        if type(other) not in (int, float):
            self._as_it_is()
        answer = bool(_COMPARISONS[name](self._value, other))
        row = [name, float(other).hex(), answer]
        if row not in self.asked:
            self.asked.append(row)
        return answer

    def __bool__(self) -> bool:
        return self._compared("ne", 0)

    def __mul__(self, other: Any) -> Any:
        return self._times(other) if isinstance(other, torch.Tensor) else self._as_it_is()

    __rmul__ = __mul__

    def _times(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype not in _DTYPES:
            self._as_it_is()
        return torch.mul(tensor.float(), self.tensor).to(tensor.dtype)

    def __deepcopy__(self, _memo: Any) -> Strength:
        return self

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS and len(args) == 2 and not kwargs:
            tensor, number = args if type(args[1]) is cls else reversed(args)
            if type(number) is cls and isinstance(tensor, torch.Tensor):
                return number._times(tensor)
        if func in _IN_PLACE and len(args) == 2 and type(args[1]) is cls and not kwargs:
            return args[0].copy_(args[1]._times(args[0]))
        return next(_in((args, kwargs)))._as_it_is()


for _name in (
    "repr str bytes format hash complex int float index round trunc floor ceil neg pos abs invert add radd iadd sub "
    "rsub isub imul matmul rmatmul truediv rtruediv itruediv floordiv rfloordiv mod rmod divmod rdivmod pow rpow ipow "
    "reduce_ex"
).split():
    setattr(Strength, f"__{_name}__", Strength._as_it_is)
for _name in _COMPARISONS:
    setattr(Strength, f"__{_name}__", lambda self, other, _name=_name: self._compared(_name, other))
for _name in ("is_integer", "as_integer_ratio", "hex", "conjugate", "real", "imag"):
    setattr(Strength, _name, property(Strength._as_it_is))


def _in(value: Any) -> Iterator[Strength]:
    if type(value) is Strength:
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _in(item)
    elif isinstance(value, dict):
        yield from _in(list(value.values()))


def places(module: nn.Module) -> list[Place]:
    """Where a module tree holds numbers in lists and dictionaries of its own."""
    machinery = nn.Module().__dict__
    return [
        (path, name, keys)
        for path, sub in module.named_modules()
        for name, value in list(sub.__dict__.items())
        if name not in machinery
        for keys in _keys_in(value, _DEPTH)
    ]


def _keys_in(value: Any, depth: int) -> Iterator[tuple[Key, ...]]:
    items: Any = ()
    if type(value) is list:
        items = enumerate(value)
    elif type(value) is dict:
        items = ((key, item) for key, item in value.items() if type(key) in (str, int))
    for key, item in items:
        if type(item) is float:
            yield (key,)
        elif depth > 1:
            yield from ((key, *rest) for rest in _keys_in(item, depth - 1))


def look(value: Any, keys: Sequence[Key]) -> Any:
    """What lies at some keys inside a container."""
    for key in keys:
        value = value[key]
    return value


def put(value: Any, keys: Sequence[Key], what: Any) -> None:
    """Exchange what lies at some keys inside a container."""
    look(value, keys[:-1])[keys[-1]] = what


def described(strength: Strength) -> list[Any]:
    """What later values are held against, as JSON."""
    return [_TAG, sorted(strength.asked)]


def fits(found: Any, expected: Any) -> bool:
    """Whether a described value is the captured one, but for numbers in place of strengths that compare as they did."""
    if _is_one(expected):
        if type(found) is int:
            value: float = found
        elif isinstance(found, list) and found[:1] == ["float"]:
            value = float.fromhex(found[1])
        else:
            return False
        return all(_COMPARISONS[name](value, float.fromhex(other)) is answer for name, other, answer in expected[1])
    if isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        return all(map(fits, found, expected))
    return type(found) is type(expected) and found == expected


def holds_one(expected: Any) -> bool:
    """Whether a described value has a strength in it."""
    return isinstance(expected, list) and (_is_one(expected) or any(map(holds_one, expected)))


def _is_one(expected: Any) -> bool:
    return isinstance(expected, list) and len(expected) == 2 and expected[0] == _TAG
