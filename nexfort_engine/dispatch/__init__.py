# SPDX-License-Identifier: Apache-2.0
"""A region's call is answered by an artefact or by the block's own forward."""
