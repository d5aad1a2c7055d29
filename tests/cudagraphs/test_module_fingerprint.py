# SPDX-License-Identifier: Apache-2.0
"""Whatever the code between regions would have consulted: a change of it shows, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nexfort_engine.cudagraphs.module_fingerprint import ModuleFingerprint


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.block, self.leave = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)
        self.gain, self.name, self.sizes, self.table = 1.0, None, [1, 2], {"a": 1}
        self.act = torch.tanh


def method(_: Any) -> None:
    """Something a pack puts in a method's place."""


CHANGES: dict[str, Callable[[Net], None]] = {
    "value": lambda net: setattr(net, "gain", 2.0),
    "none": lambda net: setattr(net, "name", "a"),
    "item": lambda net: net.sizes.append(3),
    "key": lambda net: net.table.update(b=2),
    "function": lambda net: setattr(net, "act", torch.sigmoid),
    "new name": lambda net: setattr(net, "forward_orig", method),
    "name gone": lambda net: delattr(net, "gain"),
    "submodule": lambda net: setattr(net, "leave", nn.Linear(2, 2)),
    "forward": lambda net: setattr(net.enter, "forward", method),
    "forward of a region": lambda net: setattr(net.block, "forward", method),
    "hook": lambda net: net.enter.register_forward_hook(lambda *_: None) and None,
    "below": lambda net: setattr(net.enter, "in_features", 3),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_shows(change: str) -> None:
    net = Net()
    fingerprint = ModuleFingerprint(net, [net.block])
    assert fingerprint.unchanged() and not fingerprint.hooked
    CHANGES[change](net)
    assert not fingerprint.unchanged()


def test_what_the_network_does_not_consult_is_no_change() -> None:
    net = Net()
    fingerprint = ModuleFingerprint(net, [net.block])
    net._books = object()  # a host's own, on every step
    net.block[0].in_features = 7  # a region has guards of its own
    net.enter.weight = nn.Parameter(torch.zeros(2, 2))  # weights are compared by those who hold them
    assert fingerprint.unchanged()


def test_containers_that_cannot_be_compared_are_left_to_their_names() -> None:
    net = Net()
    net.things = [torch.zeros(2), object()]
    fingerprint = ModuleFingerprint(net, [net.block])
    net.things.append(torch.ones(3))
    assert fingerprint.unchanged()
