# SPDX-License-Identifier: Apache-2.0
"""`nexfort tune`: measure this card, so that what pays on it is known and not guessed.

The figures are kept in the cache of ComfyUI, beside the artefacts, and count from ComfyUI's next start on.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cache_command import add_where, examples_below, store_of
from .output import say, say_table

if TYPE_CHECKING:
    from ..quant.card_figures import CardFigures

SECONDS = 110.0
_UNITS = {"memory": ("memory", "GB/s", 1e9)}


def add_to(commands: Any) -> None:
    """Adds `tune` to the parser of the command line."""
    text = "measure this card in under two minutes; what pays on it is then known and not guessed"
    examples = examples_below("tune", ("", "--again", "--export my_card.json"))
    tune = add_where(commands.add_parser("tune", help=text, description=text, **examples))
    tune.add_argument("--seconds", type=float, default=SECONDS, help="how long, at most (default: %(default)g)")
    tune.add_argument("--again", action="store_true", help="measure anew what is known")
    tune.add_argument("--export", type=Path, metavar="FILE", help="write the figures to a file that you can send in")
    tune.set_defaults(command=_tune)


def _tune(options: argparse.Namespace) -> int:
    import torch

    from ..cache.sidecar import update
    from ..quant import card_figures, matmul, tune

    if not torch.cuda.is_available() or torch.version.hip is not None:
        raise RuntimeError("there is nothing to measure: torch finds no NVIDIA GPU here")
    root = store_of(options).root
    name = torch.cuda.get_device_name()
    known = None if options.again else card_figures.stored(root, name)
    figures = known if known is not None else tune.begun(name)
    why_not = matmul.missing("cuda", torch.int8) or _host_missing()
    left = tune.missing(
        figures,
        fp8=matmul.missing("cuda") is None,
        int8=matmul.missing("cuda", torch.int8) is None,
        layers=why_not is None,
    )
    if not options.json:
        say(f"{name}: {len(left)} measurements to take")
    done = 0
    file = root / card_figures.file_name(name)

    def keep(found: CardFigures) -> None:
        update(root, file.name, lambda _: found.as_dict())

    for taken in tune.run(figures, left, options.seconds, keep):
        figures, done = taken.figures, done + 1
        if not options.json:
            failed = f", left out: {taken.problem}" if taken.problem else ""
            say(f"  {done} of {len(left)}: {taken.what.text}{failed}")
    told = figures.as_dict() | {"left": len(left) - done, "file": str(file), "int8_pays": figures.int8_pays}
    if options.export is not None:
        options.export.write_text(json.dumps(figures.as_dict(), indent=1) + "\n", encoding="utf-8")
    if options.json:
        say(json.dumps(told, indent=1))
        return 0
    say_table(("measured", "value"), rate_rows(figures))
    if figures.layers:
        say_table(("layer in int8, microseconds", "Nexfort", "ComfyUI", "ratio"), layer_rows(figures))
    for line in closing(figures, len(left) - done, why_not, str(file)):
        say(line)
    return 0


def _host_missing() -> str | None:
    """Why ComfyUI's own operator for layers of int8 files cannot be timed beside the engine's, or None."""
    if importlib.util.find_spec("comfy_kitchen") is None:
        return "comfy_kitchen is not installed here; ComfyUI brings it"
    from ..capture.backend_operators import cuda_missing

    importlib.import_module("comfy_kitchen")
    return cuda_missing("int8_linear")


def rate_rows(figures: CardFigures) -> list[tuple[str, str]]:
    """The rates as a table has them."""
    rows = []
    for name, value in figures.rates.items():
        title, unit, by = _UNITS.get(name, (f"matmuls in {'bfloat16' if name == 'half' else name}", "TFLOP/s", 1e12))
        rows.append((title, f"{value / by:.0f} {unit}"))
    return rows


def layer_rows(figures: CardFigures) -> list[tuple[str, ...]]:
    """The layers as a table has them, times in microseconds."""
    return [
        (
            f"{'SwiGLU of ' * (columns < 0)}{abs(columns)}x{inner}",
            f"{one.ours:.1f}",
            f"{one.host:.1f}",
            f"{one.ours / one.host:.2f}",
        )
        for (columns, inner), one in sorted(figures.layers.items())
    ]


def closing(figures: CardFigures, left: int, why_not: str | None, file: str) -> list[str]:
    """What the figures mean, as sentences."""
    lines = []
    if figures.int8_pays is not None:
        what = (
            "faster than ComfyUI's and are used" if figures.int8_pays else "no faster than ComfyUI's and are not used"
        )
        lines.append(f"Nexfort's kernels for layers of int8 files are {what} on this card.")
    elif why_not is not None:
        lines.append(f"Layers of int8 files were not measured: {why_not}.")
    if left:
        lines.append(f"The time was up: {left} measurements are left. Run the command again for them.")
    return [*lines, f"The figures are in {file}. They count from ComfyUI's next start on; blocks compile once more."]
