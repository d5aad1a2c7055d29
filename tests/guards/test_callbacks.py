# SPDX-License-Identifier: Apache-2.0
"""Substitutes: functions in the options that a block calls in the place of its own attention, from inside artefacts.

What every backbone and family promises of them is in contracts_changes.py and hosts/; here is what a function may do,
on a block that is lowered for real. What no artefact can follow is in test_straying_callbacks.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import called_attention
import pytest
import torch
from called_attention import TOLERANCE, Block, Net, Pair, Way, attention, turned
from torch import nn

import nexfort_engine
from nexfort_engine.guards import callbacks
from nexfort_engine.lowering import inductor
from nexfort_engine.lowering.loaded_code import FoldedCode

pytestmark = pytest.mark.usefixtures("threads", "artefact_cache")
T = torch.Tensor
pair = called_attention.pair  # a fixture
DEPTH = 16  # layers of a block, enough to be worth taking apart


# ---- what it is given and what may change --------------------------------------------------------------------------


def test_functions_sizes_and_none_at_all_cost_no_compile(pair: Pair) -> None:
    ways: list[Way | None] = [
        lambda own, *args, **kwargs: own(*args, **kwargs) * 3.0,
        lambda own, query, key, value, heads, **_: own(query, value, key, heads),
        type("Attend", (), {"__call__": lambda self, own, *args, **kwargs: own(*args, **kwargs).neg()})(),
        None,
    ]
    for way in ways:
        for length in (6, 9, 2):
            new = pair.agrees(way, length=length)
            assert not new["artefacts"] and not new["eager"], new


def test_it_is_handed_what_the_block_s_own_code_would_hand_it(pair: Pair) -> None:
    seen: list[Any] = []

    def looks(own: Way, *args: Any, **kwargs: Any) -> T:
        options, extra, copied = kwargs["options"], kwargs["extra"], kwargs["copied"]
        seen.append(
            {
                "own": own is attention,
                "others": [arg for arg in args if not isinstance(arg, T)],
                "names": sorted(kwargs),
                "mask": kwargs["mask"],
                "number": (options["block_index"], extra["block_index"]),
                "itself": options["attend"] is looks,
                "options": {key: options[key] for key in sorted(options) if key not in ("attend", "block_index")},
                "extra": {key: extra[key] for key in sorted(extra) if key != "block_index"},
                "copied": {key: copied[key] for key in sorted(copied) if key != "attend"},
            }
        )
        return own(*args, **kwargs).flip(1)

    sigmas, ids = torch.tensor([0.25]), [object()]
    for name in ("nothing", "more"):
        seen.clear()
        more = {"sigmas": sigmas, "uuids": ids, "first": 1, "flag": name == "more"}
        more |= {"cond_or_uncond": [0, 1]} if name == "more" else {}
        pair.call(turned, **more)  # where it is called from is learned first, with calls of its own
        pair.call(looks, pair.net, **more)
        wanted = list(seen)
        seen.clear()
        pair.call(looks, **more)
        assert repr(seen) == repr(wanted) and len(seen) == 2, name
        assert all(row["options"]["sigmas"] is sigmas and row["extra"]["uuids"] is ids for row in seen)


def test_what_it_writes_to_the_options_reaches_the_caller(pair: Pair) -> None:
    def counts(own: Way, *args: Any, **kwargs: Any) -> T:
        kwargs["options"]["counter"].append(kwargs["options"]["block_index"])
        return own(*args, **kwargs).flip(1)

    counter: list[int] = []
    pair.call(counts, counter=counter)
    assert counter == [0, 1]


def test_it_may_change_what_it_is_given(pair: Pair) -> None:
    def writes(own: Way, query: T, key: T, value: T, *args: Any, **kwargs: Any) -> T:
        key.mul_(2.0)
        value.add_(1.0)
        return own(query, key, value, *args, **kwargs)

    new = pair.agrees(writes)
    assert not new["artefacts"] and not new["eager"], new


def twice(make: type[nn.Module]) -> tuple[nn.Module, Any]:
    """A network of two such blocks, and its compiled self."""
    net = Net()
    net.blocks = nn.ModuleList([make() for _ in range(2)])
    net.eval().requires_grad_(False)
    return net, nexfort_engine.compile(net)


def both(net: nn.Module, compiled: Any, way: Way, **options: Any) -> str:
    """Assert that a function gives the same from either, that neither changes anything else; the reasons for eager."""
    x, prompt = torch.randn(2, 6, 16), torch.randn(2, 4, 16)
    weights = [weight.clone() for weight in net.parameters()]
    with torch.inference_mode():
        given = [x.clone(), x.clone()]
        left: list[dict[str, Any]] = [{"attend": way, **options} for _ in range(2)]
        wanted, found = (m(g, prompt, o) for m, g, o in zip((net, compiled), given, left, strict=True))
        torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)
    assert left[0] == left[1] and all(map(torch.equal, given, given[1:]))
    assert all(map(torch.equal, net.parameters(), weights))
    return "; ".join(row["reason"] for row in compiled.report.as_dict()["eager"])


def test_what_is_read_before_the_call_and_computed_after_it_is_not_changed() -> None:
    """The compiler is free to compute the gate where it is used, and to leave out a copy of a weight."""

    class Gated(Block):
        def __init__(self) -> None:
            super().__init__()
            self.null = nn.Parameter(torch.randn(1, 1, 16))

        def forward(self, x: T, prompt: T, options: dict[str, Any]) -> T:
            query, key = self.query(x), x.clone()
            gate, value = torch.sigmoid(query), self.null.clone().expand_as(x)
            return x + self.out(options["attend"](attention, query, key, value, 2)) * gate

    def writes(own: Way, query: T, key: T, value: T, *args: Any) -> T:
        return own(query.mul_(-2.0), key.mul_(3.0), value + 1.0, *args)

    net, compiled = twice(Gated)
    both(net, compiled, turned)
    assert "changes a tensor that the block may use afterwards" in both(net, compiled, writes)


def test_calls_stay_in_their_order() -> None:
    class Branches(Block):
        def forward(self, x: T, prompt: T, options: dict[str, Any]) -> T:
            wide = [torch.cat([x, x * n], -1) for n in (1.0, 2.0)]
            first = options["attend"](attention, *wide, wide[0], 2, layer=1)
            second = options["attend"](attention, x, x, x, 2, layer=2)
            return x + second + first[..., :16]

    net, compiled = twice(Branches)
    seen: list[Any] = []

    def looks(own: Way, query: T, *args: Any, layer: int) -> T:
        seen.append((query.shape[-1], layer))
        return own(query, *args) * len(seen)

    both(net, compiled, lambda own, *args, layer: own(*args))
    x, prompt = torch.randn(2, 6, 16), torch.randn(2, 4, 16)
    with torch.inference_mode():
        for module in (net, compiled):
            seen.clear()
            module(x, prompt, {"attend": looks})
            assert seen == [(32, 1), (16, 2)] * 2


def test_what_it_writes_is_there_for_its_next_call_and_for_the_block() -> None:
    class Writes(Block):
        def forward(self, x: T, prompt: T, options: dict[str, Any]) -> T:
            options["place"] = 3
            shared = {"n": 0}
            for _ in range(2):
                x = options["attend"](attention, x, x, x, 2, options=options, shared=shared)
            return x * 2.0 if options["loud"] else x

    def counts(own: Way, *args: Any, options: dict[str, Any], shared: dict[str, Any]) -> T:
        shared["n"] += 1
        options["seen"] = options.get("seen", 0) + options["place"]
        return own(*args) * (shared["n"] + options["seen"])

    def shouts(own: Way, *args: Any, options: dict[str, Any], shared: dict[str, Any]) -> T:
        options["loud"] = True
        return own(*args)

    net, compiled = twice(Writes)
    assert not both(net, compiled, counts, loud=False)
    assert "changes an option that the block looks at" in both(net, compiled, shouts, loud=False)


def test_a_block_that_asks_what_the_function_is_stays_eager() -> None:
    class Asks(Block):
        def forward(self, x: T, prompt: T, options: dict[str, Any]) -> T:
            way = options["attend"]
            return x + (way(attention, x, x, x, 2) if way == turned else x)

    net, compiled = twice(Asks)
    assert "cannot hold" in both(net, compiled, turned)
    both(net, compiled, lambda own, *args: own(*args))


class Layers(nn.Module):
    """A block of layers alike, each of which notes where it stands."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(depth)])

    def forward(self, x: T, prompt: T, options: dict[str, Any]) -> T:
        for number, layer in enumerate(self.layers):
            options["transformer_index"] = number
            x = layer(x, prompt, options)
        return x


