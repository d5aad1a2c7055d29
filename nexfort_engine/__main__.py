# SPDX-License-Identifier: Apache-2.0
"""`python -m nexfort_engine`: hands over to the command line."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
