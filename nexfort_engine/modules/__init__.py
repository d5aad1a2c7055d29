# SPDX-License-Identifier: Apache-2.0
"""Facts about `nn.Module`s: which blocks become regions, and how images lie in memory between them."""
