# SPDX-License-Identifier: Apache-2.0
"""Every process-wide setting the engine touches, set for a scope and put back exactly.

Three scopes: environment variables, Inductor's settings while lowering or loading, and `torch.backends` while
a model runs. Nothing here is set for good, nothing is imported from Inductor before a scope needs it, and no
policy lives here: which values to use is `config/compile_config.py`'s business.
"""

from __future__ import annotations

import functools
import getpass
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from .shared_settings import HELD
from .traced_thread import kept_to_its_thread, modules_of_others_left

logger = logging.getLogger(__name__)

DISABLE_VARIABLE = "NEXFORT_DISABLE"
WAIT_VARIABLE = "NEXFORT_WAIT"
DISK_VARIABLE = "NEXFORT_GRAPH_CACHE"  # the old engine's name; its users set it to 0 or 1
_OFF_WORDS = ("", "0", "false", "no", "off")

# What every lowering and loading needs: local caches on, nothing sent to or read from a remote cache.
_INDUCTOR_BASE: dict[str, object] = {
    "fx_graph_cache": True,
    "fx_graph_remote_cache": False,
    "autotune_local_cache": True,
    "autotune_remote_cache": False,
    "bundled_autotune_remote_cache": False,
    "bundle_triton_into_fx_graph_cache": True,
    "freezing": False,
    # kernels of kernels/ are launched as Inductor's own are, and have a name for each way in which they are compiled
    "use_static_cuda_launcher": True,
    "static_launch_user_defined_triton_kernels": True,
    "triton.unique_user_kernel_names": True,
}
# of those parts of Inductor that write to its cache
_CACHE_LOGGERS = ("torch._inductor.codecache", "torch._functorch._aot_autograd.autograd_cache")
_CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_FUNCTORCH_BASE: dict[str, object] = {"enable_autograd_cache": True, "enable_remote_autograd_cache": False}

_SNAPSHOT_PREFIXES = ("TORCH", "TRITON", "INDUCTOR", "NEXFORT", "PYTORCH", "CUBLAS")

# Inductor's settings and the environment belong to the process, so two scopes with different directories must
# not overlap. Re-entrant, because loading one artefact may lower another.
_inductor_lock = threading.RLock()
_unsupported: set[str] = set()


def disabled() -> bool:
    """Whether NEXFORT_DISABLE asks for a pass-through; read afresh on each call."""
    return os.environ.get(DISABLE_VARIABLE, "").strip().lower() not in _OFF_WORDS


def waits() -> bool:
    """Whether NEXFORT_WAIT asks nodes to wait for what is compiled; read afresh on each call."""
    return os.environ.get(WAIT_VARIABLE, "").strip().lower() not in _OFF_WORDS


def keeps_nothing() -> bool:
    """Whether NEXFORT_GRAPH_CACHE=0 asks for no artefacts on disk; read afresh on each call. Unset means 1."""
    text = os.environ.get(DISK_VARIABLE, "").strip().lower()
    return text != "" and text in _OFF_WORDS


@contextmanager
def scoped_env(**values: str | os.PathLike[str] | None) -> Iterator[None]:
    """Set environment variables for the block; None removes one. What was absent is absent again afterwards.

    Takes no lock, since a block may wait for other threads: do not open two for one variable at the same
    time.
    """
    before = {name: os.environ.get(name) for name in values}
    try:
        for name, value in values.items():
            _put_env(name, None if value is None else os.fspath(value))
        yield
    finally:
        for name, old in before.items():
            _put_env(name, old)


def _numbers_stay_numbers() -> AbstractContextManager[None]:
    from torch.fx.passes import _tensorify_python_scalars as turning

    if hasattr(turning, "_is_tensorify_enabled"):  # torch 2.14: it reads the variable once, for all that compile
        return replaced(turning, "_is_tensorify_enabled", lambda: False)
    return scoped_env(TENSORIFY_PYTHON_SCALARS="0")


