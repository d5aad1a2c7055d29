# SPDX-License-Identifier: Apache-2.0
"""Facts about FX graphs, and tools to write them.

A file here imports torch alone, takes a graph or a node, and decides nothing.
"""
