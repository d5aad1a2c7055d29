# SPDX-License-Identifier: Apache-2.0
"""`python -m nexfort_engine.lowering.worker_main`: a lowering worker (worker.py) that ends with its parent."""

import sys

from .worker_lifetime import watch

if __name__ == "__main__":
    watch()  # before torch is imported, which takes seconds
    from .worker import main

    sys.exit(main(sys.argv[1:]))
