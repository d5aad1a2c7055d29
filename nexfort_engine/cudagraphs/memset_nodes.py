# SPDX-License-Identifier: Apache-2.0
"""Nodes of CUDA graphs: those that fill memory made kernels, which follow each other without a pause.

cuDNN's attention and cuBLAS's products in fp8 have four bytes set to zero before they begin. In a graph that is a node
of another kind than a kernel, and the card changes between kinds in two microseconds and more: 70 attentions with a
product each took 3753 microseconds and 3603 with kernels in the place of those nodes (H200, CUDA 13.0, 2026-11).

Asked of NVIDIA's driver through its own library. What it does not give or take stays as it is; numbers are the same.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import Any

import torch

from ..system.cuda_driver import library
from ..system.cuda_graph_pool import fragile

log = logging.getLogger("nexfort")

_KIND = 2  # CU_GRAPH_NODE_TYPE_MEMSET
_THREADS = 128
_FILL = """
.visible .entry fill{bits}(.param .u64 place, .param .u32 value, .param .u64 count)
{{
    .reg .pred %beyond;
    .reg .b32 %value, %block, %size, %thread;
    .reg .b64 %place, %count, %at, %own;
    ld.param.u64 %place, [place];
    ld.param.u32 %value, [value];
    ld.param.u64 %count, [count];
    mov.u32 %block, %ctaid.x;
    mov.u32 %size, %ntid.x;
    mov.u32 %thread, %tid.x;
    mul.wide.u32 %at, %block, %size;
    cvt.u64.u32 %own, %thread;
    add.u64 %at, %at, %own;
    setp.ge.u64 %beyond, %at, %count;
    @%beyond ret;
    cvta.to.global.u64 %place, %place;
    mad.lo.u64 %place, %at, {bytes}, %place;
    st.global.u{bits} [%place], %value;
    ret;
}}
"""
PTX = ".version 7.0\n.target sm_70\n.address_size 64\n" + "".join(
    _FILL.format(bits=8 * size, bytes=size) for size in (1, 2, 4)
)


class _Fill(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS: rows of `width` values of `size` bytes, `pitch` bytes from each other."""

    _fields_ = (
        ("place", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("size", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("rows", ctypes.c_size_t),
    )


class _Kernel(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS, as `cuGraphAddKernelNode` takes them."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        *((name, ctypes.c_uint) for name in ("blocks", "blocks_y", "blocks_z", "threads", "threads_y", "threads_z")),
        ("shared", ctypes.c_uint),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.POINTER(ctypes.c_void_p)),
    )


def editable() -> bool:
    """Whether graphs may be edited between their capture and their first launch.

    With cudaMallocAsync a graph holds the memory of its kernels, and then no node may go.
    """
    nvidia = torch.version.cuda is not None and hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph")
    return nvidia and torch.cuda.is_available() and library() is not None and not fragile()


def fills_as_kernels(raw: int) -> int:
    """Replace the nodes of a captured graph that fill memory by kernels that do so; gives how many.

    raw: its handle (`torch.cuda.CUDAGraph.raw_cuda_graph`), of the current device.
    """
    graph, count = ctypes.c_void_p(raw), 0
    try:
        for node in _nodes(graph, "cuGraphGetNodes"):
            kind = ctypes.c_int()
            _ask("cuGraphNodeGetType", node, ctypes.byref(kind))
            count += kind.value == _KIND and _replaced(graph, node)
    except _Failed as problem:
        log.debug("Nexfort: nodes of a CUDA graph stay as they are: %s", problem)
    return count


def _replaced(graph: Any, node: Any) -> bool:
    fill = _Fill()
    _ask("cuGraphMemsetNodeGetParams", node, ctypes.byref(fill))
    if fill.rows != 1 or fill.size not in (1, 2, 4):
        return False
    size, width, value = fill.size, fill.width, fill.value
    if size == 1 and not (fill.place | width) % 4:  # four at once
        size, width, value = 4, width // 4, (value & 0xFF) * 0x01010101
    given = (ctypes.c_uint64(fill.place), ctypes.c_uint32(value), ctypes.c_uint64(width))
    arguments = (ctypes.c_void_p * len(given))(*(ctypes.addressof(one) for one in given))
    blocks = -(-width // _THREADS)
    kernel = _Kernel(_function(8 * size, torch.cuda.current_device()), blocks, 1, 1, _THREADS, 1, 1, 0, arguments, None)
    before, after = (_nodes(node, f"cuGraphNodeGet{which}") for which in ("Dependencies", "DependentNodes"))
    made = ctypes.c_void_p()
    _ask("cuGraphAddKernelNode", ctypes.byref(made), graph, _array(before), len(before), ctypes.byref(kernel))
    try:
        if after:
            _ask("cuGraphAddDependencies", graph, _array([made] * len(after)), _array(after), len(after))
    except _Failed:
        _ask("cuGraphDestroyNode", made)  # nobody would wait for it
        raise
    _ask("cuGraphDestroyNode", node)
    return True


class _Failed(Exception):
    """The driver did not do something. The text says what, with its number (CUresult)."""


def _ask(name: str, *arguments: Any) -> None:
    given = [ctypes.c_size_t(one) if isinstance(one, int) else one for one in arguments]
    failed = getattr(library(), name)(*given)
    if failed:
        raise _Failed(f"{name} gave {failed}")


def _nodes(of: Any, name: str) -> list[Any]:
    """What one of the driver's functions lists of a graph or a node."""
    count = ctypes.c_size_t()
    _ask(name, of, None, ctypes.byref(count))
    if not count.value:
        return []
    found = (ctypes.c_void_p * count.value)()
    _ask(name, of, found, ctypes.byref(count))
    return [ctypes.c_void_p(one) for one in found]


def _array(nodes: list[Any]) -> Any:
    return (ctypes.c_void_p * len(nodes))(*(node.value for node in nodes)) if nodes else None


@functools.cache
def _function(bits: int, _device: int) -> int:
    """The kernel that fills with values of so many bits, on the current device. Loaded once and kept."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _ask("cuModuleLoadData", ctypes.byref(module), PTX.encode())
    _ask("cuModuleGetFunction", ctypes.byref(function), module, f"fill{bits}".encode())
    assert function.value is not None, "the driver said that it found it"
    return function.value
