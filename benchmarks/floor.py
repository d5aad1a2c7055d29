# SPDX-License-Identifier: Apache-2.0
"""The floor of a backbone's step: its products, convolutions and attention alone, by the kernels that eager takes.

    COMFYUI_PATH=... python -m benchmarks.floor flux --steps 10

One step runs eager and is watched; what multiplies in it is then run alone, in its order, as one CUDA graph whose
launches are queued, as long as a picture takes, because a card at its limit of power lowers its clock. Nothing that is
between is counted: no norm, no activation, no embedding, no rounding to 8 bits. A layer in int8 of comfy_kitchen counts
as cuBLAS's product of its factors. Prints a JSON line: milliseconds a step, and how many of them
each kind takes alone. What is shorter in the same precision has better kernels or fewer products: cuDNN chooses those
of convolutions by rule, as in eager. Inputs that are one tensor are found in the card's caches more often than the
step's own.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from . import card
from .one_run import Sampling, find_comfyui

_KINDS = {
    "products": (
        *("mm", "addmm", "bmm", "baddbmm", "_addmm_activation"),
        *("_scaled_mm", "_scaled_mm_v2", "_int_mm", "int8_linear"),
    ),
    "convolutions": ("convolution",),
    "attention": (
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
    ),
}

Call = tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class Watched(TorchDispatchMode):
    """Notes what multiplies: the operators with weights as they are and random numbers in place of all else.

    Inputs of one shape are one tensor, so that a step's do not have to be held at once. Images and the weights of
    convolutions lie with channels innermost, where cuDNN is fastest.
    """

    def __init__(self, weights: set[int]) -> None:
        """weights: addresses of what stays as it is."""
        super().__init__()
        self.calls: list[Call] = []
        self._weights = weights
        self._inputs: dict[Any, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it, and note it where it multiplies. A weight that unpacks itself is asked for what it calls."""
        if any(is_traceable_wrapper_subclass(value) for value in (*args, *(kwargs or {}).values())):
            return NotImplemented
        name = func.overloadpacket.__name__
        for kind, names in _KINDS.items():
            if name in names:
                given = tuple(self._given(value, kind == "convolutions") for value in args)
                self.calls.append((kind, *_as_product(name, func, given, dict(kwargs or {}))))
        return func(*args, **(kwargs or {}))

    def _given(self, value: Any, image: bool) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        innermost = image and value.ndim == 4
        weight = value.untyped_storage().data_ptr() in self._weights
        if weight and not innermost:
            return value
        key = (value.data_ptr() if weight else None, value.shape, value.stride(), value.dtype)
        if key not in self._inputs:
            narrow = value.dtype.itemsize == 1  # of which torch draws no random numbers
            made = value.clone() if weight or narrow else torch.randn_like(value)  # with its strides, without gaps
            self._inputs[key] = made.contiguous(memory_format=torch.channels_last) if innermost else made
        return self._inputs[key]


def _as_product(
    name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """What is run in place of an operator: a layer in int8 is the product of its factors, where cuBLAS takes them."""
    if name != "int8_linear":
        return func, args, kwargs
    x, weight = args[:2]
    rows = x.reshape(-1, x.shape[-1])[:, : weight.shape[1]].to(torch.int8).contiguous()
    if rows.shape[0] <= 16 or any(size % 8 for size in weight.shape):
        return func, args, kwargs
    return torch._int_mm, (rows, weight.t()), {}


def alone(calls: list[Call], steps: int) -> float:
    """Milliseconds a step of these calls as one graph, when as many are queued. Of nothing: 0."""
    if not calls:
        return 0.0

    def run() -> None:
        for _, func, args, kwargs in calls:
            func(*args, **kwargs)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    card.settle()
    began = time.perf_counter()
    for _ in range(steps):
        graph.replay()
    card.settle()
    return (time.perf_counter() - began) / steps * 1e3


def main(argv: list[str] | None = None) -> int:
    """Measure and print. SystemExit without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backbone")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("a floor is of a GPU, and torch finds none here")
    find_comfyui()
    import comfy.model_management
    import comfy.sd

    from .backbones import BACKBONES, state_dict

    backbone = BACKBONES[args.backbone]
    weights = state_dict(backbone, comfy.model_management.get_torch_device(), None)
    patcher = comfy.sd.load_diffusion_model_state_dict(weights, model_options={"dtype": backbone.dtype})
    del weights
    comfy.model_management.load_models_gpu([patcher])
    sampling = Sampling(backbone, "")
    sampling(patcher, 1)
    own = {parameter.untyped_storage().data_ptr() for parameter in patcher.model.diffusion_model.parameters()}
    with torch.no_grad(), Watched(own) as watched:
        sampling(patcher, 1)
    with torch.no_grad():
        found = {"floor_ms": alone(watched.calls, args.steps)}
        for kind in _KINDS:
            found[kind] = alone([call for call in watched.calls if call[0] == kind], args.steps)
    numbers = {name: round(value, 2) for name, value in found.items()}
    told = {"backbone": backbone.name, "steps": args.steps, "gpu": card.name(), "torch": torch.__version__}
    print(json.dumps(told | {"calls": len(watched.calls)} | numbers), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
