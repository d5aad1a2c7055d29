# SPDX-License-Identifier: Apache-2.0
"""Scripts about kernels, each in a process of its own: what Triton is told before it is imported differs.

Most of them take less time than importing torch and Triton. A process imports both, once for each environment, and
each script runs in a fork of it. `python kernel_scripts.py` is that process.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
MOST_SECONDS = 600


def run(script: str, *arguments: str, TRITON_CACHE_DIR: str = "", **environment: str) -> None:  # noqa: N803
    """Run one of tests/kernels; raises AssertionError with what it printed if it fails.

    environment: what is set before torch and Triton are imported. Triton reads TRITON_CACHE_DIR when it compiles.
    """
    forks = _forking(tuple(sorted(environment.items())))
    assert forks.stdin is not None and forks.stdout is not None
    with tempfile.NamedTemporaryFile("r", suffix=".txt") as printed:
        path = str(TESTS / "kernels" / script)
        print(json.dumps([[path, *arguments], TRITON_CACHE_DIR, printed.name]), file=forks.stdin, flush=True)
        status = forks.stdout.readline().strip()
        assert status == "0", f"{script} ended with status {status}\n{printed.read()}"


@functools.cache
def _forking(environment: tuple[tuple[str, str], ...]) -> subprocess.Popen[str]:
    """The process that has imported torch and Triton in this environment. It ends with this one."""
    made = subprocess.Popen(
        [sys.executable, __file__],
        env={**os.environ, "PYTHONPATH": str(TESTS.parent), **dict(environment)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(made.communicate)
    return made


def main() -> None:
    """Run the scripts that are asked for on standard input, and print the status of each."""
    import torch  # noqa: F401  so that the forks have it
    import triton  # noqa: F401

    import nexfort_engine.kernels.op_registry  # noqa: F401

    for line in sys.stdin:
        arguments, cache, printed = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(arguments, cache, printed)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run(arguments: list[str], cache: str, printed: str) -> None:
    """In a fork: run a script as the only thing of this process, and end it."""
    output = os.open(printed, os.O_WRONLY | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    signal.alarm(MOST_SECONDS)
    sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).parent)
    os.environ.update({"TRITON_CACHE_DIR": cache} if cache else {})
    status = 1
    try:
        runpy.run_path(arguments[0], run_name="__main__")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
