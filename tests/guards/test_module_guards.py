# SPDX-License-Identifier: Apache-2.0
"""What a block is besides its weights: a change that its code could notice is noticed, and nothing is left changed."""

from __future__ import annotations

import collections
import enum
import functools
import json
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from attribute_blocks import Block, Inner  # noqa: E402
from torch import nn  # noqa: E402

from nexfort_engine.capture.shadow_module import Shadow  # noqa: E402
from nexfort_engine.guards.module_guards import ModuleState, describe, matches_text, rows_of  # noqa: E402
from nexfort_engine.guards.name_resolver import content_of  # noqa: E402
from nexfort_engine.guards.option_recorder import Refused  # noqa: E402
from nexfort_engine.modules.tree import foreign, mark_shim  # noqa: E402


def state_of(block: nn.Module) -> tuple[ModuleState, list[list[Any]]]:
    """The state a capture of one call leaves, and its rows as they are stored."""
    shadow = Shadow(block)
    shadow.module(torch.ones(2, 4))
    rows = json.loads(json.dumps(rows_of(shadow.reads)))
    return ModuleState(block, rows), rows


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, collections.defaultdict])
def test_the_content_of_a_mapping_has_its_order(kind: type[dict[str, int]]) -> None:
    """An ordered dict has one of its own, beside that of its table."""
    first, second = kind(), kind()
    for key in "ab":
        first[key] = 1
    for key in "ba":
        second[key] = 1
    if isinstance(first, collections.OrderedDict):
        first.move_to_end("a")
        assert content_of(first) == ("b", "a", 1, 1)
        first.move_to_end("a", last=False)
    assert content_of(first) == ("a", "b", 1, 1) != content_of(second)


# ---- what others hung on a block ---------------------------------------------------------------------------


def test_a_stand_in_of_the_engine_is_not_foreign() -> None:
    block = Block()

    def stand_in(x: torch.Tensor) -> torch.Tensor:
        return x

    mark_shim(stand_in, block.inner)
    state, _ = state_of(block)
    block.inner.__dict__["forward"] = stand_in
    assert foreign(block) is None and state.unchanged()


def test_a_forward_that_was_put_back_is_not_foreign() -> None:
    block = Block()
    state, _ = state_of(block)
    original = block.inner.forward
    block.inner.forward = lambda x: original(x) * 2  # type: ignore[method-assign]
    assert "replaced forward on inner" in str(foreign(block)) and not state.unchanged()
    block.inner.forward = original  # type: ignore[method-assign]  # as code does that never heard of `del`
    assert "forward" in vars(block.inner) and foreign(block) is None and state.unchanged()
    block.inner.forward = Block().inner.forward  # type: ignore[method-assign]  # somebody else's weights
    assert foreign(block) is not None and not state.unchanged()


# ---- recording ------------------------------------------------------------------------------------------------


def test_what_is_read_is_recorded_and_nothing_else() -> None:
    _, rows = state_of(Block())
    read = {(path, name) for path, name, _ in rows}
    assert {("", "scales"), ("", "settings"), ("", "config"), ("", "act"), ("", "optional"), ("", "_power")} <= read
    assert ("inner", "eps") in read
    assert not read & {("", "unused"), ("inner", "layer"), ("", "forward"), ("inner", "linear"), ("inner", "table")}


# ---- changes ----------------------------------------------------------------------------------------------------


