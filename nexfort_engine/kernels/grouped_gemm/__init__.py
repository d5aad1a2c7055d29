# SPDX-License-Identifier: Apache-2.0
"""Layers with one input, computed as one product."""
