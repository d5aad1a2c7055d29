# SPDX-License-Identifier: Apache-2.0
"""diffusers: its pipelines compiled, and their weights quantised."""
