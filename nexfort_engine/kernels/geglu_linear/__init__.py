# SPDX-License-Identifier: Apache-2.0
"""A layer whose result is gated: two products and an activation in one kernel."""
