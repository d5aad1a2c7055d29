# SPDX-License-Identifier: Apache-2.0
"""Linear layers of factors in 8 bits with scales, and what is behind them, in one launch."""
