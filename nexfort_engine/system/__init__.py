# SPDX-License-Identifier: Apache-2.0
"""The process and the machine: settings for a scope, torch's modes, compilers that are processes, the driver, memory.

Nothing here knows a network, a graph or an artefact.
"""
