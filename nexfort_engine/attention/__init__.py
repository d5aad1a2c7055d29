# SPDX-License-Identifier: Apache-2.0
"""Attention by the kernel that was measured fastest on this machine."""
