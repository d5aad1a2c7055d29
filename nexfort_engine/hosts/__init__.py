# SPDX-License-Identifier: Apache-2.0
"""Hosts: the only files that import ComfyUI or diffusers. Each translates its host's objects into engine calls."""
