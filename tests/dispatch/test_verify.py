# SPDX-License-Identifier: Apache-2.0
"""A verified step: what is compared, what is latched; looking changes nothing. Contracts have all backbones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from subjects import Subject, ask_instead, distance, equal_bits, graph_subject, graphs_as_they_are
from torch import nn

import nexfort_engine
from nexfort_engine.dispatch import verify
from nexfort_engine.engine import Engine
from nexfort_engine.runtime import artifact

pytestmark = pytest.mark.usefixtures("threads", "artefact_cache")


class Stopped(Exception):
    """Stands for a host's interrupt."""


@pytest.fixture
def tiny() -> Iterator[Subject]:
    """A small transformer after its first call; graphs run as they are."""
    with graphs_as_they_are():
        yield graph_subject("torch_dit")


def verified(tiny: Subject) -> dict[str, Any]:
    """What a verified call puts into the report."""
    tiny.engine.verify_next()
    tiny.run()
    return dict(tiny.report.as_dict()["verifications"][-1])


def off_by(part: float, patch: pytest.MonkeyPatch, path: str, engine: Engine) -> None:
    """Have what one region's artefact gives be off by this part of its norm, as wrong code would."""
    region = next(region for region in engine.regions if region.path == path)
    own = artifact.Binding.run

    def run(self: Any, weights: Any, *rest: Any) -> Any:
        result = own(self, weights, *rest)
        if not any(a is b for a, b in zip(weights, region.weights.slots.read(), strict=False)):
            return result
        generator = torch.Generator().manual_seed(0)
        parts = [result] if isinstance(result, torch.Tensor) else list(result)
        noise = [torch.randn(t.shape, generator=generator).to(t) for t in parts]
        moved = [t + part * t.norm() * n / n.norm() for t, n in zip(parts, noise, strict=True)]
        return moved[0] if parts[0] is result else type(result)(moved)

    patch.setattr(artifact.Binding, "run", run)


def test_each_region_is_compared_and_nothing_else_changes(tiny: Subject) -> None:
    before, calls, state = tiny.run(), tiny.report.calls, torch.get_rng_state()
    tiny.engine.verify_next()
    args, kwargs = tiny.tiny.make_inputs()
    kept = [t.clone() for t in verify.tensors_in((args, kwargs))]
    with torch.inference_mode():
        result = tiny.compiled(*args, **kwargs)
    assert equal_bits(list(verify.tensors_in(result)), before)
    assert equal_bits(list(verify.tensors_in((args, kwargs))), kept)
    assert torch.equal(torch.get_rng_state(), state)
    assert tiny.report.calls == calls + 1, "what was only run to be looked at is no step"
    (told,) = tiny.report.as_dict()["verifications"]
    assert {row["region"] for row in told["regions"]} == {row["name"] for row in tiny.report.as_dict()["regions"]}
    assert not [row for row in told["regions"] if row["over"] or row["unjudged"]]
    assert told["distance"] < 1e-4 and told["device"] == "cpu" and told["sizes"]
    assert min(row[key] for row in (told, *told["regions"]) for key in ("eager_ms", "compiled_ms")) > 0
    assert "verified: a step takes" in str(tiny.report)
    tiny.run()
    assert len(tiny.report.as_dict()["verifications"]) == 1, "asked for once, done once"


