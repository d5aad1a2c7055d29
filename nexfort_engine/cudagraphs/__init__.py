# SPDX-License-Identifier: Apache-2.0
"""Whole steps replayed as CUDA graphs: what one is captured of, fed with, and compared with before it is replayed."""
