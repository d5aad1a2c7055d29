# SPDX-License-Identifier: Apache-2.0
"""A block becomes a graph: the export, what it took for granted, and what its code reached."""
