# SPDX-License-Identifier: Apache-2.0
"""Artefacts found or made: the plan of a network's calls, the lookup, the jobs, on which devices all that works."""
