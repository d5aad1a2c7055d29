# SPDX-License-Identifier: Apache-2.0
"""An older name of `torch_backend`. Installed entry points of `torch.compile` name it."""

import sys

from . import torch_backend

sys.modules[__name__] = torch_backend
