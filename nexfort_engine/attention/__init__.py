# SPDX-License-Identifier: Apache-2.0
"""Attention by a kernel of a library, chosen at each call."""
