# SPDX-License-Identifier: Apache-2.0
"""What a run asks of the device under it, a GPU or this machine's processor: clocks, memory, operations, the ceiling.

`python -m benchmarks.card` prints what it is, as JSON.

A processor has no memory of its own to count, so there those figures are None. ComfyUI is needed for dynamic VRAM only.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

_SIDE = {"cuda": 8192, "cpu": 1024}  # of the ceiling's product: large for the device, and short
_PRODUCTS = 20


def name() -> str:
    """What the device is called in tables."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def settle() -> None:
    """Wait until the device has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def count_anew() -> None:
    """Let `peak` count from here."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak() -> float | None:
    """GiB of the most that torch's allocator held since `count_anew`."""
    return gib(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else None


def gib(count: float) -> float:
    """Bytes in GiB, as tables have them."""
    return round(count / 2**30, 2)


def used() -> int:
    """Bytes of the card that are not free, whoever took them; 0 without a card."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def fill(left: float) -> torch.Tensor:
    """Take the card's memory but for so many GiB, so that ComfyUI and others find a small card. Keep the result."""
    free, _ = torch.cuda.mem_get_info()
    return torch.empty(max(0, free - int(left * 2**30)), dtype=torch.uint8, device="cuda")


def most_used(run: Callable[[], Any]) -> int | None:
    """The most bytes of the card that were not free during `run`, as looked at every other millisecond.

    Allocators, CUDA graphs and dynamic VRAM each take memory that the others do not count.
    """
    if not torch.cuda.is_available():
        return None
    most, ended = [used()], threading.Event()

    def look() -> None:
        while not ended.wait(0.002):
            most[0] = max(most[0], used())

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    run()
    ended.set()
    looking.join()
    return most[0]


def use_dynamic_vram(index: int) -> None:
    """What ComfyUI's main does before it loads anything. SystemExit where comfy-aimdo does not work."""
    import comfy.memory_management
    import comfy.model_patcher
    from comfy_aimdo import control

    works = control.init_device(index)
    if not works:
        raise SystemExit("comfy-aimdo does not work on this device; leave --dynamic-vram out")
    control.set_log_info()  # it begins by saying every page fault
    comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
    comfy.memory_management.aimdo_enabled = True


def ceiling(dtype: torch.dtype, device: torch.device) -> float:
    """TFLOP/s of one large product of random numbers: the median of several, after as many to warm up."""
    side = _SIDE[device.type]
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    times = []
    for _ in range(2 * _PRODUCTS):
        settle()
        began = time.perf_counter()
        torch.mm(a, b)
        settle()
        times.append(time.perf_counter() - began)
    return 2 * side**3 / statistics.median(times[_PRODUCTS:]) / 1e12


def teraflop(run: Callable[[], Any]) -> float:
    """What `run` computes in products, convolutions and attention, in 10^12 operations; a multiply-add is two.

    `run` has to be eager: an operator that a compiler made is not looked into.
    """
    from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

    def attention(query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
        return sdpa_flop_count(query, key, value)

    on_cpu = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention}  # torch 2.11 does not know it
    with FlopCounterMode(display=False, custom_mapping=on_cpu) as counted:
        run()
    return counted.get_total_flops() / 1e12


def profile(run: Callable[[], Any]) -> None:
    """Print where the card's time went: milliseconds, launches and name of each kernel, the longest first.

    And how long it had nothing to do, by the kernel that was waited for.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    with profiled(activities=[ProfilerActivity.CUDA]) as found:
        run()
        settle()
    events = [event for event in found.events() if event.device_type == DeviceType.CUDA]
    spans = [(event.time_range.start, event.time_range.end, event.name) for event in events]
    ran = [(end - start, kernel) for start, end, kernel in spans]
    for title, times, most in (("in kernels", ran, 80), ("idle before kernels", idle(spans), 30)):
        print(f"{sum(time for time, _ in times) / 1e3:.2f} ms {title}, {len(times)} times", file=sys.stderr)
        rows: dict[str, list[float]] = {}
        for microseconds, kernel in times:
            rows.setdefault(kernel, []).append(microseconds)
        for kernel, each in sorted(rows.items(), key=lambda row: -sum(row[1]))[:most]:
            print(f"{sum(each) / 1e3:8.3f} {len(each):5} {max(each):8.1f} at most {kernel[:100]}", file=sys.stderr)


def idle(spans: Sequence[tuple[float, float, str]]) -> list[tuple[float, str]]:
    """How long nothing ran before some of these kernels: begin, end and name of each; they may overlap."""
    found, until = [], None
    for start, end, kernel in sorted(spans):
        if until is not None and start > until:
            found.append((start - until, kernel))
        until = end if until is None else max(until, end)
    return found


def main() -> int:
    """Print what the device is."""
    from nexfort_engine.quant.matmul import missing

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    print(json.dumps({"type": kind, "gpu": name(), "torch": torch.__version__, "no_fp8": missing(kind) or ""}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
