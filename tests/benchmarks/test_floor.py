# SPDX-License-Identifier: Apache-2.0
"""What of a step counts for its floor: what multiplies, with the weights as they are and other numbers for all else."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, group_norm

from benchmarks import floor


class _Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        rows = group_norm(self.conv(image), 2).flatten(2).mT
        return rows + self.second(gelu(self.first(rows))) @ rows.mT @ rows


@pytest.fixture
def watched() -> floor.Watched:
    torch.manual_seed(0)
    step = _Step().requires_grad_(False)
    with torch.no_grad(), floor.Watched({p.untyped_storage().data_ptr() for p in step.parameters()}) as found:
        expected = step(image := torch.randn(2, 4, 6, 6))
    assert torch.equal(expected, step(image)), "what is watched is what runs"
    found.step = step  # type: ignore[attr-defined]
    return found


def test_what_multiplies_is_noted_in_its_order_and_nothing_else(watched: floor.Watched) -> None:
    assert [kind for kind, *_ in watched.calls] == ["convolutions", *["products"] * 4]
    for _, func, args, kwargs in watched.calls:
        assert func(*args, **kwargs).isfinite().all()


def test_weights_are_those_of_the_step_and_inputs_of_one_shape_are_one_tensor(watched: floor.Watched) -> None:
    step = watched.step  # type: ignore[attr-defined]
    given = [value for _, _, args, _ in watched.calls for value in args if isinstance(value, torch.Tensor)]
    own = {p.untyped_storage().data_ptr() for p in step.parameters()}
    assert {step.first.weight.data_ptr(), step.second.weight.data_ptr()} <= {value.data_ptr() for value in given}
    others = [value for value in given if value.untyped_storage().data_ptr() not in own]
    assert len({value.data_ptr() for value in others}) == len({(v.shape, v.stride()) for v in others}) < len(others)
    image, weight = watched.calls[0][2][:2]
    assert image.is_contiguous(memory_format=torch.channels_last) and image.shape == (2, 4, 6, 6)
    assert weight.is_contiguous(memory_format=torch.channels_last) and torch.equal(weight, step.conv.weight)


@pytest.mark.parametrize(
    ("layout", "name"), [("TensorWiseINT8Layout", "_int_mm"), ("TensorCoreFP8Layout", "_scaled_mm")]
)
def test_layers_in_8_bits_are_noted_as_their_products(layout: str, name: str) -> None:
    """As ComfyUI has them: a weight that is a tensor of its own kind, whose operators its class calls."""
    tensor = pytest.importorskip("comfy_kitchen.tensor", reason="ComfyUI requires that package")
    more = {"per_channel": True} if name == "_int_mm" else {"scale": "recalculate"}
    weight = tensor.QuantizedTensor.from_float(torch.randn(48, 64), layout, **more)
    x = torch.randn(2, 17, 64)
    with torch.no_grad(), floor.Watched(set()) as found:
        expected = torch.nn.functional.linear(x, weight)
    assert torch.equal(expected, torch.nn.functional.linear(x, weight)), "what is watched is what runs"
    kinds = [(kind, getattr(func, "overloadpacket", func).__name__) for kind, func, *_ in found.calls]
    if name == "_int_mm":
        assert kinds == [("products", name)]
        ((_, func, args, kwargs),) = found.calls
        assert func(*args, **kwargs).shape == (34, 48)
    else:  # where torch has no product in fp8, as on some CPUs, it is one in full
        assert len(kinds) == 1 and kinds[0][0] == "products"


def test_nothing_takes_no_time_and_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert floor.alone([], 3) == 0.0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="of a GPU"):
        floor.main(["sdxl"])
