# SPDX-License-Identifier: Apache-2.0
"""`python -m nexfort_engine.clear_cache`: the old engine's name for `python -m nexfort_engine cache clear`."""

from __future__ import annotations

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main(["cache", "clear", *sys.argv[1:]]))
