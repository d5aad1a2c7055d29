# SPDX-License-Identifier: Apache-2.0
"""Modes of torch: state of the process or thread that changes what the same code computes.

`current` reads those that artefacts and CUDA graphs can be told apart by. Some of them shape what is captured or
lowered and are part of an artefact's primary key; a worker lowers under the same (`applied`). Libraries ask for the
others in each call, so that only a CUDA graph keeps them. `unsupported` names what no artefact can follow.

docs/design/names_and_modes.md has the list with what is done for each.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize

from .traced_thread import before_traces

Values = tuple[Any, ...]


class Modes(NamedTuple):
    """Plain values. shaping: artefacts made under others are other artefacts. asked: a CUDA graph holds them."""

    shaping: Values
    asked: Values


class _Mode(NamedTuple):
    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any] | None


def current() -> Modes:
    """The modes of this process and thread now."""
    shaping, asked = _table()
    return Modes(
        (_default_device(), *[_ALIKE.get(value := one.read(), value) for one in shaping]),
        tuple([one.read() for one in asked]),
    )


def fingerprint() -> Values:
    """What of the modes of this thread code between blocks is likely to change; cheap enough to ask for each block."""
    hooks = nn.modules.module
    return (
        _grad(),
        autocasts(),
        torch.get_default_dtype(),
        _math(),
        _flash(),
        torch._C._get_deterministic_algorithms(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        len(hooks._global_forward_hooks) + len(hooks._global_forward_pre_hooks),
    )


def named(shaping: Values) -> dict[str, Any]:
    """The shaping modes by name, as JSON can hold them."""
    device, *others = shaping
    return {"default_device": device, **dict(zip((one.name for one in _table()[0]), others, strict=True))}


@contextlib.contextmanager
def applied(wanted: Mapping[str, Any]) -> Iterator[None]:
    """Inside the block the process has these shaping modes; what this torch does not know is left out.

    A thread waits while others are inside that need other modes: a capture beside a graph that is lowered in this
    process. A thread that is inside may ask for others in an inner block.
    """
    modes = {one: _plain(wanted[one.name]) for one in _table()[0] if one.write is not None and one.name in wanted}
    if threading.get_ident() in _turns.inside:
        before = _written(modes)
        try:
            yield
        finally:
            _written(before)
        return
    _turns.enter(modes)
    try:
        yield
    finally:
        _turns.leave()


def _written(modes: Mapping[_Mode, Any]) -> dict[_Mode, Any]:
    """Give the process these modes; what those that differed were before."""
    before = {one: was for one, value in modes.items() if _ALIKE.get(was := one.read(), was) != value}
    for one in before:
        assert one.write is not None, "only such are listed"
        one.write(modes[one])
    return before


class _Turns:
    """Threads that need the same modes are inside together; others wait until all of them left.

    inside: their numbers.
    """

    def __init__(self) -> None:
        self.inside: set[int] = set()
        self._free = threading.Condition()
        self._modes: Mapping[_Mode, Any] = {}
        self._before: Mapping[_Mode, Any] = {}

    def enter(self, modes: Mapping[_Mode, Any]) -> None:
        with self._free:
            self._free.wait_for(lambda: not self.inside or self._modes == modes)
            if not self.inside:
                self._modes, self._before = modes, _written(modes)
            self.inside.add(threading.get_ident())

    def leave(self) -> None:
        with self._free:
            self.inside.remove(threading.get_ident())
            if not self.inside:
                _written(self._before)
                self._free.notify_all()


_turns = _Turns()


def default_device(name: str | None) -> contextlib.AbstractContextManager[Any]:
    """What makes it the default device of the thread that traces."""
    return torch.device(name) if name is not None else contextlib.nullcontext()


def unsupported(device_types: Callable[[], set[str]]) -> str | None:
    """Why a call cannot run an artefact under the modes of this thread, or None.

    device_types: of the tensors of the call, asked only where it matters.
    """
    if autocasts() and (kinds := sorted(filter(_is_cast, device_types()))):
        return f"torch.autocast is on for {' and '.join(kinds)}; compiled code would not cast as it does"
    if torch._C._len_torch_function_stack() and (name := _function_mode()):
        return f"a torch function mode is active ({name}), which compiled code would bypass"
    if torch._C._len_torch_dispatch_stack() and (name := _dispatch_mode()):
        return f"a torch dispatch mode is active ({name}), which compiled code would bypass"
    if torch._C._get_tracing_state() is not None:
        return "it is being traced by torch.jit"
    if torch._C._functorch.maybe_current_level() is not None:
        return "it runs inside a transform of torch.func, which compiled code does not follow"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode gradients are on, which compiled code does not compute"
    if parametrize._cache_enabled:
        return "parametrize.cached() is on, and compiled code would compute the weights that it keeps anew"
    if (name := _replaced_call()) is not None:
        return f"the call of all modules was replaced (torch.nn.Module.{name}), which compiled code would bypass"
    hooks = nn.modules.module
    if hooks._global_forward_hooks or hooks._global_forward_pre_hooks:
        return "a forward hook for all modules is registered, which compiled code would bypass"
    return None


def _replaced_call() -> str | None:
    """What others put in the place of a part of nn.Module's call. Torch does so as well while any thread traces."""
    for name in CALL:
        module = getattr(before_traces(vars(nn.Module)[name]), "__globals__", {}).get("__name__")
        if not str(module).startswith("torch."):
            return name
    return None


