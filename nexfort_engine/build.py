# SPDX-License-Identifier: Apache-2.0
"""An older name of `compilation.builder`. Scripts import it. It goes with the release after this one."""

import sys

from .compilation import builder

sys.modules[__name__] = builder
