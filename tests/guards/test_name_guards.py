# SPDX-License-Identifier: Apache-2.0
"""What a block's code reaches by name, in each form that code has for it: a change is seen, and so is the way back."""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from block_forms import OF_BLOCKS
from code_forms import HEAD, NAMES, PLAIN
from subjects import MOVES, TOLERANCE, graphs_as_they_are
from torch import nn

import nexfort_engine
from nexfort_engine.capture.reached_names import rows_of
from nexfort_engine.capture.source_hashes import walked
from nexfort_engine.guards.name_guards import Dependence, Watched
from nexfort_engine.guards.name_resolver import Resolver, classes_in
from nexfort_engine.guards.value_digests import digest

FORMS = {**NAMES, **OF_BLOCKS}
NOT_COMPILED = {"the call of all modules": "the call of all modules was replaced"}
_numbers = itertools.count()


@pytest.fixture
def form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], types.ModuleType]]:
    """Makes a module of a form's code; afterwards torch has its own functions again."""
    owners = [torch, torch.nn.functional, nn.Linear, nn.Conv1d, nn.Module, torch.Tensor]
    before = [(owner, dict(vars(owner))) for owner in owners]
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("NEXFORT_TEST_FORM", raising=False)

    def make(code: str) -> types.ModuleType:
        name = f"nexfort_form_{next(_numbers)}"
        (tmp_path / f"{name}.py").write_text(HEAD + textwrap.dedent(code))
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield make
    for owner, names in before:
        for name in set(vars(owner)) - set(names):
            delattr(owner, name)
        for name, value in names.items():
            if vars(owner).get(name) is not value:
                setattr(owner, name, value)
    monkeypatch.undo()
    for name in [name for name in sys.modules if name.startswith("nexfort_form_")]:
        del sys.modules[name]


def _run(module: Any) -> torch.Tensor:
    torch.manual_seed(1)
    with torch.no_grad():
        return module(torch.randn(2, 5, 8))


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def _net(module: types.ModuleType) -> Any:
    torch.manual_seed(0)
    return module.Net().eval().requires_grad_(False)


def _change(text: str, module: types.ModuleType, net: Any) -> None:
    import os

    names = {"m": module, "net": net, "F": torch.nn.functional, "torch": torch, "nn": nn, "os": os}
    exec(text, {**names, "types": types, "functools": functools})  # noqa: S102  # the change is a statement of the form


@pytest.mark.parametrize("name", FORMS)
def test_a_change_is_seen_in_each_form_and_what_stays_needs_nothing_new(
    name: str, form: Callable[[str], types.ModuleType]
) -> None:
    code, change = FORMS[name]
    module = form(code)
    net = _net(module)
    with graphs_as_they_are():
        compiled = nexfort_engine.compile(net)
        before = _run(net)
        assert _distance(_run(compiled), before) < TOLERANCE
        told = compiled.report.as_dict()
        assert told["artefacts_compiled"] > 0 and not told["eager"]
        mark = compiled.report.mark()
        again = nexfort_engine.compile(net)
        assert _distance(_run(again), before) < TOLERANCE
        assert again.report.as_dict()["artefacts_compiled"] == 0, "what stays needs nothing new"
        _run(compiled)
        assert not compiled.report.since(mark)["artefacts"]
        _change(change, module, net)
        changed = _run(net)
        assert _distance(changed, before) > MOVES, "the change does not matter"
        assert _distance(_run(compiled), changed) < TOLERANCE
        reasons = [row["reason"] for row in compiled.report.as_dict()["eager"]]
        assert not reasons or NOT_COMPILED.get(name, "it could have been compiled") in reasons[0]


def test_the_way_back_is_the_old_artefact(form: Callable[[str], types.ModuleType]) -> None:
    module = form("def helper(x):\n    return x * 2\n" + PLAIN.format("helper(self.l(x))"))
    with graphs_as_they_are():
        net, own = _net(module), module.helper
        compiled = nexfort_engine.compile(net)
        _run(compiled)
        for function in (lambda t: t * 5, own, lambda t: t * 5, own):  # the same code twice: a function made anew
            module.helper = function
            assert _distance(_run(compiled), _run(net)) < TOLERANCE
        told = compiled.report.as_dict()
        assert len(told["variants"]) == 1 and "helper" in told["variants"][0]["reason"]


