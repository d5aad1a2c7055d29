# SPDX-License-Identifier: Apache-2.0
"""What products cost on a card in half precision and in 8 bits: the estimates by which products are taken or left.

Figures are of one card. Rates are those of products that fill it; `saves` says what becomes of smaller ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

TILE = 128  # a product's kernel computes so many rows by so many columns at a time, on one multiprocessor


@dataclass(frozen=True)
class Card:
    """half, narrow: operations a second of large products, of those in 8 bits; memory: bytes a second.

    kernel: seconds that one kernel more adds to a step; product: seconds that a product in 8 bits loses at any size,
    with its scales. processors: its multiprocessors.
    """

    half: float
    narrow: float
    memory: float
    kernel: float
    product: float
    processors: int


# Measured (2026-11, torch 2.11): Flux's products 675 to 720e12 in bfloat16 and 1240 to 1390e12 in fp8, SDXL's from
# 390 to 700e12 in float16 and from 400 to 1130e12 in fp8, where 2048 rows times 1280x1280 are the slowest of both.
H200 = Card(half=700e12, narrow=1430e12, memory=3.5e12, kernel=3e-6, product=2e-6, processors=132)

# Nobody measured it: its maker's figures (312e12, 624e12 in int8, 2.04e12, with 80 GB), less by what the H200's are.
A100 = Card(half=220e12, narrow=440e12, memory=1.5e12, kernel=3e-6, product=2e-6, processors=108)


def origin(device: str) -> str:
    """Whose figures decide what is computed in 8 bits on a device of this name, as torch tells it."""
    words = device.replace("-", " ").split()
    fp8 = "measured on such a card" if "H200" in words else "measured on another card, an H200"
    int8 = "such a card's" if "A100" in words else "those of another card, an A100,"
    return f"for fp8 {fp8}; for int8 {int8} as its maker states them, which nobody measured"


def saves(rows: int, inner: int, columns: int, card: Card = H200) -> float:
    """Seconds that a product of (rows, inner) and (inner, columns) saves once both factors are in fp8.

    No product is faster than its input is read and its result written, which stays in two bytes. With few tiles a card
    waits for memory and for its last tiles, in fp8 more so: a product of as many tiles as there are multiprocessors
    saves half of what it would in a large one. What a narrower weight saves in reading does not count: products of few
    rows were not seen to gain.
    """
    tiles = math.ceil(rows / TILE) * math.ceil(columns / TILE)
    filled = tiles / (tiles + card.processors)
    work, written = 2.0 * rows * inner * columns, 2.0 * rows * columns
    half = max(work / card.half, (2.0 * rows * inner + written) / card.memory)
    fp8 = max(work / card.narrow, (1.0 * rows * inner + written) / card.memory)
    return (half - fp8) * filled - card.product


def narrowing(rows: int, inner: int, card: Card = H200, layers: int = 1) -> float:
    """Seconds that bringing an input to fp8 takes: read in two bytes, written in one; its largest numbers before.

    layers: how many share it. Inductor narrows for all of them in one kernel, and writes each one's copy (torch 2.11).
    """
    return (2.0 + layers) * rows * inner / card.memory + 2 * card.kernel


def casting(rows: int, columns: int, card: Card = H200) -> float:
    """Seconds of a pass over a result in two bytes, where nothing that follows can do it on its way."""
    return 4.0 * rows * columns / card.memory + card.kernel
