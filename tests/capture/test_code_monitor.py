# SPDX-License-Identifier: Apache-2.0
"""A walk is told of each function of the host that its thread runs, whenever and wherever it ran before."""

from __future__ import annotations

import gc
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nexfort_engine.capture import source_hashes
from nexfort_engine.capture.code_monitor import CodeMonitor

pytestmark = pytest.mark.skipif(sys.version_info < (3, 12), reason="Python 3.12 and newer have sys.monitoring")
HOST, OTHERS = "<host>", "<library>"
TEXT = "def {0}(*then):\n    for one in then:\n        one()\n    return [n for n in then]\n"


def made(name: str, file: str = HOST) -> Callable[..., Any]:
    """A new function, whose code is equal to that of another one of this name and file."""
    scope: dict[str, Any] = {}
    exec(compile(TEXT.format(name), file, "exec"), scope)  # noqa: S102
    return scope[name]  # type: ignore[no-any-return]


def names(codes: set[types.CodeType] | None) -> set[str]:
    assert codes is not None, "the numbers of the tools are free"
    return {code.co_name for code in codes if code.co_filename == HOST and code.co_name.islower()} - {"<module>"}


@pytest.fixture
def monitor() -> Iterator[CodeMonitor]:
    source_hashes._monitor().close()  # there are numbers for one
    monitor = CodeMonitor((OTHERS,), lambda code: code.co_filename == HOST)
    try:
        yield monitor
    finally:
        monitor.close()
        assert not [n for n in (3, 4) if sys.monitoring.get_tool(n) == "nexfort"]


def elsewhere(call: Callable[[], Any]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def test_each_walk_is_told_of_all_that_runs_in_it(monitor: CodeMonitor) -> None:
    one, two, three = map(made, ("one", "two", "three"))
    one()  # before anything is watched
    for _ in range(3):
        with monitor.walk() as codes:
            two(one, one)
        assert names(codes) == {"one", "two"}
        three()
    with monitor.walk() as codes:
        three()
    assert names(codes) == {"three"}, "which ran between two walks"


def test_functions_of_libraries_and_of_the_past_are_not_known(monitor: CodeMonitor) -> None:
    library = made("library", OTHERS)
    with monitor.walk() as codes:
        library(made("gone"))
    assert names(codes) == {"gone"}
    known = len(monitor._known)
    codes.clear()
    gc.collect()
    assert sum(ref() is not None for ref in list(monitor._known.values())) < known, "it keeps no code alive"
    with monitor.walk() as codes:
        library()
    assert not names(codes)


def test_equal_code_is_told_of_wherever_it_runs(monitor: CodeMonitor) -> None:
    first, second = made("same"), made("same")
    with monitor.walk():
        first()
    with monitor.walk() as codes:
        second()
    assert names(codes) == {"same"}
    for function in (second, first):
        with monitor.walk() as codes:
            function()
        assert names(codes) == {"same"}


def test_a_walk_in_a_walk_tells_both(monitor: CodeMonitor) -> None:
    before, inside, after = map(made, ("before", "inside", "after"))
    for _ in range(2):
        with monitor.walk() as outer:
            before()
            with monitor.walk() as inner:
                inside(before)
            after()
        assert names(inner) == {"before", "inside"} and names(outer) == {"before", "inside", "after"}


def test_other_threads_do_not_count_and_hide_nothing(monitor: CodeMonitor) -> None:
    old, new, other = map(made, ("old", "new", "other"))
    with monitor.walk():
        old()
    with monitor.walk() as codes:
        elsewhere(lambda: other(old, new))
        assert not names(codes)
        old(new)
    assert names(codes) == {"old", "new"}


def test_walks_of_two_threads_are_told_of_their_own(monitor: CodeMonitor) -> None:
    both, mine, theirs, late = map(made, ("both", "mine", "theirs", "late"))
    began, go_on = threading.Event(), threading.Event()
    found: list[set[str]] = []

    def other() -> None:
        with monitor.walk() as codes:
            both(theirs)
            began.set()
            assert go_on.wait(60)
            late()
        found.append(names(codes))

    thread = threading.Thread(target=other)
    with monitor.walk() as codes:
        mine()
        thread.start()
        assert began.wait(60)
        both(late)
    go_on.set()
    thread.join(60)
    assert names(codes) == {"both", "mine", "late"} and found == [{"both", "theirs", "late"}]
    with monitor.walk() as codes:
        both()
    assert names(codes) == {"both"}


def test_what_others_restart_changes_nothing(monitor: CodeMonitor) -> None:
    one = made("one")
    with monitor.walk() as codes:
        one()
        sys.monitoring.restart_events()
        one()
    with monitor.walk() as again:
        one()
    assert names(codes) == names(again) == {"one"}


def test_an_error_in_a_walk_ends_it(monitor: CodeMonitor) -> None:
    def fails() -> None:
        raise ZeroDivisionError

    one = made("one")
    with pytest.raises(ZeroDivisionError), monitor.walk() as codes:
        one(fails)
    assert names(codes) == {"one"}
    one()
    assert monitor._inside is None and not monitor._walks


@pytest.mark.parametrize("taken", [(4, 3), (3,), (4,)])
def test_without_two_numbers_there_is_no_walk(monitor: CodeMonitor, taken: tuple[int, ...]) -> None:
    for number in taken:
        sys.monitoring.use_tool_id(number, "a debugger")
    try:
        for _ in range(2):
            with monitor.walk() as codes:
                assert codes is None
            assert monitor._tool is None, "it keeps no number that it has no use for"
    finally:
        for number in taken:
            sys.monitoring.free_tool_id(number)
    with monitor.walk() as codes:
        made("one")()
    assert names(codes) == {"one"}, "once they are free"
