# SPDX-License-Identifier: Apache-2.0
"""What a block does besides its result: refused, or done again at every call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from probe import Probe, T, block_of, x
from restarted import counting
from subjects import graphs_as_they_are
from torch import nn
from torch.nn import functional as F  # noqa: N812

import nexfort_engine
from nexfort_engine.guards.option_recorder import Refused
from nexfort_engine.modules.memory_format import Unsupported


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda b, h: {0: h}, "a mapping with other keys"),
        (lambda b, h: None, "no tensor"),
        (lambda b, h: h + torch.randn_like(h), "random"),
        (lambda b, h: F.dropout(h, 0.5, training=True), "random"),
        (lambda b, h: (h.shape[1], h.shape[0]), "no tensor"),
        (lambda b, h: h + b.table.add_(1)[0], "its own weights or buffers"),
        (lambda b, h: h + torch.add(b.table, 1, out=b.table)[0], "its own weights or buffers"),
        (lambda b, h: b.table.chunk(2)[0].add_(1).sum() + h, "its own weights or buffers"),
        (lambda b, h: h.as_strided((2, 8), (8, 1)) + 1, "by strides of its own"),
        (lambda b, h: torch._foreach_add_([b.table], 1) or h + b.table[0], "its own weights or buffers"),
    ],
)
def test_what_no_artefact_can_hold_is_refused(function: Any, reason: str) -> None:
    with pytest.raises((Refused, Unsupported), match=reason):
        Probe(block_of(function), x())


def test_a_list_that_is_changed_is_refused() -> None:
    def pops(b: Any, h: T, control: list[T]) -> T:
        return h + control.pop()

    with pytest.raises(Refused, match="changes a list"):
        Probe(block_of(pops), x(), [x(), x(seed=2)])


def test_dropout_that_is_off_is_nothing_random() -> None:
    assert Probe(block_of(lambda b, h: F.scaled_dot_product_attention(h, h, h, dropout_p=0.0)), x()).agrees(x(3))
    assert Probe(block_of(lambda b, h: F.dropout(h, 0.5, training=b.training)), x()).agrees(x(3))


def by_name(b: Any, image: T, text: T) -> tuple[T, T]:
    return torch.add(image, b.linear(image), out=image), text


def in_a_list(b: Any, image: T, text: T) -> tuple[T, T]:
    torch._foreach_mul_([image, b.linear(image)], 2.0)
    return image, text


def in_parts(b: Any, image: T, text: T) -> tuple[T, T]:
    first, _ = image.chunk(2, dim=-1)
    first.mul_(2)
    text.unbind(-1)[0].add_(b.linear(image)[0, 0, 0])
    return image, text


@pytest.mark.parametrize("writes", [by_name, in_a_list, in_parts])
def test_what_is_written_to_by_name_in_a_list_or_in_parts_is_written_again(writes: Any) -> None:
    probe = Probe(block_of(writes), x(), x(seed=2))
    assert 0 in probe.artefact.mutated and probe.agrees(x(3, 7), x(3, 5, seed=2))
    outside = x(2, 8, 6).transpose(1, 2)
    wanted = outside.clone()
    result, _ = probe.block(wanted, x(seed=2))
    found, _ = probe.graph(outside, x(seed=2))
    assert torch.allclose(outside, wanted, atol=1e-5) and torch.allclose(found, result, atol=1e-5)


def test_numbers_that_follow_the_sizes_are_returned() -> None:
    def counts(b: Any, h: T, seen: int) -> Any:
        return seen + h.shape[1], b.linear(h), {"rows": (h.shape[0], 3)}

    probe = Probe(block_of(counts), x(), 5)
    assert probe.agrees(x(3, 7), 9) and probe.agrees(x(1, 4), 2)
    found = probe.graph(x(3, 7), 9)
    assert (found[0], found[2]) == (16, {"rows": (3, 3)}) and type(found[0]) is int


def test_changes_to_arguments_are_made_again() -> None:
    def in_place(b: Any, image: T, text: T) -> tuple[T, T]:
        image += b.linear(image)
        text[:, 1:].mul_(2)
        return image, text

    probe = Probe(block_of(in_place), x(), x(seed=2))
    assert sorted(probe.artefact.mutated) == [0, 1]
    assert probe.agrees(x(3, 7), x(3, 5, seed=2))
    outside = x(2, 8, 6).transpose(1, 2)  # not contiguous: the graph gets a copy, which must be copied back
    wanted = outside.clone()
    probe.block(wanted, x(seed=2))
    probe.graph(outside, x(seed=2))
    assert torch.allclose(outside, wanted, atol=1e-5)


@pytest.mark.parametrize(
    "writes",
    [
        lambda b, h, o: o.update(activations_shape=list(h.shape)),
        lambda b, h, o: o.update(block_index=3, name="x", deep=(1, [2.5, None])),
        lambda b, h, o: o.update(cache=h * 2),
        lambda b, h, o: o.update(length=h.shape[1] * 2 + 1),
        lambda b, h, o: o.pop("scale", None),
        lambda b, h, o: o.__delitem__("scale"),
        lambda b, h, o: o["nested"].update(inner=1),
        lambda b, h, o: o["nested"].update(inner=h.sum()),
        lambda b, h, o: o.__setitem__(("a", 1), 5),
        lambda b, h, o: o["items"].append(1),
    ],
)
def test_what_a_block_writes_into_the_options_is_written_or_refused(writes: Any) -> None:
    def block(b: Any, h: T, options: dict[str, Any]) -> T:
        writes(b, h, options)
        return b.linear(h)

    given = {"scale": 1.0, "nested": {"old": 1}, "items": [0]}
    try:
        probe = Probe(block_of(block), x(), given)
    except Refused:
        return  # the block then runs eager, which is right as well
    probe.agrees(x(3, 9), copy.deepcopy(given))


def test_what_is_written_into_a_copy_goes_nowhere() -> None:
    def block(b: Any, h: T, options: dict[str, Any]) -> T:
        extra = {**options.copy(), "made": h}
        extra["img_slice"] = [h.shape[1], 2 * h.shape[1]]
        return extra["made"] * 2

    probe = Probe(block_of(block), x(), {"scale": 1.0})
    assert probe.agrees(x(3, 9), {"scale": 2.0}) and not probe.artefact.writes


class Keeps(nn.Module):
    """A block that puts what it saw into a list of its caller's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width + 1)

    def forward(self, x: torch.Tensor, seen: list[torch.Tensor] | None = None) -> torch.Tensor:
        if seen is not None:
            seen.append(x)
        return self.linear(x)


class Video(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Keeps(8 + i) for i in range(4))

    def forward(self, x: torch.Tensor, seen: list[torch.Tensor] | None = None) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, seen)
        return x


def test_a_list_that_blocks_change_costs_no_artefact_for_each_length() -> None:
    module = Video()
    with graphs_as_they_are(), torch.inference_mode(), counting() as counted:
        compiled = nexfort_engine.compile(module)
        seen: list[torch.Tensor] = []
        given = torch.randn(2, 8)
        compiled(given, seen)
        assert counted.exports and len(seen) == 4 and seen[0] is given
        exports = counted.exports
        compiled(torch.randn(2, 8), seen)  # the list is another one: longer
        assert counted.exports == exports and len(seen) == 8 and seen[0] is given
        assert torch.allclose(compiled(given), module(given), atol=1e-5)
        assert not compiled.report.as_dict()["eager"]