@contextmanager
def inductor_scope(cache_dir: str | os.PathLike[str], options: Mapping[str, object] | None = None) -> Iterator[None]:
    """Let Inductor work inside `cache_dir` with `options` (names of its config), then undo all of it.

    Triton's files land in `cache_dir`/triton. One thread at a time; the same thread may enter again. Code of
    others that compiles with Inductor in another thread meanwhile writes into `cache_dir` too: that is
    harmless to both.
    """
    with _inductor_lock, modules_of_others_left(), ExitStack() as stack:
        # TRITON_CACHE_DIR is removed, not set: Inductor then derives one per device below cache_dir, and what
        # it writes into the variable itself is undone with the rest.
        stack.enter_context(named_user())
        stack.enter_context(scoped_env(TORCHINDUCTOR_CACHE_DIR=cache_dir, TRITON_CACHE_DIR=None, TORCH_WARM_POOL="0"))
        # A pass for numbers that a graph is given (no capture has such inputs) fails, as of torch 2.11, on one made of
        # a size that no node of the graph gives, such as the scale that enlarges all frames of a video but the first.
        stack.enter_context(_numbers_stay_numbers())
        inductor_config, functorch_config = _compiler_configs()
        # Inductor's compiler processes, where it starts some, are not told its settings. A kernel of kernels/ that they
        # compiled otherwise would be compiled again by each process that loads it: three seconds for one in Gluon.
        # Set when this process has read its own.
        stack.enter_context(
            scoped_env(
                TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER="1",
                TORCHINDUCTOR_STATIC_LAUNCH_USER_DEFINED_TRITON_KERNELS="1",
            )
        )
        stack.enter_context(_patched(inductor_config, {**_INDUCTOR_BASE, **(options or {})}))
        stack.enter_context(_patched(functorch_config, _FUNCTORCH_BASE))
        yield


@contextmanager
def told_to_log() -> Iterator[list[OSError]]:
    """The errors of the system that Inductor catches on this thread inside the block, to go on without its cache.

    Without what it then did not write there is no artefact. Its log does not have them, as whoever asks has.
    """
    found: list[OSError] = []
    thread = threading.get_ident()

    def note(record: logging.LogRecord) -> bool:
        caught = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        given = record.args if isinstance(record.args, tuple) else ()
        errors = [error for error in (caught, *given) if isinstance(error, OSError)]
        if errors and record.thread == thread:
            found.extend(errors)
            return False
        return True

    loggers = [logging.getLogger(name) for name in _CACHE_LOGGERS]
    for one in loggers:
        one.addFilter(note)
    try:
        yield found
    finally:
        for one in loggers:
            one.removeFilter(note)


@contextmanager
def named_user() -> Iterator[None]:
    """Let the user have a name inside the block: torch asks for one when Inductor is imported, and fails without.

    A container may run as a number that no file of users knows.
    """
    with _inductor_lock, scoped_env(**_name_of_user()):
        yield


@functools.cache
def _name_of_user() -> dict[str, str]:
    """The variable that names the user; empty where there is a name."""
    try:
        getpass.getuser()
    except Exception:  # KeyError, later OSError, and ImportError where there are no users at all
        return {"USER": f"user-{os.getuid() if hasattr(os, 'getuid') else 0}"}
    return {}


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """An attribute has another value in the block, which is in `inductor_scope` or where no other thread uses it."""
    # as it stands there: what a class gives for a static method's name is the function alone
    before = getattr(owner, "__dict__", {}).get(name, getattr(owner, name))
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def tracing_scope(*, alike: bool = False) -> Iterator[None]:
    """Torch's settings while a block is exported. alike: whether it does the same with the same sizes many times.

    torch.export switches oneDNN and NNPACK off for the process, to keep decompositions of recurrent layers out of its
    graphs; a model that runs eagerly in another thread meanwhile would round differently, so here it does not. The
    cache of fake tensors is off unless much is `alike`: with free sizes filling it costs more than it saves, two fifths
    of the capture of one layer. Of ten equal ones it saves a quarter to a third. And no stack trace is made for each
    operator, a tenth of a capture, which nobody would read. No garbage is collected, whose finalizers are code of
    others that would count as the block's. Which library a convolution is for (NNPACK takes batches of 16 and more, on
    one thread) is asked without binding its sizes to the answer. And numpy finds the root of a number that depends on
    sizes, by the method that it looks for on what it does not know. What a trace changes it changes for its own thread.
    """
    with named_user():
        import torch._dynamo.config
        import torch.export._trace
        import torch.fx.proxy

    replaced = [
        (torch.export._trace, "_ignore_backend_decomps", nullcontext),
        (torch.fx.proxy, "CapturedTraceback", _NoTraceback),
        (torch._C, "_select_conv_backend", _unbound(getattr(torch._C, "_select_conv_backend", None))),
    ]
    with _patched(torch._dynamo.config, {"fake_tensor_cache_enabled": alike}), ExitStack() as stack:
        stack.enter_context(without_collection())
        stack.enter_context(kept_to_its_thread())
        for module, name, value in replaced:
            if hasattr(module, name):
                stack.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, value)
        if not hasattr(torch.SymFloat, "sqrt") and hasattr(torch, "_sym_sqrt"):
            torch.SymFloat.sqrt = torch._sym_sqrt  # type: ignore[attr-defined]
            stack.callback(delattr, torch.SymFloat, "sqrt")
        yield


