# SPDX-License-Identifier: Apache-2.0
"""Which is at fault where something failed: the artefact, or the call, which eager code refuses as well.

A call that the block's own forward raises at says nothing of other calls. Its error is the caller's, and nothing that
was made, refused or latched for it stays. An argument or an attribute whose own code raises when the engine looks at it
is eager code's matter alone.
"""

from __future__ import annotations

import torch

UNSEEN = "what it is called with, or holds, cannot be looked at: {}"


class HalfDone(Exception):
    """An artefact failed, and may have written to what it was given: the step has to begin anew. The text is why."""


def is_passed_on(error: BaseException, stops: tuple[type[BaseException], ...]) -> bool:
    """Whether an error is for the host: one of its own stops, or what it has remedies for."""
    return isinstance(error, (torch.OutOfMemoryError, *stops))
