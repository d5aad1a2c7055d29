# SPDX-License-Identifier: Apache-2.0
"""Convolutions of three by three, of an image or of one that is scaled up on the way."""
