# SPDX-License-Identifier: Apache-2.0
"""fp8 and int8: which products are computed in them, the layers that keep their weights in them, and the arithmetic.

`precision` is for a mode (low-precision, O3): weights stay whole, and a graph brings both factors to fp8 on each call.
`plan` and `linear` are for a network whose weights are packed ahead, once. Both compute with `products`.
"""
