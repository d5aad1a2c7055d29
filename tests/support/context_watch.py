# SPDX-License-Identifier: Apache-2.0
"""Imported in a worker by a job that lists it: once the process has a context on the GPU, its stacks are written down.

The file is named by the variable WATCH. `cuDevicePrimaryCtxGetState` of CUDA's driver API tells without making one.
"""

import ctypes
import os
import sys
import threading
import time
import traceback

WATCH = "NEXFORT_TEST_CONTEXT"


def has_context() -> bool:
    """Whether this process holds a context on the first device. RuntimeError if the driver does not say."""
    driver = ctypes.CDLL("libcuda.so.1")
    device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    failed = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0)
    failed = failed or driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
    if failed:
        raise RuntimeError(f"CUDA's driver answers with error {failed}")
    return bool(active.value)


def _watch(file: str) -> None:
    while not has_context():
        time.sleep(0.002)
    stacks = ["".join(traceback.format_stack(frame)) for frame in sys._current_frames().values()]
    with open(file, "a") as stream:
        stream.write("\n----\n".join(stacks))


if os.environ.get(WATCH):
    threading.Thread(target=_watch, args=(os.environ[WATCH],), daemon=True).start()
