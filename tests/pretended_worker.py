# SPDX-License-Identifier: Apache-2.0
"""Imported in a worker by a job that lists it among its modules: the worker has a pretended GPU for good."""

import sys

import pytest
from pretended_gpu import pretend

from nexfort_engine.worker import FORK

if FORK not in sys.argv:
    raise RuntimeError("the worker was not forked: it started anew")
pretend(pytest.MonkeyPatch())
