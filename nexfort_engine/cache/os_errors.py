# SPDX-License-Identifier: Apache-2.0
"""What the system refused while compiled code was made or loaded: room, inodes, descriptors, rights, a name so long.

Compilers say it in ways of their own, or go on and end with an assertion that says nothing. Here the reason is found,
so that it can be told in plain words, and so that nothing is held against an artefact that is sound.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from .fs import remove_tree, write_new
from .owner import name_of_own

CODES = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EROFS, errno.ENAMETOOLONG, errno.EFBIG),
    *(errno.EACCES, errno.EPERM, errno.EIO, errno.EMLINK, errno.EAGAIN),
)
_OF_ONE_FILE = (errno.EACCES, errno.EPERM)  # of which it helps to know which
_TRIED = 1 << 16  # bytes


def refusal(error: BaseException | None, noted: Sequence[OSError], place: Path) -> OSError | None:
    """What the system refused, of which an error may be the outcome; None if there was nothing.

    noted: errors that a compiler told its log alone. place: where it wrote.
    """
    chain = list(_chain(error))
    for found in (*noted, *chain):
        if is_refusal(found):
            assert isinstance(found, OSError) and found.errno is not None
            return _plain(found.errno, found.filename if found.errno in _OF_ONE_FILE else None)
    for code in CODES:
        if any(os.strerror(code) in str(found) for found in chain):
            return _plain(code)
    return tried(place) if chain else None


def is_refusal(error: BaseException) -> bool:
    """Whether an error says by itself that the system refused something."""
    return isinstance(error, OSError) and error.errno in CODES


def tried(place: Path) -> OSError | None:
    """What the system refuses at a place now: a directory, and a file of some size in it."""
    folder = place if os.path.isdir(place) else place.parent
    made = folder / name_of_own("probe-")
    try:
        made.mkdir(mode=0o700)
        write_new(made / "content", bytes(_TRIED), durable=False)
    except OSError as error:
        return _plain(error.errno) if error.errno in CODES else None
    finally:
        remove_tree(made)
    return None


def _plain(code: int, file: object = None) -> OSError:
    return OSError(code, os.strerror(code), *([str(file)] if file is not None else []))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that it came from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
