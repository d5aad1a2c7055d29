# SPDX-License-Identifier: Apache-2.0
"""A convolution of a video that lies with channels innermost."""
