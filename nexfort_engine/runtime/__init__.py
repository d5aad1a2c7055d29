# SPDX-License-Identifier: Apache-2.0
"""What runs in this process: an artefact bound to a block, the state of one call, whose fault a failure is."""
