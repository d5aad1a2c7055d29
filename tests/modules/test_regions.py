# SPDX-License-Identifier: Apache-2.0
"""Regions: found by structure alone, they hold every weight once, and more blocks make no more kinds."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from backbones import make  # noqa: E402
from subjects import names  # noqa: E402
from torch import nn  # noqa: E402

from nexfort_engine.modules import regions as regions_module  # noqa: E402
from nexfort_engine.modules.regions import RegionSpec, beyond, find_regions, most_alike  # noqa: E402
from nexfort_engine.modules.tree import structure  # noqa: E402


class Part(nn.Module):
    """A block of two layers, so that it is no leaf."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


class Net(nn.Module):
    """A backbone of whatever it is given."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.children():
            x = part(x)
        return x


class Walked(nn.Sequential):
    """As ComfyUI's TimestepEmbedSequential: its owner calls it, and it walks over its parts itself."""

    def forward(self, x: torch.Tensor, emb: torch.Tensor) -> torch.Tensor:
        for part in self:
            x = part(x, emb)
        return x


def paths(root: nn.Module) -> list[str]:
    return [spec.path for spec in find_regions(root)]


def blocks(count: int, width: int = 8) -> nn.ModuleList:
    return nn.ModuleList([Part(width) for _ in range(count)])


# ---- rules ----------------------------------------------------------------------------------------------------------


def test_repeated_blocks_and_what_stands_beside_them() -> None:
    net = Net(embed=nn.Linear(8, 8), blocks=blocks(3), norm=nn.LayerNorm(8), head=Part())
    assert paths(net) == ["embed", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]


def test_a_backbone_without_a_list_of_blocks_is_one_region() -> None:
    (spec,) = find_regions(Net(first=nn.Linear(8, 8), second=Part()))
    assert (spec.path, spec.kind, spec.inner) == ("", "Net", False)
    assert paths(nn.Linear(2, 2)) == [""]
    assert paths(Net(layers=nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))) == [""], "a list of leaves is no blocks"


def test_what_holds_no_weights_is_no_region() -> None:
    assert find_regions(Net()) == []
    assert find_regions(nn.ModuleList([nn.Identity(), nn.GELU()])) == []
    assert paths(Net(act=nn.GELU(), blocks=blocks(2), drop=nn.Dropout())) == ["blocks.0", "blocks.1"]


def test_buffers_are_weights() -> None:
    norm = nn.BatchNorm1d(8, affine=False)
    assert paths(Net(blocks=blocks(2), norm=norm)) == ["blocks.0", "blocks.1", "norm"]


def test_a_single_module_that_holds_repeated_blocks_is_taken_apart() -> None:
    stage = Net(down=nn.Linear(8, 8), blocks=blocks(2))
    assert paths(Net(stages=nn.ModuleList([stage, Part(16)]))) == [
        *["stages.0.down", "stages.0.blocks.0", "stages.0.blocks.1", "stages.1"]
    ]


def test_a_repeated_module_is_one_region_with_all_that_it_holds() -> None:
    net = Net(transformers=nn.ModuleList([Net(proj=nn.Linear(8, 8), blocks=blocks(2)) for _ in range(2)]))
    assert paths(net) == ["transformers.0", "transformers.1"]


def test_a_repeated_module_that_is_too_large_is_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions_module, "_LARGEST", 5)
    net = Net(transformers=nn.ModuleList([Net(blocks=blocks(2)) for _ in range(2)]))
    assert paths(net) == [f"transformers.{i}.blocks.{j}" for i in range(2) for j in range(2)]


def test_lists_in_lists_and_dictionaries_are_walked() -> None:
    deep = nn.ModuleList([blocks(2), blocks(1)])
    named = nn.ModuleDict({"block0": Part(), "block1": Part()})
    assert paths(Net(deep=deep)) == ["deep.0.0", "deep.0.1", "deep.1.0"]
    assert paths(Net(named=named)) == ["named.block0", "named.block1"]


def test_what_has_no_forward_is_never_called_and_so_taken_apart() -> None:
    def level() -> nn.Module:
        made = nn.Module()  # as an autoencoder groups the parts of one resolution
        made.block, made.up = blocks(2), nn.Linear(8, 8)
        return made

    parts = ["block.0", "block.1", "up"]
    net = Net(levels=nn.ModuleList([level(), level()]), middle=level())
    assert paths(net) == [f"{at}.{part}" for at in ("levels.0", "levels.1", "middle") for part in parts]
    called = nn.Module()
    called.up = nn.Linear(8, 8)
    called.forward = called.up.forward
    assert paths(Net(blocks=blocks(2), head=called)) == ["blocks.0", "blocks.1", "head"], "a forward of its own"


def test_a_sequential_is_a_region_and_so_are_its_parts_for_owners_that_walk_over_it() -> None:
    net = Net(blocks=blocks(2), head=nn.Sequential(nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8)))
    found = find_regions(net)
    assert [(s.path, s.inner) for s in found[2:]] == [("head", False), ("head.0", True), ("head.2", True)]


