# SPDX-License-Identifier: Apache-2.0
"""Where weights are and how one gets at them: leased from the host, moved away, kept prepared, unwrapped."""
