# SPDX-License-Identifier: Apache-2.0
"""Imported in a worker by a job that lists it among its modules: the worker waits for a process for ever."""

import subprocess

subprocess.run(["sleep", "600"], check=False)
