# SPDX-License-Identifier: Apache-2.0
"""A GPU that is not there, as far as a compiler asks: it can be lowered for, and nothing can run on it.

What Inductor and Triton read of a device is answered with the figures of one real model. Everything else of CUDA stays
as it is, so on a machine without a GPU whatever touches the device raises.
"""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from nexfort_engine.config.compile_config import CompileConfig

FORKED = "NEXFORT_TEST_FORKED"  # names a file that gets a line for each process that a worker forks: which function did
READ = "NEXFORT_TEST_READ"  # names a file that gets a line for each kernel that a graph calls, when it was read
PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    total_memory=150_000_000_000,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=62914560,
    gcnArchName="",
)


class NoSuchDevice(RuntimeError):
    """Something would have used the device."""


def pretend(patch: pytest.MonkeyPatch) -> None:
    """Until the patch is undone there is one GPU."""
    from torch._dynamo import device_interface
    from triton.backends.nvidia.driver import CudaUtils
    from triton.runtime import driver

    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": PROPERTIES,
        "get_device_capability": (PROPERTIES.major, PROPERTIES.minor),
        "get_device_name": PROPERTIES.name,
    }
    for name, answer in answers.items():
        patch.setattr(torch.cuda, name, _Answer(answer))
    for name in ("get_rng_state", "set_rng_state"):
        patch.setattr(torch.cuda, name, _asked)
    interface = device_interface.CudaInterface
    for name in ("current_device", "device_count", "get_device_properties"):  # it holds the originals
        patch.setattr(interface, name, _Answer(answers[name]))
    for name in ("_exchange_device", "_maybe_exchange_device"):
        patch.setattr(torch.cuda, name, _stay)
        patch.setattr(interface, name.removeprefix("_"), staticmethod(_stay))
    patch.setattr(device_interface, "caching_worker_device_properties", {"cuda": [PROPERTIES]})
    torch._C._ensureCUDADeviceGuardSet()  # C++ code that would switch devices does not, where there is none
    # C++ would ask the device which attention suits it, and take the slowest without an answer
    attention = torch.ops.aten.scaled_dot_product_attention.default
    patch.setitem(attention.py_kernels, torch._C.DispatchKey.CompositeImplicitAutograd, _flash)
    patch.setattr(attention, "_dispatch_cache", {})
    # Triton's driver is a library that is linked with CUDA's
    patch.setattr(CudaUtils, "__init__", _no_library)
    patch.setattr(driver, "_default", None)
    patch.setattr(driver, "_active", None)


def norms_as_on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """On the CPU too eager group norms give contiguous tensors, and those of graphs are rewritten."""
    group_norm, options = torch.group_norm, CompileConfig.lowering_options

    def contiguous(*args: Any, **kwargs: Any) -> Any:
        result = group_norm(*args, **kwargs)
        return result.contiguous() if type(result) is torch.Tensor else result  # in a trace it is none

    patch.setattr(torch, "group_norm", contiguous)
    patch.setattr(CompileConfig, "lowering_options", lambda *a: {**options(*a), "nexfort.group_norm": True})


def _asked(*_: object) -> None:
    raise AssertionError("the generator of a device was asked for, which makes a context")


class _Answer:
    """A function with one answer. No function, which a class would bind."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self._answer


def _flash(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]


def _stay(index: int) -> int:
    """Setting the device that is the current one anyway does nothing; another one would be used."""
    if index > 0:
        raise NoSuchDevice(f"device {index} was made the current one")
    return 0


def _no_library(utils: Any) -> None:
    utils.get_device_properties = lambda _: {"max_shared_mem": PROPERTIES.shared_memory_per_block_optin}
    utils.load_binary = _refuse


def _refuse(*_: Any) -> Any:
    raise NoSuchDevice("a kernel was loaded")
