# SPDX-License-Identifier: Apache-2.0
"""What the user is told: the report, the progress, and what a machine had too little of."""