CALL = ("__call__", "_wrapped_call_impl", "_call_impl", "__getattr__")  # of nn.Module; what a call goes through
autocasts: Callable[[], bool] = torch._C._is_any_autocast_enabled
_grad, _math, _flash = torch.is_grad_enabled, torch._C._get_math_sdp_enabled, torch._C._get_flash_sdp_enabled


def _is_cast(device_type: str) -> bool:
    try:
        return torch.is_autocast_enabled(device_type)
    except RuntimeError:  # a type of device that has none
        return False


def _function_mode() -> str | None:
    from torch.overrides import _get_current_function_mode_stack

    stack = [mode for mode in _get_current_function_mode_stack() if not _is_device(mode) and not _is_own(mode)]
    return type(stack[-1]).__qualname__ if stack else None


def _dispatch_mode() -> str | None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    stack = [mode for mode in _get_current_dispatch_mode_stack() if not _is_own(mode)]
    return type(stack[-1]).__qualname__ if stack else None


def _is_own(mode: object) -> bool:
    return type(mode).__module__.partition(".")[0] == __name__.partition(".")[0]


def _is_device(mode: object) -> bool:
    from torch.utils._device import DeviceContext

    return isinstance(mode, DeviceContext)


def _default_device() -> str | None:
    """The default device that `torch.device` as a context or `set_default_device` made; None without any."""
    if not torch._C._len_torch_function_stack():
        return None
    from torch.overrides import _get_current_function_mode_stack

    found = [mode.device for mode in _get_current_function_mode_stack() if _is_device(mode)]
    return str(found[-1]) if found else None


def _plain(value: Any) -> Any:
    """A value that went through JSON, as it was."""
    return tuple(value) if isinstance(value, list) else value


_ALIKE: dict[Any, Any] = {"none": "ieee"}  # precisions of products that are the same


# ---- the table -------------------------------------------------------------------------------------------------------


@functools.cache
def _table() -> tuple[tuple[_Mode, ...], tuple[_Mode, ...]]:
    """(shaping, asked): those that this torch has."""
    c = torch._C
    shaping = [
        _Mode("default_dtype", _dtype_name, lambda name: torch.set_default_dtype(getattr(torch, name))),
        _Mode(
            "deterministic",
            _deterministic,
            lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
        ),
        _fp32("matmul_precision", "cuda", "matmul"),
        _of("flash", c, "_get_flash_sdp_enabled", "_set_sdp_use_flash"),
        _of("memory_efficient", c, "_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
        _of("math", c, "_get_math_sdp_enabled", "_set_sdp_use_math"),
        _of("cudnn_attention", c, "_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
        _of("overrideable", c, "_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable"),
        _priority(),
        _of("mkldnn", c, "_get_mkldnn_enabled", "_set_mkldnn_enabled"),
        _Mode("mha_fastpath", torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    ]
    asked = [
        _Mode("grad", torch.is_grad_enabled, None),  # code between the blocks may ask
        _Mode("inference", torch.is_inference_mode_enabled, None),
        _of("math_reduces", c, "_get_math_sdp_allow_fp16_bf16_reduction", None),
        *(_of(name, c, f"_get_{name}", None) for name in _SWITCHES),
        *(_of(name, c, f"_get_cublas_{name}", None) for name in _REDUCTIONS),
        *(_fp32(f"{backend}_{op}", backend, op) for backend, op in _PRECISIONS),
    ]
    return tuple(one for one in shaping if one is not None), tuple(one for one in asked if one is not None)


_SWITCHES = ("cudnn_enabled", "cudnn_deterministic", "cudnn_benchmark", "mkldnn_deterministic")
_REDUCTIONS = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)
_PRECISIONS = (("generic", "all"), ("cuda", "conv"), ("cuda", "rnn"), ("mkldnn", "matmul"), ("mkldnn", "conv"))


def _of(name: str, owner: Any, getter: str, setter: str | None) -> _Mode | None:
    read, write = getattr(owner, getter, None), getattr(owner, setter, None) if setter else None
    return _Mode(name, read, write) if read is not None else None


def _fp32(name: str, backend: str, op: str) -> _Mode | None:
    read, write = (
        getattr(torch._C, "_get_fp32_precision_getter", None),
        getattr(torch._C, "_set_fp32_precision_setter", None),
    )
    if read is None or write is None:
        return None
    return _Mode(name, functools.partial(read, backend, op), functools.partial(write, backend, op))


def _priority() -> _Mode | None:
    read, write = getattr(torch._C, "_get_sdp_priority_order", None), getattr(torch._C, "_set_sdp_priority_order", None)
    if read is None or write is None:
        return None
    return _Mode("priority", lambda: tuple(read()), lambda order: write(list(order)))


def _dtype_name() -> str:
    return str(torch.get_default_dtype()).removeprefix("torch.")


def _deterministic() -> tuple[bool, bool]:
    c = torch._C
    return c._get_deterministic_algorithms(), c._get_deterministic_algorithms_warn_only()
