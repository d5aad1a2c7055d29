# SPDX-License-Identifier: Apache-2.0
"""Attention in 8 bits."""