def test_a_function_made_anew_for_each_step_costs_one_artefact(form: Callable[[str], types.ModuleType]) -> None:
    module = form(
        "def make(by):\n    return lambda x: x * by\nhelper = make(2.0)\n" + PLAIN.format("helper(self.l(x))")
    )
    with graphs_as_they_are():
        net = _net(module)
        compiled = nexfort_engine.compile(net)
        for _ in range(20):
            module.helper = module.make(2.0)
            assert _distance(_run(compiled), _run(net)) < TOLERANCE
        assert not compiled.report.as_dict()["variants"]
        assert len(compiled._nexfort_engine.state.known.watched) < 400, "functions that are gone are still watched"


def test_what_keeps_changing_ends_eager_and_goes_on_where_it_was(form: Callable[[str], types.ModuleType]) -> None:
    module = form("SCALE = 2.0\n" + PLAIN.format("self.l(x) * SCALE"))
    with graphs_as_they_are():
        net = _net(module)
        compiled = nexfort_engine.compile(net)
        for number in range(12):
            module.SCALE = 2.0 + number
            assert _distance(_run(compiled), _run(net)) < TOLERANCE
        told = compiled.report.as_dict()
        assert "keeps changing" in told["eager"][0]["reason"] and "SCALE" in told["eager"][0]["reason"]
        assert sum(row["region"] == "blocks.0" for row in told["artefacts"]) == 8
        module.SCALE = 3.0
        mark = compiled.report.mark()
        assert _distance(_run(compiled), _run(net)) < TOLERANCE
        assert not compiled.report.since(mark)["eager"], "it has an artefact for this value"


def test_a_cache_of_the_code_s_own_is_no_dependence(form: Callable[[str], types.ModuleType]) -> None:
    code = """
    CACHE = {}
    CALLS = []
    def table(n):
        if n not in CACHE:
            CACHE[n] = len(n) * 0.5
        CALLS.append(n)
        return CACHE[n]
    class Block(Base):
        def forward(self, x):
            return x + self.l(x) * table('four')
    """
    module = form(code)
    with graphs_as_they_are():
        net = _net(module)
        compiled = nexfort_engine.compile(net)
        _run(compiled)
        module.CACHE.clear()
        module.CALLS.clear()
        assert _distance(_run(compiled), _run(net)) < TOLERANCE
        assert not compiled.report.as_dict()["variants"] and not compiled.report.as_dict()["eager"]


def test_a_global_that_the_network_sets_between_its_blocks_is_followed(form: Callable[[str], types.ModuleType]) -> None:
    code = """
    SCALE = 1.0
    class Block(Base):
        def forward(self, x):
            return x + self.l(x) * SCALE
    class Network(Net):
        def forward(self, x):
            global SCALE
            for number, block in enumerate(self.blocks):
                SCALE = 2.0 + 3 * number
                x = block(x)
            return self.out(x)
    """
    module = form(code)
    with graphs_as_they_are():
        torch.manual_seed(0)
        net = module.Network().eval().requires_grad_(False)
        compiled = nexfort_engine.compile(net)
        for _ in range(3):
            assert _distance(_run(compiled), _run(net)) < TOLERANCE


def test_a_call_that_looks_like_a_container_s_hides_nothing(form: Callable[[str], types.ModuleType]) -> None:
    module = form(PLAIN.format("torch.add(torch.tanh(self.l(x)), 1)"))
    with graphs_as_they_are():
        net = _net(module)
        compiled = nexfort_engine.compile(net)
        _run(compiled)
        torch.tanh = lambda t: t * 3
        assert _distance(_run(compiled), _run(net)) < TOLERANCE


def test_a_branch_that_is_not_taken_imports_nothing(form: Callable[[str], types.ModuleType], tmp_path: Path) -> None:
    (tmp_path / "nexfort_form_untaken.py").write_text("raise RuntimeError('imported')")
    code = """
    ON = False
    class Block(Base):
        def forward(self, x):
            if ON:
                from nexfort_form_untaken import thing
                return thing(x)
            return x + self.l(x)
    """
    module = form(code)
    with graphs_as_they_are():
        net = _net(module)
        compiled = nexfort_engine.compile(net)
        assert _distance(_run(compiled), _run(net)) < TOLERANCE
        assert not compiled.report.as_dict()["eager"] and "nexfort_form_untaken" not in sys.modules


