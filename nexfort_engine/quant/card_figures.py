# SPDX-License-Identifier: Apache-2.0
"""What `nexfort tune` measured on the user's own card, and where it takes the place of what the engine brings.

The engine brings figures of an H200 and an H100 (`kernels/scaled_linear/choice.py`, `cost_model.py`). On other cards
they are guesses. Figures of a card are a file beside the artefacts, one for each name that torch gives a card. They
are a part of an artefact's key: who measures anew compiles anew.

`use` sets the figures of this process. A worker gets them among the settings that it lowers with.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..cache.key import canonical_json
from ..cache.sidecar import recall
from ..kernels.scaled_linear import choice
from .cost_model import A100, H200, Card

ENOUGH = 4  # layers: from so many on their sums say whether the engine's kernels pay on a card
GAIN = 0.97  # of the host's time, at most
RATES = ("half", "fp8", "int8", "memory")


@dataclass(frozen=True)
class CardFigures:
    """Of one card. name: as torch gives it. torch, date: with which version and when they were taken, as ISO.

    rates: operations a second of large matmuls in bfloat16 ("half"), fp8 and int8, and bytes a second of copies
    ("memory"); what the card cannot do is absent. layers: of columns and summands, as `choice.MEASURED` has them.
    """

    name: str
    torch: str
    date: str
    rates: Mapping[str, float] = field(default_factory=dict)
    layers: Mapping[choice.Layer, choice.Measured] = field(default_factory=dict)

    def with_rate(self, name: str, value: float) -> CardFigures:
        """With one more rate."""
        return replace(self, rates={**self.rates, name: value})

    def with_layer(self, layer: choice.Layer, found: choice.Measured) -> CardFigures:
        """With one more layer."""
        return replace(self, layers={**self.layers, layer: found})

    @property
    def int8_pays(self) -> bool | None:
        """Whether the engine's int8 layers are faster than the host's; None where too few were measured."""
        if len(self.layers) < ENOUGH:
            return None
        ours, host = (sum(getattr(one, who) for one in self.layers.values()) for who in ("ours", "host"))
        return ours <= GAIN * host

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        layers = [[*layer, asdict(found.form), found.ours, found.host] for layer, found in sorted(self.layers.items())]
        return {"name": self.name, "torch": self.torch, "date": self.date, "rates": dict(self.rates), "layers": layers}

    @classmethod
    def from_dict(cls, told: Any) -> CardFigures:
        """The figures that `as_dict` gave. Raises ValueError with what is wrong."""
        try:
            rates = {str(name): _positive(value) for name, value in told["rates"].items() if name in RATES}
            layers = {
                (int(columns), int(inner)): choice.Measured(_form(form), _positive(ours), _positive(host))
                for columns, inner, form, ours, host in told["layers"]
            }
            return cls(str(told["name"]), str(told["torch"]), str(told["date"]), rates, layers)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"these are no figures of a card: {error!r}") from error

    def digest(self) -> str:
        """Equal for figures that lead to the same code."""
        told = {name: value for name, value in self.as_dict().items() if name != "date"}
        return hashlib.sha256(canonical_json(told).encode()).hexdigest()[:16]


def _positive(value: Any) -> float:
    number = float(value)
    if not 0 < number < float("inf"):
        raise ValueError(f"found {value!r}, expected a number above 0")
    return number


def _form(told: Mapping[str, Any]) -> choice.Form:
    form = choice.Form(**told)
    known = (*choice.FORMS, *choice.WITH_UP, *(one for more in choice.LARGER.values() for one in more))
    if form not in known:
        raise ValueError(f"there is no form {told!r} of the kernel")
    return form


def file_name(name: str) -> str:
    """Of the file for a card of this name."""
    return f"card-{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"


def stored(root: Path | None, name: str) -> CardFigures | None:
    """The figures of a card of this name in a cache, None where there are none of this torch."""
    told = recall(root, file_name(name))
    if told is None:
        return None
    try:
        found = CardFigures.from_dict(told)
    except ValueError:
        return None
    return found if (found.name, found.torch) == (name, str(torch.__version__)) else None


@functools.cache
def _of_card(root: Path, name: str) -> CardFigures | None:
    return stored(root, name)


def of_cache(root: Path | None) -> CardFigures | None:
    """The figures of the card that is current, as a cache had them when this process asked first."""
    if root is None or not torch.cuda.is_available():
        return None
    return _of_card(root, torch.cuda.get_device_name())


_current: CardFigures | None = None


def use(figures: CardFigures | None) -> None:
    """From now on these figures hold in this process; None: those that the engine brings."""
    global _current
    _current = figures
    choice.use(figures.layers if figures is not None else {})


def use_told(told: object) -> None:
    """As `use`, of what `as_dict` gave, or None."""
    use(None if told is None else CardFigures.from_dict(told))


def key_part(root: Path | None, device_type: str) -> dict[str, str]:
    """What the user's figures add to the key of an artefact: nothing where there are none."""
    figures = of_cache(root) if device_type == "cuda" else None
    return {} if figures is None else {"figures": figures.digest()}


def card_of(dtype: torch.dtype) -> Card:
    """The card whose figures estimate matmuls in fp8 or int8: the user's own where it was measured."""
    base, name = (A100, "int8") if dtype is torch.int8 else (H200, "fp8")
    rates = _current.rates if _current is not None else {}
    if not {"half", "memory", name} <= rates.keys():
        return base
    return replace(base, half=rates["half"], narrow=rates[name], memory=rates["memory"])
