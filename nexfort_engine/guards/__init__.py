# SPDX-License-Identifier: Apache-2.0
"""What a call has to satisfy for an artefact to stand for it: options, attributes, names and sizes."""
