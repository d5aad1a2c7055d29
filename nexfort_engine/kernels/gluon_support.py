# SPDX-License-Identifier: Apache-2.0
"""Whether the torch and the Triton that are installed offer what calls of kernels in Gluon need.

Their files are looked into, so that nothing has to be imported: importing Inductor takes half a second, and settings
for lowering are chosen before anybody needs it. Each kernel is checked again where it is compiled (gluon_autotuner.py).
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pathlib import Path

import torch

from ..config.pass_catalogue import NEEDS
from ..system.cuda_driver import driver_version

DESCRIPTORS = NEEDS["descriptors"].cards  # compute capabilities that kernels are for which write descriptors
DESCRIPTORS_DRIVER = 12000  # CUDA 12.0: the first driver that knows tensor maps, in its API and in kernels alike
_TILES = "experimental/gluon/language/nvidia/hopper/tma.py"
# by file: texts that stand in it, of which one of each row is enough
_GLUON: dict[tuple[str, str], tuple[tuple[str, ...], ...]] = {
    ("triton", "experimental/gluon/_runtime.py"): (("class GluonASTSource",),),
    ("triton", _TILES): (("def async_load(", "def async_copy_global_to_shared("),),
    ("triton", "experimental/gluon/language/_core.py"): (("def reinterpret(", "def _reinterpret("),),
    # what is written for a kernel in Triton's language, which `inductor_launch` turns into one in Gluon
    ("torch", "_inductor/codegen/wrapper.py"): (
        *(("async_compile.triton(",), ("@triton_heuristics.user_autotune(",), ("@triton.jit",)),
        ("def define_user_defined_triton_kernel(",),
    ),
}
# a launcher that can be told of one more argument, the memory for descriptors
_DESCRIPTORS: dict[tuple[str, str], tuple[tuple[str, ...], ...]] = {
    ("triton", _TILES): (("def make_tensor_descriptor(",),),
    ("torch", "_inductor/runtime/static_triton_launcher.py"): (
        *(("class StaticallyLaunchedCudaKernel",), ("def extract_type(",)),
        *(("self.arg_tys",), ("self.full_constexprs",), ("self.has_global_scratch",)),
    ),
}


def gluon_missing() -> str | None:
    """Why no kernel in Gluon can be called from what Inductor writes here, or None."""
    return _first_missing(_GLUON)


def descriptors_missing(card: tuple[int, int]) -> str | None:
    """Why no kernel in Gluon that writes descriptors is called for a card of this compute capability, or None."""
    return kernels_missing("descriptors", card)


def kernels_missing(need: str, card: tuple[int, int]) -> str | None:
    """Why no kernel in Gluon with this need is called for a card of this compute capability, or None.

    need: a name of NEEDS, one with cards.
    """
    row = NEEDS[need]
    if torch.version.hip is not None:
        return "their kernels are for NVIDIA's cards"
    if reason := gluon_missing() or (_first_missing(_DESCRIPTORS) if row.descriptors else None):
        return reason
    if card not in row.cards:
        known = " and ".join(f"{major}.{minor}" for major, minor in row.cards)
        return f"their kernels are for compute capability {known}, and this card has {card[0]}.{card[1]}"
    driver = driver_version() if row.descriptors else None
    if driver is not None and driver < DESCRIPTORS_DRIVER:
        needed, found = (f"{number // 1000}.{number % 1000 // 10}" for number in (DESCRIPTORS_DRIVER, driver))
        return f"their kernels need a driver for CUDA {needed} or newer, found one for CUDA {found}"
    return None


def _first_missing(wanted: dict[tuple[str, str], tuple[tuple[str, ...], ...]]) -> str | None:
    for (package, file), rows in wanted.items():
        text = _text(package, file)
        if text is None:
            return f"{package} has no file {file} here"
        for row in rows:
            if not any(one in text for one in row):
                names = " and no ".join(one.removeprefix("def ").strip("(") for one in row)
                return f"{package}'s {file} has no {names}"
    return None


@functools.cache
def _text(package: str, file: str) -> str | None:
    """The source of a file of an installed package, or None."""
    found = find_spec(package)
    if found is None or found.origin is None:
        return None
    try:
        return (Path(found.origin).parent / file).read_text("utf-8")
    except OSError:
        return None
