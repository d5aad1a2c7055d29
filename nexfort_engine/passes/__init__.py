# SPDX-License-Identifier: Apache-2.0
"""A graph becomes a better graph that computes the same."""
