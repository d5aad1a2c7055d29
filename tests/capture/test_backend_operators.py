# SPDX-License-Identifier: Apache-2.0
"""Functions of comfy_kitchen that pick a back end in Python are its operators in a graph, at every size."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from probe import Probe, T, block_of, x

ck = pytest.importorskip("comfy_kitchen", reason="it comes with ComfyUI")
from comfy_kitchen.registry import registry  # noqa: E402

from nexfort_engine.capture.backend_operators import backends_by_operators  # noqa: E402
from nexfort_engine.guards.value_digests import digest  # noqa: E402

if not hasattr(ck, "int8_linear"):
    pytest.skip("this version has no such functions", allow_module_level=True)

QUANTISED = torch.randint(-100, 100, (8, 8), dtype=torch.int8, generator=torch.Generator().manual_seed(3))


def linear(b: Any, h: T) -> T:
    scale = torch.full((8, 1), 0.01)
    return b.linear(h) + ck.int8_linear(h, QUANTISED, scale, None, h.dtype, input_act="gelu_tanh")


def rowwise(b: Any, h: T) -> T:
    numbers, scale = ck.quantize_int8_rowwise(b.linear(h).flatten(0, 1))
    return numbers.float() * scale


def tensorwise(b: Any, h: T) -> T:
    numbers, scale = ck.quantize_int8_tensorwise(b.linear(h).flatten(0, 1))
    return numbers.float() * scale


@pytest.mark.parametrize(
    ("function", "operator"),
    [(linear, "int8_linear"), (rowwise, "quantize_int8_rowwise"), (tensorwise, "quantize_int8_tensorwise")],
)
def test_a_call_is_the_operator_and_every_size_is_free(function: Callable[..., Any], operator: str) -> None:
    probe = Probe(block_of(function), x(2, 6))
    called = {str(node.target) for node in probe.captured.graph.graph.nodes}
    assert f"comfy_kitchen.{operator}.default" in called
    for batch, length in ((1, 6), (3, 9), (2, 40)):
        assert probe.agrees(x(batch, length, seed=length)), (batch, length)
    assert probe.captured.only_here == "", "no other process can load it"


def test_what_the_operator_cannot_say_goes_to_the_back_end() -> None:
    h = x(4, 8)[0]
    wanted = ck.quantize_int8_tensorwise(h, scale=torch.tensor(0.02))
    with backends_by_operators():
        found = ck.quantize_int8_tensorwise(h, scale=torch.tensor(0.02))
    assert all(map(torch.equal, found, wanted)) and float(wanted[1]) == pytest.approx(0.02)


def test_what_the_registry_holds_counts_where_it_picked_a_back_end() -> None:
    def asked(b: Any, h: T) -> T:
        numbers, _ = ck.quantize_int8_tensorwise(b.linear(h).flatten(0, 1), scale=b.table[0, :1])
        return numbers.float()

    probes = Probe(block_of(tensorwise), x()), Probe(block_of(asked), x())
    by_operator, picked = (str([row for row in p.captured.names if "registry" in str(row)]) for p in probes)
    assert "get_implementation" not in by_operator and "get_implementation" in picked


def test_a_native_function_of_the_library_is_known_by_its_name() -> None:
    """Its class is of the tool that wrapped it, and tells nothing but an address."""
    native = getattr(pytest.importorskip("comfy_kitchen.backends.cuda"), "_C", None)
    if native is None:
        pytest.skip("this build has no native code")
    functions = [value for value in vars(native).values() if callable(value) and not isinstance(value, type)]
    (one, lasts), (other, _) = digest(functions[:1]), digest(functions[1:2])
    assert lasts and one != other


def test_other_threads_pick_their_back_end_as_ever() -> None:
    seen: list[Any] = []
    with backends_by_operators():
        own = registry.get_implementation("int8_linear")
        thread = threading.Thread(target=lambda: seen.append(registry.get_implementation("int8_linear")))
        thread.start()
        thread.join()
    assert seen == [registry.get_implementation("int8_linear")] and own is not seen[0]
    assert "get_implementation" not in vars(registry), "the registry is as it was"


def test_a_back_end_that_the_thread_asks_for_is_seen() -> None:
    """`use_backend` says so in a threading.local, which the thread that captures has not."""
    from nexfort_engine.guards.option_recorder import Refused

    block = block_of(lambda b, h: b.linear(h) * registry.get_capable_backend("int8_linear", None).count("e"))
    assert Probe(block, x()).agrees(x(3))
    with registry.use_backend("eager"), pytest.raises(Refused, match=r"threading\.local"):
        Probe(block, x())