def test_layers_of_a_block_are_one_piece_of_code_and_keep_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = []
    monkeypatch.setattr(inductor, "FoldedCode", lambda *args: pieces.append(args) or FoldedCode(*args))
    net = Net()
    net.blocks = nn.ModuleList([Layers(DEPTH) for _ in range(2)])
    net.eval().requires_grad_(False)
    compiled = nexfort_engine.compile(net)
    x, prompt, seen = torch.randn(2, 6, 16), torch.randn(2, 4, 16), []

    def looks(own: Way, *args: Any, **kwargs: Any) -> T:
        seen.append((kwargs["options"]["block_index"], kwargs["options"]["transformer_index"]))
        return own(*args, **kwargs).flip(1) * (1.0 + kwargs["copied"]["transformer_index"])

    with torch.inference_mode():
        compiled(x, prompt, {"attend": turned})
        assert pieces, "the layers were not found to be alike"
        wanted = net(x, prompt, {"attend": looks})
        seen.clear()
        torch.testing.assert_close(compiled(x, prompt, {"attend": looks}), wanted, rtol=1e-4, atol=1e-4)
    assert seen == [(block, layer) for block in range(2) for layer in range(DEPTH)]
    assert not compiled.report.as_dict()["eager"]


# ---- what is stored -------------------------------------------------------------------------------------------------

AGAIN = """
import json, sys, torch
from called_attention import Pair, turned
from nexfort_engine.capture import exporter as capture
capture.capture = None  # nothing is captured here
pair = Pair()
new = pair.agrees(turned, length=11)
print(json.dumps(pair.compiled.report.as_dict()))
"""


@pytest.mark.large  # contracts.py has a second process for other blocks
def test_another_process_loads_it(pair: Pair) -> None:
    folder = Path(__file__).parent
    places = [str(folder), str(folder.parent / "support"), str(folder.parents[1])]
    code = f"import sys; sys.path[:0] = {places}\n{AGAIN}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    told = json.loads(run.stdout.splitlines()[-1])
    assert told["artefacts_loaded"] == 2 and not told["artefacts_compiled"] and not told["eager"], told


@pytest.mark.large  # other tests lower it here, and other graphs in a worker
def test_a_worker_lowers_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("NEXFORT_WORKERS", "1")
    monkeypatch.setattr(inductor, "lower_graph", None)  # not in this process
    new = Pair().agrees(turned)
    assert new["artefacts_compiled"] == 1 and not new["eager"], new


def test_the_operator_is_there_when_it_is_asked_for() -> None:
    assert callbacks.operator() is callbacks.operator()
