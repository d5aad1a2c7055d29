# SPDX-License-Identifier: Apache-2.0
"""What is made of a prompt is made once for it, in graphs as a GPU has them."""

from __future__ import annotations

import pytest
from test_invariant_cache import ALL, Steps

from nexfort_engine.cache.store import Store

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("store"))


def test_a_step_is_that_of_its_prompt_whatever_changes(store: Store) -> None:
    steps = Steps(store, device="cuda")
    for number, prompt in enumerate((1, 1, 1, 2, 2, 1, 3, 3, 1, 1)):
        for tokens in (6, 9):
            steps(prompt, tokens=tokens)
        if number in (4, 7):
            steps.root.blocks[1].k.weight.data.mul_(1.5)  # type: ignore[union-attr,index]
            steps.host.said = number
        if number == 6:
            assert steps.engine.release()
    assert steps.kept() == [ALL, ALL] and not steps.notes()


def test_it_takes_turns_with_calls_of_other_kinds(store: Store) -> None:
    steps = Steps(store, device="cuda")
    for prompt in (1, 2, 1, 1, 2, 2, 1):
        for text in (20, 33):
            steps(prompt, text=text)
            steps(prompt, text=text, named=False)
    assert sorted(steps.kept()) == [0, 0, ALL, ALL]
