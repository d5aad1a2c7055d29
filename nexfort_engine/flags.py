# SPDX-License-Identifier: Apache-2.0
"""An older name of `system.process_settings`. Scripts import it. It goes with the release after this one."""

import sys

from .system import process_settings

sys.modules[__name__] = process_settings
