# SPDX-License-Identifier: Apache-2.0
"""Writes docs/options.md and docs/design/passes.md from the catalogue: `python3 tools/catalogue_pages.py`.

Nothing of these pages is written by hand. `tests/test_features.py` compares them with what this file makes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from nexfort_engine.config.option_catalogue import (  # noqa: E402  the project need not be installed
    LEGACY_NO_EFFECT,
    MODE_GAINS,
    NOT_MEASURED,
    OPTION_ROWS,
    RETIRED,
    OptionSpec,
)
from nexfort_engine.config.options import DEFAULT_MODE, MEMORY_FORMATS, TOKENS  # noqa: E402
from nexfort_engine.config.pass_catalogue import NEEDS, PASSES, Cards, PassSpec  # noqa: E402

_ALL, _GPUS = "all", "GPUs"
_GROUPS = {
    "Graphs and kernels": ("fuse.", "attention."),
    "Precision and weights": ("quant.",),
    "Steps and compile time": ("triton.", "cuda.", "compile."),
    "Settings of torch": ("overrides.", "inductor."),
}
_ABOUT = f"""# Options

Nexfort compiles the diffusion model of ComfyUI or of diffusers, so that each sampling step takes less time. Options say
what it may do for that. Most users need none: the defaults are what was measured to win.

In Python `options` is a dict, JSON text or a mode. ComfyUI's nodes have widgets for mode and memory format, and take
JSON in `options`:

    {{"mode": "O2", "memory_format": "channels_last", "options": {{"fuse.rotary": false}}}}

The report of a model names what was asked for and has no effect, with the reason. A word that does not exist is
answered with the nearest one that does. `python3 tools/catalogue_pages.py` writes this page.

## Keys

| key | values |
|---|---|
| `mode` | tokens of the next table, joined by `:` in any order |
| `memory_format` | {", ".join(f"`{name}`" for name in MEMORY_FORMATS)} |
| `dynamic` | `true` (default): sizes stay free; `false`: an artefact for each size |
| `disable` | `true`: the model is handed through |
| `fullgraph` | accepted for compatibility |
| `options` | the options below, each `true` or `false` |

## Mode

The default is `{DEFAULT_MODE}`. [Modes](modes.md) says which to take when.

| token | effect | measured gain |
|---|---|---|
"""
_MEASUREMENTS = """
## Reading the tables

*Default* holds where `options` does not name the option. "As torch has it" leaves the setting as the process has it.
*Measured gain* is copied from `benchmarks/history.md` of the repository, with the GPU and the date. Milliseconds are
those of a queued step in mode `O2`, at the network's size in [benchmarks](benchmarks.md) where the row says no other. A
dash means that no cost is known.
"""
_HEAD = "| option | default | effect | cost | measured gain | devices | since |\n|---|---|---|---|---|---|---|\n"
_LEGACY = """
## Without effect

Workflows for the old engine have these options. They are accepted, and the report says that they have no effect.

| option | what it asks for |
|---|---|
"""
_RETIRED = """
These options were removed. They are accepted, and the report says that they have no effect.

| option | why it was removed |
|---|---|
"""


_ABOUT_PASSES = """# Passes

Nexfort writes the captured graph of a network's block differently before Inductor lowers it. A *pass* is a switch of
lowering. Most passes are rewrites of a graph, in `nexfort_engine/passes/`, and run in the order of this table. The
others are read by `nexfort_engine/lowering/inductor.py`. [Passes and kernels](passes_and_kernels.md) says what each
does.

`python3 tools/catalogue_pages.py` writes this page from `nexfort_engine/config/pass_catalogue.py`. A test checks that
each pass runs behind those in its column "after".

| pass | rewrite | switched by | after | devices | measured gain |
|---|---|---|---|---|---|
"""


def pages() -> dict[Path, str]:
    """Each page with its text."""
    return {ROOT / "docs" / "options.md": _options(), ROOT / "docs" / "design" / "passes.md": _passes()}


def _options() -> str:
    modes = (f"| `{name}` | {text} | {MODE_GAINS.get(name, NOT_MEASURED)} |" for name, text in TOKENS.items())
    legacy = (f"| `{name}` | {text} |" for name, text in LEGACY_NO_EFFECT.items())
    retired = (f"| `{name}` | {text} |" for name, text in RETIRED.items())
    groups = (f"\n## {title}\n\n{_HEAD}{_lines(_rows(starts))}" for title, starts in _GROUPS.items())
    return (
        f"{_ABOUT}{_lines(modes)}{_MEASUREMENTS}{''.join(groups)}{_LEGACY}{_lines(legacy)}{_RETIRED}{_lines(retired)}"
    )


def _passes() -> str:
    rows = []
    for one in PASSES:
        reasons: dict[str, list[str]] = {}
        for name, reason in one.after.items():
            reasons.setdefault(reason, []).append(f"`{name}`")
        after = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
        file, _, function = one.rewrite.partition(":")
        rewrite = f"`{function}` in `passes/{file}.py`" if one.rewrite else "-"
        known = {**MODE_GAINS, **{name: row.gain for name, row in OPTION_ROWS.items()}}
        cells = (
            f"`{one.name}`",
            rewrite,
            f"`{one.option}`",
            after or "-",
            _for(one),
            known.get(one.option, NOT_MEASURED),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return _ABOUT_PASSES + _lines(rows)


def devices(row: OptionSpec) -> str:
    """Where an option acts: as its row says, or its passes."""
    own = (_for(one) for one in PASSES if one.option == row.name)
    return row.devices or next(own, "")


def _for(one: PassSpec) -> str:
    text = NEEDS[one.needs].text if one.needs else _GPUS if one.gpu else _ALL
    if one.measured:
        return f"NVIDIA GPUs of compute capability {_named(one.measured)}; `true` asks for it on other {text}"
    return text


def _named(cards: Cards) -> str:
    return " or ".join(f"{major}.{minor}" for major, minor in cards)


def _rows(starts: tuple[str, ...]) -> Iterable[str]:
    for name, row in sorted(OPTION_ROWS.items()):
        if name.startswith(starts):
            cells = f"`{name}`", row.default, row.effect, row.cost or "-", row.gain, devices(row), row.since
            yield f"| {' | '.join(cells)} |"


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def main() -> int:
    """The command."""
    for page, text in pages().items():
        same = page.is_file() and page.read_text(encoding="utf-8") == text
        page.write_text(text, encoding="utf-8")
        sys.stdout.write(f"{page.relative_to(ROOT)} {'is as it was' if same else 'was brought up to date'}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
