# SPDX-License-Identifier: Apache-2.0
"""The main job once, on this machine: `make demo`, or `python -m demo` where the requirements are installed."""
