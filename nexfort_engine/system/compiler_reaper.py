# SPDX-License-Identifier: Apache-2.0
"""A process whose group compilers are in that this process starts: it ends them once this process is gone.

Run as a file, by Python alone: it imports nothing of the engine.
"""

import os
import signal
import sys
import time

LOOK = 0.5  # seconds


def keep(parent: int) -> None:
    """Wait until the parent is gone, and end all of the group."""
    while os.getppid() == parent:
        time.sleep(LOOK)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    keep(int(sys.argv[1]))
