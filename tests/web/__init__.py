# SPDX-License-Identifier: Apache-2.0
"""A package, so that its files share a server and fixtures of this scope end with the last of them."""
