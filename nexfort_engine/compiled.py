# SPDX-License-Identifier: Apache-2.0
"""An older name of `api`. Pickles of compiled modules name it."""

import sys

from . import api

sys.modules[__name__] = api
