# SPDX-License-Identifier: Apache-2.0
"""Which form of the kernel of `scaled_linear` a layer gets, and where the host's own operator was measured faster.

`benchmarks/int8_linear.py` times every form of FORMS for the layers of models that people run, and prints rows of
MEASURED. `nexfort tune` does so on the user's own card; what it measured holds in the place of MEASURED (`use`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..gluon_support import descriptors_missing

Capability = tuple[int, int]
Layer = tuple[int, int]  # columns and summands of a weight
MANY = 512  # rows from which on larger blocks fill a card


@dataclass(frozen=True)
class Form:
    """rows, columns, inner: of a block. warps, stages: of a program. together: blocks of rows that share columns.

    grouped: the kernel in Gluon (gluon_kernel.py).
    """

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int
    together: int = 8
    grouped: bool = False

    def blocks(self) -> dict[str, int]:
        """The constants of the kernel."""
        return {
            "M_BLOCK": self.rows,
            "N_BLOCK": self.columns,
            "K_BLOCK": self.inner,
            "TOGETHER": self.together,
        }


@dataclass(frozen=True)
class Measured:
    """One layer on one card. ours, host: microseconds of it in this form, and by the host's operator.

    Both with bringing its input to int8, and of as many rows as a picture of 1024x1024 has.
    """

    form: Form
    ours: float
    host: float


# at most 101376 bytes of shared memory, which every card has
FORMS = (
    Form(128, 128, 128, 8, 3),
    Form(128, 256, 64, 8, 4),
    Form(128, 128, 64, 4, 4),
    Form(128, 64, 128, 4, 4),
    Form(64, 128, 128, 4, 4),
)
# as many accumulators again, so half the columns
WITH_UP = (Form(128, 64, 128, 8, 3), Form(128, 128, 64, 8, 4), Form(64, 64, 128, 4, 4))
FEW_ROWS = Form(32, 64, 128, 4, 4)
GROUPED = Form(128, 256, 128, 4, 1, grouped=True)  # with `up` half of the columns are of the other weight
# what more shared memory allows: compute capability -> forms that are tried there, too
LARGER: Mapping[Capability, tuple[Form, ...]] = {
    (9, 0): (GROUPED, Form(128, 256, 128, 8, 3), Form(128, 256, 128, 8, 4), Form(256, 128, 128, 8, 3)),
    (10, 0): (Form(128, 256, 128, 8, 3), Form(128, 256, 128, 8, 4)),
    (8, 0): (Form(128, 256, 128, 8, 3),),
}
# compute capability -> layer -> what was measured; a layer with `up` has its columns negative
MEASURED: Mapping[Capability, Mapping[Layer, Measured]] = {
    (9, 0): {
        # on an H200
        (11520, 3840): Measured(GROUPED, ours=318.2, host=515.3),
        (3840, 3840): Measured(GROUPED, ours=141.5, host=224.1),
        (10240, 3840): Measured(GROUPED, ours=293.6, host=448.1),
        (-10240, 3840): Measured(GROUPED, ours=504.6, host=996.8),
        (3840, 10240): Measured(GROUPED, ours=504.6, host=551.1),
        # the rest on an H100, with a faster kernel for the input
        (3072, 3072): Measured(GROUPED, ours=84.3, host=163.3),
        (12288, 3072): Measured(GROUPED, ours=258.7, host=443.8),
        (3072, 12288): Measured(GROUPED, ours=316.1, host=515.5),
        (5120, 5120): Measured(GROUPED, ours=202.2, host=363.3),
        (13824, 5120): Measured(GROUPED, ours=466.6, host=802.6),
        (5120, 13824): Measured(GROUPED, ours=557.0, host=849.3),
        (9216, 3072): Measured(GROUPED, ours=212.0, host=350.6),
        (21504, 3072): Measured(GROUPED, ours=436.0, host=716.5),
        (3072, 15360): Measured(GROUPED, ours=437.0, host=641.4),
    },
}


_own: Mapping[Layer, Measured] = {}


def use(layers: Mapping[Layer, Measured]) -> None:
    """From now on these layers of the user's own card hold in this process, and MEASURED for all others."""
    global _own
    _own = layers


def _known(card: Capability) -> Mapping[Layer, Measured]:
    return {**MEASURED.get(card, {}), **_own}


def forms(card: Capability, *, up: bool = False) -> tuple[Form, ...]:
    """All forms that may be tried on a card."""
    if up:
        return WITH_UP + ((GROUPED,) if GROUPED in LARGER.get(card, ()) else ())
    return FORMS + LARGER.get(card, ())


def measured(card: Capability, columns: int, inner: int, *, up: bool = False) -> Measured | None:
    """What is known of a layer on a card."""
    return _known(card).get((-columns if up else columns, inner))


def form(card: Capability, columns: int, inner: int, *, few: bool, up: bool) -> Form:
    """The form of a layer: what was measured the fastest, or what should fill a card."""
    if few:
        return FEW_ROWS
    known, found = _known(card), measured(card, columns, inner, up=up)
    # where every layer that was measured takes the same form, so does one that was not
    alike = {one.form for layer, one in known.items() if (layer[0] < 0) == up}
    plain = forms(card, up=up)[0]
    usual = alike.pop() if len(alike) == 1 else plain
    taken = usual if found is None else found.form
    return plain if taken.grouped and descriptors_missing(card) else taken


def loses(card: Capability, columns: int, inner: int, *, up: bool = False) -> bool:
    """Whether the host's own operator was measured to be as fast, or faster."""
    found = measured(card, columns, inner, up=up)
    return found is not None and found.ours >= found.host
