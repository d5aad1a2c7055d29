# SPDX-License-Identifier: Apache-2.0
"""Rows in int8 with a scale each, rotated, behind the norm or activation before them."""
