# SPDX-License-Identifier: Apache-2.0
"""What the user asked for, checked: modes and options, and the config that they make."""

from .compile_config import CompileConfig

__all__ = ["CompileConfig"]