def test_a_function_that_is_called_in_another_case_is_no_dependence(form: Callable[[str], types.ModuleType]) -> None:
    code = """
    TWICE = False
    def twice(x):
        return x * 2
    class Block(Base):
        def forward(self, x):
            y = self.l(x)
            return x + (twice(y) if TWICE else y)
    """
    module = form(code)
    with graphs_as_they_are():
        net = _net(module)
        compiled = nexfort_engine.compile(net)
        _run(compiled)
        module.twice = lambda t: t * 5
        assert _distance(_run(compiled), _run(net)) < TOLERANCE
        assert not compiled.report.as_dict()["variants"]
        module.TWICE = True
        assert _distance(_run(compiled), _run(net)) < TOLERANCE


def test_code_that_counts_runs_eager(form: Callable[[str], types.ModuleType]) -> None:
    code = """
    COUNT = 0
    class Block(Base):
        def forward(self, x):
            global COUNT
            COUNT += 1
            return x + self.l(x) * COUNT
    """
    module = form(code)
    with graphs_as_they_are():
        net = _net(module)
        compiled = nexfort_engine.compile(net)
        module.COUNT = 0
        _run(compiled)
        module.COUNT = 0
        wanted = _run(net)
        module.COUNT = 0
        assert _distance(_run(compiled), wanted) < TOLERANCE
        assert {"blocks.0", "blocks.1"} <= {row["region"] for row in compiled.report.as_dict()["eager"]}
        assert "it counts in" in compiled.report.as_dict()["eager"][0]["reason"]


