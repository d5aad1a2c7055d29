# SPDX-License-Identifier: Apache-2.0
"""The compile cache: keys (`key`), artefacts on disk (`store`, `entry`), and their readable table (`index`).

It knows nothing of graphs or of hosts and never loads an artefact.
"""
