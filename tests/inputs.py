# SPDX-License-Identifier: Apache-2.0
"""For scripts outside that have this folder on their path: the module of this name in support/."""

import outside_scripts

outside_scripts.take(__name__)
