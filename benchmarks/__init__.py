# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: numbers with GPU, model, size, steps, baseline, torch and date. Nothing here is imported by the engine."""
