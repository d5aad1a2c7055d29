# SPDX-License-Identifier: Apache-2.0
"""What the system refused is found behind whatever a compiler made of it; what is no refusal stays what it is."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from refusing import CODES, refused

from nexfort_engine.cache.os_errors import refusal


def _raised(work: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as caught:
        work()
    return caught.value


def _as_cause(code: int) -> BaseException:
    def work() -> None:
        try:
            raise OSError(code, os.strerror(code), "/somewhere/0123")
        except OSError as error:
            raise RuntimeError("lowering") from error

    return _raised(work)


def _while_handled(code: int) -> BaseException:
    def work() -> None:
        try:
            raise OSError(code, os.strerror(code))
        except OSError:
            raise AssertionError  # noqa: B904

    return _raised(work)


def _as_text(code: int) -> BaseException:
    return RuntimeError(f"g++ failed\n  fatal error: error writing to /tmp/x.s: {os.strerror(code)}\ncompilation ended")


@pytest.mark.parametrize("code", CODES, ids=lambda code: errno.errorcode[code])
@pytest.mark.parametrize("made", [_as_cause, _while_handled, _as_text], ids=["cause", "context", "text"])
def test_a_refusal_is_found_behind_another_error(
    tmp_path: Path, made: Callable[[int], BaseException], code: int
) -> None:
    found = refusal(made(code), (), tmp_path)
    assert found is not None and (found.errno, found.strerror) == (code, os.strerror(code))


def test_what_a_compiler_told_its_log_alone_counts(tmp_path: Path) -> None:
    noted = [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/somewhere")]
    for error in (None, AssertionError(), ValueError("nothing was stored")):
        found = refusal(error, noted, tmp_path)
        assert found is not None and found.errno == errno.ENOSPC and found.filename is None, (
            "it reads the same each time"
        )


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_an_error_without_a_word_is_asked_of_the_disk(tmp_path: Path, number: int) -> None:
    assert refusal(AssertionError(), (), tmp_path) is None
    with refused(number, errno.ENOSPC, (tmp_path,)) as asked:
        found = refusal(AssertionError(), (), tmp_path / "not made yet")
    assert (found is not None) is (len(asked) >= number) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [ValueError("an operator"), FileNotFoundError(errno.ENOENT, "x"), KeyError("y")])
def test_what_is_no_refusal_stays_what_it_is(tmp_path: Path, error: Exception) -> None:
    assert refusal(error, (), tmp_path) is None and refusal(None, (), tmp_path) is None
    assert not list(tmp_path.iterdir())