def test_a_sequential_with_a_forward_of_its_own_is_walked() -> None:
    net = Net(stages=nn.ModuleList([Walked(Part(8), Part(16)), Walked(Part(8), Part(16))]))
    assert paths(net) == ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]


def test_a_module_that_is_shared_is_one_region() -> None:
    part = Part()
    assert paths(Net(first=part, blocks=nn.ModuleList([part, Part()]))) == ["first", "blocks.1"]


class Looked(dict[str, Any]):
    """A dictionary that counts how often it is looked through."""

    times = 0

    def values(self) -> Any:
        self.times += 1
        return super().values()


def test_modules_with_weights_in_plain_objects_are_named() -> None:
    root = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    root[1].kept = types.SimpleNamespace(inner=[nn.LayerNorm(4)], known=root[0])
    root[2].host = [nn.Conv1d(1, 1, 1)]
    assert list(beyond(root)) == [("1.kept", "LayerNorm"), ("2.host", "Conv1d")]
    assert list(beyond(root, {"host"})) == [("1.kept", "LayerNorm")], "what the host notes on a layer is its own"


@pytest.mark.parametrize("alone", [False, True])
def test_what_many_layers_share_is_looked_through_once(alone: bool) -> None:
    """ComfyUI's layers share a dictionary of thousands of entries, and so do the LoRAs in lists of their own."""
    root, shared = nn.ModuleList(nn.Linear(4, 4) for _ in range(30)), Looked(one=nn.LayerNorm(4))
    for layer in root:
        layer.state = [types.SimpleNamespace(patches=shared)] if alone else shared
    assert len(list(beyond(root))) == 30 and shared.times == 1


def test_names_of_classes_and_attributes_do_not_matter() -> None:
    class Renamed(Part):
        pass

    net = Net(anything=nn.ModuleList([Renamed(), Renamed()]), else_=nn.Linear(8, 8))
    assert paths(net) == ["anything.0", "anything.1", "else_"]


# ---- backbones ------------------------------------------------------------------------------------------------------


def below(spec: RegionSpec) -> Iterator[int]:
    yield from (id(weight) for weight in [*spec.module.parameters(), *spec.module.buffers()])


def test_equal_blocks_are_counted_by_list() -> None:
    def layer(width: int = 4) -> nn.Module:
        return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4))

    block = nn.ModuleDict(
        {
            "mixed": nn.ModuleList([layer(), layer(8), layer(), layer(8), layer()]),
            "others": nn.ModuleList([layer(), layer()]),
            "few": nn.ModuleList([nn.Linear(4, 4) for _ in range(9)]),  # no blocks
        }
    )
    assert most_alike(block) == 3
    assert most_alike(nn.Linear(4, 4)) == 0


class Middle(nn.Module):
    """A block that holds some of its own, as those of video autoencoders do."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = blocks(count)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


def test_a_twin_in_a_part_that_runs_in_another_call_is_none() -> None:
    def middles(count: int) -> nn.ModuleList:
        return nn.ModuleList([Middle(3) for _ in range(count)])

    apart = [f"{part}.blocks.0.parts.{number}" for part in ("encoder", "decoder") for number in range(3)]
    net = Net(encoder=Net(first=Part(6), blocks=middles(1)), decoder=Net(blocks=middles(1)))
    assert paths(net) == ["encoder.first", "encoder.blocks.0", "decoder.blocks.0"], "one call runs both"
    assert [spec.path for spec in find_regions(net, whole=False)] == ["encoder.first", *apart]
    net = Net(encoder=Net(first=Part(6), blocks=middles(1)), decoder=Net(blocks=middles(2)))
    found = [spec.path for spec in find_regions(net, whole=False)]
    assert found == ["encoder.first", *apart[:3], "decoder.blocks.0", "decoder.blocks.1"]


@pytest.mark.parametrize("name", names())
def test_regions_hold_every_weight_once(host: str) -> None:
    root = make(host).module
    found = find_regions(root)
    outer = [spec for spec in found if not spec.inner]
    held = [identity for spec in outer for identity in below(spec)]
    assert len(held) == len(set(held)), "a weight is in two regions"
    owners = {path.rpartition(".")[0] for path, _ in root.named_parameters()}
    rest = {path for path, weight in root.named_parameters() if id(weight) not in set(held)}
    # what is left belongs to modules that were taken apart: their own forward uses it, between regions
    assert all(path.rpartition(".")[0] in owners - {spec.path for spec in outer} for path in rest)
    assert sum(root.get_parameter(path).numel() for path in rest) < 0.05 * sum(p.numel() for p in root.parameters())
    for spec in found:
        assert root.get_submodule(spec.path) is spec.module
        assert not any(spec.path.startswith(f"{other.path}.") for other in outer) or spec.inner


@pytest.mark.parametrize("name", names())
def test_more_blocks_make_no_more_kinds(host: str) -> None:
    def kinds(depth: int) -> tuple[set[str], int]:
        found = find_regions(make(host, depth).module)
        return {str(structure(spec.module)) for spec in found if not spec.inner}, len(found)

    (two, count_two), (twelve, count_twelve) = kinds(2), kinds(12)
    assert twelve == two
    assert count_twelve >= count_two + 10
