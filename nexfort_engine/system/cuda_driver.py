# SPDX-License-Identifier: Apache-2.0
"""What torch does not ask NVIDIA's driver for, asked through the driver's own library (torch 2.11)."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any


@functools.cache
def library() -> Any:
    """CUDA's driver API, or None on a machine without one."""
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None


@functools.cache
def driver_version() -> int | None:
    """The newest CUDA that NVIDIA's driver runs, as CUDA writes versions; None without such a driver.

    `cuDriverGetVersion`, which does not touch a card.
    """
    found = ctypes.c_int()
    driver = library()
    if driver is None or driver.cuDriverGetVersion(ctypes.byref(found)):
        return None
    return found.value


def trim_graph_memory(index: int) -> None:
    """Give a card's memory back that CUDA graphs had of cudaMallocAsync and no graph holds any more.

    `cuDeviceGraphMemTrim`: torch trims only the pool outside of graphs. Raises RuntimeError with the driver's number.
    """
    driver = library()
    if driver is None:
        return
    failed = driver.cuDeviceGraphMemTrim(ctypes.c_int(index))
    if failed:
        raise RuntimeError(f"cuDeviceGraphMemTrim of device {index} failed with CUresult {failed}")
