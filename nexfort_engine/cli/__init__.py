# SPDX-License-Identifier: Apache-2.0
"""The command line. No other package imports it."""
