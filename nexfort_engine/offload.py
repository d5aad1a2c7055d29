# SPDX-License-Identifier: Apache-2.0
"""An older name of `weights.offload`. Pickles of networks whose weights are away name it."""

import sys

from .weights import offload

sys.modules[__name__] = offload