class Other(nn.Linear):
    """A linear layer of another class."""


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a number": lambda b: setattr(b.inner, "eps", 1.0),
    "none becomes a value": lambda b: setattr(b, "optional", 2.0),
    "a function": lambda b: setattr(b, "act", nn.functional.relu),
    "what a property reads": lambda b: setattr(b, "_power", 3.0),
    "an item of a list": lambda b: b.scales.__setitem__(0, 2.0),
    "an item of a list in a list": lambda b: b.scales[1].__setitem__(0, 3.0),
    "an item of a dict": lambda b: b.settings.__setitem__("gain", 2.0),
    "an item of a dict in a dict": lambda b: b.settings["deep"].__setitem__("more", 2.0),
    "a field of an object": lambda b: setattr(b.config, "shift", 2.0),
    "a list in an object": lambda b: b.config.nested.append(2.0) or b.config.nested.__setitem__(0, 5.0),
    "a field of an object in an object": lambda b: setattr(b.config.inner, "value", 2.0),
    "the object": lambda b: setattr(b, "config", SimpleNamespace(**{**vars(b.config), "shift": 9.0})),
    "an attribute that goes": lambda b: delattr(b, "optional"),
    "a submodule": lambda b: setattr(b.inner, "linear", Other(4, 4)),
    "a hook": lambda b: b.inner.register_forward_hook(lambda *_: None),
    "a forward": lambda b: setattr(b.inner, "forward", lambda x: x),
    "a mode": lambda b: b.train(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_that_code_could_notice_is_noticed(change: Callable[[Any], Any]) -> None:
    block = Block()
    block.inner.drop = nn.Dropout()  # reads `training`
    block.eval()
    block.inner.forward = functools.partial(_with_dropout, block.inner)
    shadow = Shadow(block)
    shadow.module(torch.ones(2, 4))
    del block.inner.forward
    state = ModuleState(block, rows_of(shadow.reads))
    assert state.unchanged()
    change(block)
    assert not state.unchanged()


def _with_dropout(inner: Any, x: torch.Tensor) -> torch.Tensor:
    return inner.drop(Inner.forward(inner, x))


def test_what_code_does_not_read_may_change() -> None:
    block = Block()
    state, rows = state_of(block)
    block.unused, block.inner.layer, block.new = "changed", 8, 1
    block.inner.linear.weight.data.zero_()
    block.inner.linear.weight = nn.Parameter(torch.ones(4, 4))
    assert state.unchanged() and matches_text(block, rows)


@pytest.mark.parametrize(
    "change",
    [change for name, change in CHANGES.items() if name not in ("a submodule", "a hook", "a forward", "a mode")],
    ids=[name for name in CHANGES if name not in ("a submodule", "a hook", "a forward", "a mode")],
)
def test_another_process_would_notice_it_too(change: Callable[[Any], Any]) -> None:
    _, rows = state_of(Block())
    other = Block()
    assert matches_text(other, rows)
    change(other)
    assert not matches_text(other, rows)


def test_a_change_of_a_class_is_noticed() -> None:
    class Kind(nn.Module):
        scale, functions = 2.0, []  # type: ignore[var-annotated]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale + len(self.functions)

    def state() -> ModuleState:
        shadow = Shadow(Kind())
        shadow.module(torch.ones(1))
        return ModuleState(Kind(), rows_of(shadow.reads))

    before = state()
    assert before.unchanged()
    Kind.functions.append(1)
    assert not before.unchanged() and (before := state()).unchanged()
    Kind.scale = 3.0
    assert not before.unchanged()


def test_what_is_hidden_answers_in_the_place_of_the_block_s_own() -> None:
    block = Block()
    hidden = {id(block.inner): {"layer": 8}}
    shadow = Shadow(block, hidden=hidden)
    assert shadow.module.inner.layer == 8 and block.inner.layer != 8
    rows = rows_of(shadow.reads)
    assert ["inner", "layer", 8] in rows
    assert matches_text(block, rows, hidden) and not matches_text(block, rows)
    state = ModuleState(block, rows, hidden)
    block.inner.layer = 9
    assert state.unchanged() and matches_text(block, rows, hidden)


# ---- values as text ---------------------------------------------------------------------------------------------


class Colour(enum.Enum):
    """An enum."""

    RED = 1
    BLUE = 2


def adds(amount: float) -> Callable[[float], float]:
    return lambda x: x + amount


DIFFERENT: list[tuple[Any, Any]] = [
    (range(3), range(4)),
    (range(0, 4, 2), range(0, 4)),
    (range(2), (0, 1)),
    (1, 1.0),
    (1, True),
    (0.1, 0.1 + 1e-17 + 2e-17),
    (0.0, -0.0),
    ("1", 1),
    ((1, 2), [1, 2]),
    ({"a": 1, "b": 2}, {"a": 1, "b": 3}),
    ({1, 2}, {1, 3}),
    (torch.float16, torch.bfloat16),
    (nn.Linear, nn.Conv2d),
    (nn.functional.gelu, nn.functional.relu),
    (functools.partial(max, 1), functools.partial(max, 2)),
    (adds(1.0), adds(2.0)),
    (Colour.RED, Colour.BLUE),
    (SimpleNamespace(a=1), SimpleNamespace(a=2)),
    (torch.Size([1]), (1,)),
    (None, False),
]


@pytest.mark.parametrize(("one", "other"), [pair for pair in DIFFERENT if pair[0] != 0.1])
def test_values_that_code_can_tell_apart_have_different_texts(one: Any, other: Any) -> None:
    def text(value: Any) -> str:
        return json.dumps(describe(value))

    assert text(one) == text(one) and text(one) != text(other)
    assert "0x7" not in text(one), "no address"


def test_a_set_is_told_in_one_order() -> None:
    assert describe({"b", "a", "c"}) == describe({"c", "b", "a"}) and describe(frozenset("ab")) == describe(set("ba"))


T = torch.ones(2)


@pytest.mark.parametrize(
    "value",
    [threading.Lock(), iter([]), T, [T], {"x": T}, SimpleNamespace(x=T)],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_compared_is_refused_and_named(value: Any) -> None:
    class Reads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if self.thing is None else x + 1

    block = Reads()
    object.__setattr__(block, "thing", value)
    if isinstance(value, torch.Tensor):
        with pytest.raises(Refused):
            describe(value)
        return
    shadow = Shadow(block)
    shadow.module(torch.ones(1))
    with pytest.raises(Refused, match="attribute thing"):
        rows_of(shadow.reads)


def test_an_object_that_holds_itself_comes_to_an_end() -> None:
    loop = SimpleNamespace()
    loop.itself = loop
    with pytest.raises(Refused, match="too deeply"):
        describe(loop)
