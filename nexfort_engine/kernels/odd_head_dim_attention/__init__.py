# SPDX-License-Identifier: Apache-2.0
"""Attention with heads that are no power of two wide."""