def test_a_region_over_the_budget_runs_eager_from_then_on(tiny: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    off_by(0.01, monkeypatch, "blocks.1", tiny.engine)
    assert distance(tiny.run(), tiny.eager()) > 1e-3
    rows = {row["region"]: row for row in verified(tiny)["regions"]}
    assert [path for path, row in rows.items() if row["over"]] == ["blocks.1"]
    assert rows["blocks.1"]["distance"] == pytest.approx(0.01, rel=0.1) == rows["blocks.1"]["error"]
    assert rows["blocks.1"]["eager_error"] < 1e-5, "against a computation in float64"
    (eager,) = tiny.report.as_dict()["eager"]
    assert eager["region"] == "blocks.1" and "over the budget" in eager["reason"]
    assert distance(tiny.run(), tiny.eager()) < 1e-4


def test_products_in_fp8_have_a_budget_of_their_own(tiny: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "has_narrow_products", lambda _: True)
    off_by(verify.LOW_PRECISION / 2, monkeypatch, "blocks.0", tiny.engine)
    assert not [row for row in verified(tiny)["regions"] if row["over"]]
    off_by(verify.LOW_PRECISION, monkeypatch, "blocks.0", tiny.engine)  # on top of the other
    assert [row["region"] for row in verified(tiny)["regions"] if row["over"]] == ["blocks.0"]


def test_without_a_wider_computation_nothing_is_judged(tiny: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise TypeError("half only")

    off_by(0.01, monkeypatch, "blocks.1", tiny.engine)
    monkeypatch.setattr(verify, "_wider_result", refuse)
    rows = {row["region"]: row for row in verified(tiny)["regions"]}
    assert rows["blocks.1"]["unjudged"] == "it cannot be computed in a wider type (TypeError: half only)"
    assert not rows["blocks.1"]["over"] and rows["blocks.0"]["unjudged"] is None, "what is equal needs no judgement"


def test_what_is_no_number_is_over_any_budget_and_json_all_the_same(
    tiny: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    off_by(float("nan"), monkeypatch, "blocks.1", tiny.engine)
    told = verified(tiny)
    assert [row["region"] for row in told["regions"] if row["over"]] == ["blocks.1"]
    assert [row["distance"] for row in told["regions"] if row["over"]] == [None]
    json.loads(json.dumps(told, allow_nan=False))


def test_far_from_eager_is_over_the_budget_whatever_can_be_computed(
    tiny: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    off_by(0.5, monkeypatch, "blocks.1", tiny.engine)
    monkeypatch.setattr(verify, "_wider_result", lambda *_: 1 / 0)
    assert [row["region"] for row in verified(tiny)["regions"] if row["over"]] == ["blocks.1"]


def test_a_step_that_fails_is_verified_the_next_time(tiny: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.engine.verify_next()
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        ask_instead(patch, tiny.engine, cancel=raise_stopped)
        tiny.run()
    assert not tiny.report.verifications
    tiny.run()
    assert tiny.report.verifications == 1


def raise_stopped() -> None:
    raise Stopped


class Cache:
    """What a network may change that it is handed."""

    def __init__(self) -> None:
        self.seen: list[int] = []


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wide() for _ in range(2))

    def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        cache.seen.append(len(cache.seen))
        for block in self.blocks:
            x = block(x)
        return x


def test_a_call_that_hands_over_a_cache_is_not_made_again() -> None:
    cache = Cache()
    with graphs_as_they_are(), torch.inference_mode():
        compiled = nexfort_engine.compile(Remembers())
        compiled(torch.randn(2, 96), Cache())
        compiled.verify_next()
        compiled(torch.randn(2, 96), cache)
    assert cache.seen == [0] and not compiled.report.verifications
    assert "with a Cache, which it may change" in compiled.report.as_dict()["notes"][-1]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("it breaks")])
def test_a_verification_that_fails_takes_no_result_away(
    tiny: Subject, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    before = tiny.run()

    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(verify.Verifier, "_regions", fail)
    tiny.engine.verify_next()
    assert equal_bits(tiny.run(), before)
    told = tiny.report.as_dict()
    assert not told["verifications"]
    wanted = "no memory to verify" if isinstance(error, torch.OutOfMemoryError) else "RuntimeError: it breaks"
    assert wanted in told["notes"][-1]


def test_an_interrupt_ends_a_verification(tiny: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    ask_instead(monkeypatch, tiny.engine, stops=lambda: (Stopped,))
    tiny.engine.verify_next()
    seen = 0

    def cancel() -> None:
        nonlocal seen
        seen += 1
        if seen > len(tiny.engine.regions) + 1:  # in the verification's first regions
            raise Stopped

    ask_instead(monkeypatch, tiny.engine, cancel=cancel)
    with pytest.raises(Stopped):
        tiny.run()
    ask_instead(monkeypatch, tiny.engine, cancel=lambda: None)
    assert tiny.same() < 1e-4


class Wide(nn.Module):
    """A block with several roundings in eager."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(96), nn.Linear(96, 192), nn.Linear(192, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.nn.functional.gelu(self.first(self.norm(x)) * 1.3 + 0.2))


class Half(nn.Module):
    """A block that computes in bfloat16 whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(96, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.linear.weight.to(torch.bfloat16)
        return torch.nn.functional.linear(x.to(torch.bfloat16), weight).to(x.dtype)


class Chain(nn.Module):
    """Two blocks of a kind, with random numbers between them."""

    def __init__(self, kind: type[nn.Module], noise: float = 0.0) -> None:
        super().__init__()
        self.noise, self.blocks = noise, nn.ModuleList(kind() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            if self.noise:
                x = x + self.noise * torch.randn_like(x)
        return x


def test_random_numbers_are_the_same_both_ways() -> None:
    with graphs_as_they_are(), torch.inference_mode():
        compiled, x = nexfort_engine.compile(Chain(Wide, 0.1)), torch.randn(2, 96)
        compiled(x)
        compiled.verify_next()
        torch.manual_seed(5)
        first, after = compiled(x), torch.get_rng_state()
        torch.manual_seed(5)
        assert torch.equal(first, compiled(x)) and torch.equal(after, torch.get_rng_state())
        (told,) = compiled.report.as_dict()["verifications"]
        assert told["distance"] < 1e-4


def test_in_half_precision_the_error_counts_and_not_the_distance() -> None:
    torch.manual_seed(0)
    module = Chain(Wide).to(torch.bfloat16)
    with torch.inference_mode():
        compiled, x = nexfort_engine.compile(module), torch.randn(64, 96, dtype=torch.bfloat16)
        compiled(x)
        compiled.verify_next()
        compiled(x)
    (told,) = compiled.report.as_dict()["verifications"]
    assert not compiled.report.as_dict()["eager"]
    for row in told["regions"]:
        assert row["distance"] > 1e-4, "fused code rounds less often, so the bits differ"
        assert 1e-4 < row["error"] < 1.1 * row["eager_error"]


def test_the_distance_is_a_relative_norm() -> None:
    assert verify.distance(torch.tensor([1.0]), torch.tensor([1.0, 2.0])) == float("inf")
    nan, inf = float("nan"), float("inf")
    assert verify.distance(torch.tensor([nan]), torch.tensor([1.0])) == inf
    assert verify.distance(torch.tensor([1.0, 1.0]), torch.tensor([nan, 1.0])) == inf
    assert verify.distance(torch.tensor([-inf, 1.0, nan]), torch.tensor([-inf, 1.0, nan])) == 0.0, "masks are like that"
    assert verify.distance(torch.tensor([inf, 1.0]), torch.tensor([-inf, 1.0])) == inf
    found, wanted = {"a": torch.tensor([3.0, 4.0])}, {"a": torch.tensor([0.0, 5.0])}
    assert verify.distance(found, wanted) == pytest.approx(10**0.5 / 5)


def test_code_that_sets_its_own_dtype_may_round_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its wider computation is as narrow as eager, whose error seems to be none."""
    module = Chain(Half).to(torch.bfloat16)
    with graphs_as_they_are(), torch.inference_mode():
        compiled, x = nexfort_engine.compile(module), torch.randn(8, 96, dtype=torch.bfloat16)
        compiled(x)
        off_by(0.0005, monkeypatch, "blocks.0", compiled._nexfort_engine)
        compiled.verify_next()
        compiled(x)
    (told,) = compiled.report.as_dict()["verifications"]
    assert [row["eager_error"] for row in told["regions"]] == [0.0, None], "the other one is equal"
    assert not [row for row in told["regions"] if row["over"]]