def _unbound(choose: Any) -> Callable[..., Any]:
    """A choice between equal results, made without taking anything for granted about the sizes of its input."""

    def chosen(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("input", args[0] if args else None)
        env = getattr(getattr(given, "fake_mode", None), "shape_env", None)
        with env.suppress_guards() if env is not None else nullcontext():
            return choose(*args, **kwargs)

    return chosen


class _NoTraceback:
    """In the place of torch's stack traces, whatever is asked of one."""

    @staticmethod
    def extract(*_: Any, **__: Any) -> _NoTraceback:
        return _NoTraceback()

    def __getattr__(self, _: str) -> Callable[..., list[Any]]:
        return lambda *_, **__: []


@contextmanager
def without_device() -> Iterator[None]:
    """Lower for a GPU without touching it, for a process that only compiles. Not for one in which kernels run.

    A context costs about half a GiB of the device's memory, and Inductor makes one in passing: for fake tensors, whose
    backward pass would want it, for literals of the graph and of its own patterns, to trace its patterns of random
    permutations (which no backbone has; they are left out), and to load each kernel as soon as it is compiled. What is
    only asked about the device (its name, its figures) makes none.
    """
    import torch
    import torch._subclasses.fake_tensor as fake_tensor
    from torch._inductor.fx_passes import misc_patterns
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    nothing, always = (lambda *_: None), property(lambda _: True)
    replaced: list[tuple[Any, str, object]] = [
        (fake_tensor, "init_gpu_context", nothing),
        (CachingAutotuner, "_make_launchers", nothing),
        (misc_patterns, "_misc_patterns_init", nothing),
        (fake_tensor.FakeTensorMode, "avoid_device_init", always),  # literals stay on the CPU, as if there was no GPU
        # that mode then counts devices, after which a forked process could not ask about them
        (torch._C, "_ensureCUDADeviceGuardSet", nothing),
        # AOTAutograd keeps the generators as they are; reading a device's asks its stream whether it is capturing
        (torch.cuda, "get_rng_state", lambda *_: torch.empty(0, dtype=torch.uint8)),
        (torch.cuda, "set_rng_state", nothing),
    ]
    with ExitStack() as stack:
        for owner, name, value in replaced:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


def supported_options(options: Mapping[str, object]) -> dict[str, object]:
    """`options` without the names that this torch's Inductor does not have; each is logged once."""
    return _known(_compiler_configs()[0], options)


@contextmanager
def backend_scope(
    *,
    conv_benchmark: bool | None = None,
    matmul_allow_tf32: bool | None = None,
    matmul_allow_fp16_accumulation: bool | None = None,
    conv_allow_tf32: bool | None = None,
) -> Iterator[None]:
    """Hold what torch keeps for the process at these values; None leaves one as it is.

    cuDNN's benchmarking, TF32 in products and in convolutions, and sums of products of float16 in float16.

    They belong to the process: a model running eagerly in another thread sees them while the block lasts.
    Where blocks overlap, the latest still open decides, and the last to leave restores what the first one
    found.
    """
    wanted = {
        "conv_benchmark": conv_benchmark,
        "matmul_allow_tf32": matmul_allow_tf32,
        "matmul_allow_fp16_accumulation": matmul_allow_fp16_accumulation,
        "conv_allow_tf32": conv_allow_tf32,
    }
    with ExitStack() as stack:
        for name, value in wanted.items():
            if value is not None:
                stack.callback(HELD[name].leave, HELD[name].enter(value))
        yield


@contextmanager
def without_collection() -> Iterator[None]:
    """No garbage is collected inside the block: finalizers are code of others, and run wherever the thread is."""
    ticket = HELD["collection"].enter(False)
    try:
        yield
    finally:
        HELD["collection"].leave(ticket)


@contextmanager
def rare_full_collections() -> Iterator[None]:
    """All objects are seldom looked through for garbage inside the block.

    Captures and artefacts are many objects that stay. Python would look through everything once or more while they are
    made, 0.2 to 0.5 seconds each beside a loaded ComfyUI, and finds next to nothing.
    """
    ticket = HELD["full_collections"].enter(False)
    try:
        yield
    finally:
        HELD["full_collections"].leave(ticket)


@contextmanager
def uncompiled_under_modes() -> Iterator[None]:
    """Inside the block what torch.compile made runs as it was written, in every thread.

    Under a mode that watches operators it does so anyway. But torch 2.14 and newer raise there, where the whole graph
    was asked for, which `flex_attention` does of itself.
    """
    import torch

    if not hasattr(torch._C._dynamo.eval_frame, "set_fullgraph_compiled_frame_count"):
        yield
        return
    ticket = HELD["uncompiled"].enter(True)
    try:
        yield
    finally:
        HELD["uncompiled"].leave(ticket)


def snapshot(*, compiler: bool = False) -> dict[str, object]:
    """All process-wide settings that the engine could touch, as comparable plain values.

    Variables that begin with TORCH, PYTORCH, TRITON, INDUCTOR, CUBLAS or NEXFORT, the flags of
    `torch.backends`, the precision and determinism switches; with `compiler` also Inductor's and functorch's
    settings (imports both). A getter that refuses is recorded by its error, so that a change from or to it
    shows too. Starts no device.
    """
    found: dict[str, object] = {
        f"env.{name}": value for name, value in os.environ.items() if name.startswith(_SNAPSHOT_PREFIXES)
    }
    for name, getter in _torch_getters().items():
        try:
            found[name] = getter()
        except RuntimeError as error:  # torch refuses to read TF32 where old and new switches were mixed
            found[name] = f"unreadable: {str(error).splitlines()[0]}"
    if compiler:
        for module in _compiler_configs():
            found.update({f"{module.__name__}.{k}": repr(v) for k, v in module.get_config_copy().items()})
    found["sys.path"] = tuple(sys.path)
    return found


def _compiler_configs() -> tuple[Any, Any]:
    # Importing Inductor writes its default directory into the environment; a look must not leave that behind.
    before = {name: os.environ.get(name) for name in _CACHE_VARIABLES}
    with scoped_env(**before):
        import torch._functorch.config as functorch_config
        import torch._inductor.config as inductor_config
    return inductor_config, functorch_config


def _put_env(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _known(module: Any, options: Mapping[str, object]) -> dict[str, object]:
    found = {name: value for name, value in options.items() if hasattr(module, name)}
    for name in options.keys() - found.keys():
        if f"{module.__name__}.{name}" not in _unsupported:
            _unsupported.add(f"{module.__name__}.{name}")
            logger.warning("Nexfort: this torch has no %s.%s; going on without it", module.__name__, name)
    return found


@contextmanager
def _patched(module: Any, options: Mapping[str, object]) -> Iterator[None]:
    with module.patch(_known(module, options)):
        yield


def _torch_getters() -> dict[str, Any]:
    import torch

    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    getters: dict[str, Any] = {
        "float32_matmul_precision": torch.get_float32_matmul_precision,
        "deterministic": torch.are_deterministic_algorithms_enabled,
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled,
        "default_dtype": lambda: str(torch.get_default_dtype()),
        "num_threads": torch.get_num_threads,
        "mkldnn.enabled": lambda: torch.backends.mkldnn.enabled,
        "sdp.flash": cuda.flash_sdp_enabled,
        "sdp.mem_efficient": cuda.mem_efficient_sdp_enabled,
        "sdp.math": cuda.math_sdp_enabled,
        "sdp.cudnn": cuda.cudnn_sdp_enabled,
        "sdp.fp16_bf16_reduction_math": cuda.fp16_bf16_reduction_math_sdp_allowed,
    }
    for name in ("enabled", "benchmark", "deterministic", "allow_tf32", "benchmark_limit"):
        getters[f"cudnn.{name}"] = lambda name=name: getattr(cudnn, name)
    for name in (
        "allow_tf32",
        "fp32_precision",
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_accumulation",
    ):
        if _has(cuda.matmul, name):
            getters[f"cuda.matmul.{name}"] = lambda name=name: getattr(cuda.matmul, name)
    return getters


def _has(owner: object, name: str) -> bool:
    try:
        return hasattr(owner, name)
    except RuntimeError:
        return True  # it is there and refuses to be read now
