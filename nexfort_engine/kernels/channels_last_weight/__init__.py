# SPDX-License-Identifier: Apache-2.0
"""A convolution's weight, laid out as its kernel reads it."""
