# SPDX-License-Identifier: Apache-2.0
"""A graph becomes a payload, and a payload a callable.

Here are Inductor, the workers that run it, and how graphs are divided for it.
"""
