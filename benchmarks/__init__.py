# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: numbers with GPU, model, size, steps, baseline, torch and date. The engine imports nothing of it."""
