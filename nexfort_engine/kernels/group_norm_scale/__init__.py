# SPDX-License-Identifier: Apache-2.0
"""The factors of a group norm."""