BAD = {
    "no function": ("m.helper = 5", TypeError),
    "nothing": ("del m.helper", NameError),
    "a function that raises": ("m.helper = lambda t: t.nothing_of_the_kind", AttributeError),
    "an object whose attributes raise": (
        "m.helper = type('Odd', (), {'__getattr__': lambda s, n: 1 / 0, '__call__': lambda s, t: t * 5})()",
        None,
    ),
    "an object that cannot be compared": (
        "m.helper = type('Odd', (), {'__eq__': lambda s, o: 1 / 0, "
        "'__hash__': None, '__call__': lambda s, t: t * 5})()",
        None,
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_put_in_a_function_s_place_fails_as_in_eager(
    name: str, form: Callable[[str], types.ModuleType]
) -> None:
    change, error = BAD[name]
    module = form("def helper(x):\n    return x * 2\n" + PLAIN.format("helper(self.l(x))"))
    with graphs_as_they_are():
        net, own = _net(module), module.helper
        compiled = nexfort_engine.compile(net)
        _run(compiled)
        _change(change, module, net)
        if error is None:
            assert _distance(_run(compiled), _run(net)) < TOLERANCE
        else:
            for one in (net, compiled):
                with pytest.raises(error):
                    _run(one)
        module.helper = own
        mark = compiled.report.mark()
        assert _distance(_run(compiled), _run(net)) < TOLERANCE
        assert not compiled.report.since(mark)["eager"], "it has an artefact for this function"


def test_an_emptied_registry_fails_as_in_eager(form: Callable[[str], types.ModuleType]) -> None:
    module = form("STEPS = {'a': lambda x: x * 2}\n" + PLAIN.format("STEPS['a'](self.l(x))"))
    with graphs_as_they_are():
        net = _net(module)
        compiled = nexfort_engine.compile(net)
        _run(compiled)
        step = module.STEPS.pop("a")
        for one in (net, compiled):
            with pytest.raises(KeyError):
                _run(one)
        module.STEPS["a"] = step
        assert _distance(_run(compiled), _run(net)) < TOLERANCE


def test_a_module_loaded_anew_is_another_one(form: Callable[[str], types.ModuleType]) -> None:
    """The block's code goes on with the functions of the old one, whatever is put into the new one."""
    module = form("def helper(x):\n    return x * 2\n" + PLAIN.format("helper(self.l(x))"))
    with graphs_as_they_are():
        net = _net(module)
        compiled = nexfort_engine.compile(net)
        before = _run(compiled)
        del sys.modules[module.__name__]
        new = importlib.import_module(module.__name__)
        new.helper = lambda t: t * 5
        assert torch.equal(_run(compiled), before) and not compiled.report.as_dict()["variants"]
        module.helper = lambda t: t * 7
        assert _distance(_run(compiled), _run(net)) < TOLERANCE
        assert _distance(_run(net), before) > MOVES


# ---- the parts -------------------------------------------------------------------------------------------------------


def test_a_replaced_name_is_found_by_one_comparison(form: Callable[[str], types.ModuleType]) -> None:
    module = form("def helper(x):\n    return x * 2\n" + PLAIN.format("helper(self.l(x))"))
    net = _net(module)
    with walked() as codes:
        _run(net.blocks[0])
    rows, only_here = rows_of(net.blocks[0], codes, {})
    assert only_here == ""
    watched = Watched()
    names = Dependence(rows, classes_in(net.blocks[0]), watched)
    watched.look()
    assert names.holds()
    epoch = watched.epoch
    watched.look()
    assert watched.epoch == epoch and names.holds()
    module.helper, own = (lambda t: t * 5), module.helper
    watched.look()
    assert watched.epoch != epoch and not names.holds() and str(names.differs).endswith(".helper")
    module.helper = own
    watched.look()
    assert names.holds()


def test_what_only_this_process_can_compare_is_said(form: Callable[[str], types.ModuleType]) -> None:
    module = form("TABLE = torch.zeros(1 << 17)\n" + PLAIN.format("self.l(x) * (TABLE.numel() - (1 << 17) + 1)"))
    net = _net(module)
    with walked() as codes:
        _run(net.blocks[0])
    assert rows_of(net.blocks[0], codes)[1].endswith(".TABLE.numel")


def test_digests_tell_functions_by_what_they_do() -> None:
    def made(by: float, default: int = 1) -> Any:
        return lambda x, y=default: x * by + y

    assert digest(made(2.0)) == digest(made(2.0))
    assert digest(made(2.0)) != digest(made(3.0)), "cells"
    assert digest(made(2.0)) != digest(made(2.0, 2)), "defaults"
    assert digest(lambda x: x + 1) != digest(lambda x: x + 2), "code"

    def recursive(n: int) -> int:
        return recursive(n - 1) if n else 0

    assert digest(recursive) == digest(recursive)
    assert digest(torch.relu)[1] and digest(torch.relu) != digest(torch.tanh)
    assert digest(functools.partial(torch.add, 1)) != digest(functools.partial(torch.add, 2))
    assert digest(functools.wraps(torch.relu)(lambda x: x)) != digest(functools.wraps(torch.relu)(lambda x: x * 2))


def test_an_address_that_leads_nowhere_is_missing() -> None:
    resolver = Resolver([nn.Linear])
    from nexfort_engine.guards.option_recorder import MISSING

    assert resolver.ends(("no.such.module", (("global", "x"),))) == [MISSING]
    assert resolver.ends(("", (("import", "no_such_module"), ("attr", "x")))) == [MISSING]


def test_an_attribute_that_a_weight_has_is_not_lost(form: Callable[[str], types.ModuleType]) -> None:
    module = form(PLAIN.format("self.l(x) * getattr(self.l.weight, 'gain', 1.0)"))
    with graphs_as_they_are():
        net = _net(module)
        for block in net.blocks:
            block.l.weight.gain = 2.0
        compiled = nexfort_engine.compile(net)
        assert _distance(_run(compiled), _run(net)) < TOLERANCE
        assert "attribute gain" in compiled.report.as_dict()["eager"][0]["reason"]


@pytest.mark.parametrize(
    "change", ["type(self).seen.append(x.shape)", "type(self).seen[:] = [1]", "Block.seen.append(1)"]
)
def test_what_code_keeps_on_its_class_is_no_dependence(change: str, form: Callable[[str], types.ModuleType]) -> None:
    code = f"class Block(Base):\n    seen = []\n    def forward(self, x):\n        {change}\n"
    code += "        return x + self.l(x)\n"
    module = form(code)
    with graphs_as_they_are():
        net = _net(module)
        compiled = nexfort_engine.compile(net)
        for number in range(3):
            module.Block.seen.append(number)
            assert _distance(_run(compiled), _run(net)) < TOLERANCE
        assert not compiled.report.as_dict()["variants"] and not compiled.report.as_dict()["eager"]
