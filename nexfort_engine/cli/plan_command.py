# SPDX-License-Identifier: Apache-2.0
"""`nexfort plan`: which products of cached artefacts are in 8 bits, and why others are not.

The plan is made when a block is captured in a mode with low precision, and kept beside its artefact; this prints it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..reporting.report import counted, type_of
from .cache_command import add_where, examples_below, store_of
from .output import say

if TYPE_CHECKING:
    from ..cache.store import Store

NOTHING = "The cache holds no artefact in low precision: run a model once in the mode O3, on a card with fp8 products."


def add_to(commands: Any) -> None:
    """Adds `plan` to the parser of the command line."""
    text = "show which products are computed in 8 bits (mode O3) and why the others are not"
    examples = examples_below("plan", ("", "--comfyui ~/ComfyUI --json"))
    plan = add_where(commands.add_parser("plan", help=text, description=text, **examples))
    plan.set_defaults(command=_plan)


def _plan(options: argparse.Namespace) -> int:
    found = plans(store_of(options))
    if options.json:
        say(json.dumps({"artefacts": found}, indent=1))
    elif not found:
        say(NOTHING)
    for one in () if options.json else found:
        say("\n".join(_lines(one)))
    return 0


def plans(store: Store) -> list[dict[str, Any]]:
    """{"id", "region", "model", "products", "attention"} of each artefact that was made in low precision.

    products and attention: as quant.precision and passes.narrow_attention tell them.
    """
    from ..cache import table

    return [
        {"id": row["id"], "region": table.region(row), "model": table.family(row)}
        | {name: row["info"].get(name, []) for name in ("products", "attention")}
        for row in store.rows()
        if row["info"].get("products") or row["info"].get("attention")
    ]


def _lines(one: Mapping[str, Any]) -> list[str]:
    products = one["products"]
    (narrow, count), name = counted(products), type_of(products)
    lines = [f"{one['model']} {one['region']} ({one['id'][:8]}): {narrow} of {count} products in {name}"]
    for row in products:
        sizes = f"({row['rows']}, {row['inner']}) x ({row['inner']}, {row['columns']})"
        lines.append(f"  {row['count']:>3} x  {sizes}  {_what(row, name)}")
    for row in one["attention"]:
        sizes = f"attention of {row['queries']} queries, {row['keys']} keys, {row['heads']} heads of {row['width']}"
        lines.append(f"  {row['count']:>3} x  {sizes}  {_what(row, 'int8 and fp8')}")
    return lines


def _what(row: Mapping[str, Any], narrow: str) -> str:
    from ..cache import table

    return narrow if row["reason"] is None else f"as it is: {table.plain(row['reason'])}"
