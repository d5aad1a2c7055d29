# SPDX-License-Identifier: Apache-2.0
"""An older name of `comfy.weights`. Scripts import it. It goes with the release after this one."""

import sys

from .comfy import weights

sys.modules[__name__] = weights
