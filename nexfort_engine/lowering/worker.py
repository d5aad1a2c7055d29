# SPDX-License-Identifier: Apache-2.0
"""A lowering worker: one job a line on standard input, one answer a line on output. worker_main.py starts it.

With `--fork`, a device, the number of an open socket and how many kernels may be compiled beside others, it imports the
compiler once, and forks a worker for each socket that it is sent there.

A job names a file with a pickled graph (written by `pack`, in a private directory of the same user), the directory the
payload goes to, and the settings. Nothing of the host is imported here; operators come from installed packages only.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NoReturn

import torch

from ..cache.ephemeral import Scratch
from ..capture.types import Captured
from ..reporting.report import named
from ..system import compiler_processes, process_settings
from ..system.device_timer import taking_turns
from . import inductor, worker_lifetime
from .kernel_forks import Tokens, kernels_in_forks
from .kernel_sharing import compiled_once
from .preload import import_all

# imported by Inductor and Triton when they come to a first kernel
_LATE = (
    "sympy.physics.units",
    "torch._inductor.bounds",
    "torch._inductor.choices",
    "torch._inductor.codegen.cuda.device_op_overrides",
    "torch._inductor.codegen.memory_planning",
    "torch._inductor.fx_passes.efficient_conv_bn_eval",
    "torch._inductor.fx_passes.freezing_patterns",
    "torch._inductor.fx_passes.mkldnn_fusion",
    "torch.fx.experimental.validator",
    "triton.compiler.code_generator",
    "triton.experimental.gluon",
)
_NICENESS = 5  # give way to the process that captures and to what the user does
FORK, LINE = "--fork", "--line"
_tokens: Tokens | None = None  # for kernels that are compiled beside others; of all workers that are forked from one


def pack(captured: Captured) -> bytes:
    """A captured graph as bytes for a worker of this very torch."""
    from torch.fx._graph_pickler import GraphPickler, Options

    for node in captured.graph.graph.nodes:  # stack traces and module names are not needed to lower it
        node.meta = {"val": node.meta["val"]} if "val" in node.meta else {}
    captured.graph.meta.clear()
    options = Options(ops_filter=None, node_metadata_key_filter=None)
    return GraphPickler.dumps((captured.graph, captured.constants, captured.lasting), options)


def unpack(data: bytes) -> tuple[torch.fx.GraphModule, list[torch.Tensor], list[bool]]:
    """What `pack` packed, in a shape environment of its own: graph, literal tensors, and which weights last."""
    from torch._subclasses import FakeTensorMode
    from torch.fx._graph_pickler import GraphPickler
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    packed: Any = GraphPickler.loads(data, FakeTensorMode(shape_env=ShapeEnv()))
    graph, constants, lasting = packed
    graph.recompile()
    return graph, constants, lasting


def work(job: dict[str, Any]) -> None:
    """Lower one job. Raises what Inductor raises."""
    from ..guards import callbacks, collectives
    from .vec_isa_cache import remember_in

    callbacks.operator()
    collectives.operator()
    for name in job["modules"]:
        importlib.import_module(name)
    if job["probes"]:
        remember_in(Path(job["probes"]))
    device = torch.device(job["device"])
    if device.index:  # setting the device that is the current one anyway would make a context on it
        torch.cuda.set_device(device)
    file = Path(job["file"])
    measures = inductor.measures(job["options"])
    shared = Path(job["kernels"]) if job.get("kernels") else None
    once = compiled_once(shared) if shared is not None else contextlib.nullcontext()
    turns = taking_turns(shared) if shared is not None else contextlib.nullcontext()
    with turns if measures else process_settings.without_device(), once:
        graph, constants, lasting = unpack(file.read_bytes())
        file.unlink()
        # in the last two cases this process uses a device; what asked for one in passing can be forked to compile only
        forks = job["spread"] and FORK in sys.argv and not (device.index or measures)
        each = in_forks if forks and not torch.cuda.is_initialized() else inductor.in_turn
        if forks and _tokens is not None and device.type == "cuda":
            each = functools.partial(_with_kernels_beside, each, _tokens, file.parent, shared)
        inductor.lower_graph(graph, constants, Path(job["payload"]), job["options"], lasting, each)


def _with_kernels_beside(
    each: Callable[[inductor.Works], list[Any]], tokens: Tokens, place: Path, shared: Path | None, works: inductor.Works
) -> list[Any]:
    def one(work: Callable[[], Any]) -> Any:
        with kernels_in_forks(tokens, place, shared):
            return work()

    return each([functools.partial(one, work) for work in works])


def in_forks(works: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each gives, run at once: the first here, the others in processes that are forked from this one.

    Only where this process has one thread and no device. What is given has to be what JSON can hold. Raises what the
    first raises, or a RuntimeError with the failure of another; all have ended then.
    """
    children = [_forked(work) for work in works[1:]]
    answers: list[str | None] = []
    try:
        results = [work() for work in works[:1]]
    finally:
        for begun in children:
            answers.append(None if begun is None else _said(*begun))
    for text, work in zip(answers, works[1:], strict=True):
        if text is None:  # there was no process for it
            results.append(work())
            continue
        answer = json.loads(text) if text else {"error": "a process that was forked ended without an answer"}
        if "error" in answer:
            raise RuntimeError(answer["error"])
        results.append(answer["result"])
    return results


def _forked(work: Callable[[], Any]) -> tuple[int, int] | None:
    """A process that was forked for a work, and where it answers. None: no process or descriptor was to be had."""
    try:
        theirs, ours = os.pipe()
    except OSError:
        return None
    try:
        child = os.fork()
    except OSError:
        os.close(theirs)
        os.close(ours)
        return None
    if not child:
        os.close(theirs)
        _answer(work, ours)
    os.close(ours)
    return child, theirs


def _said(child: int, theirs: int) -> str:
    with os.fdopen(theirs, encoding="utf-8") as stream:
        answer = stream.read()
    os.waitpid(child, 0)
    return answer


def _answer(work: Callable[[], Any], to: int) -> NoReturn:
    """Be a process that does one thing, says what came of it, and ends."""
    try:
        try:
            answer = {"result": work()}
        except Exception as error:
            answer = {"error": named(error)}
        with os.fdopen(to, "w", encoding="utf-8") as stream:
            json.dump(answer, stream)
    finally:
        os._exit(0)


def serve(jobs: IO[str], answers: IO[str]) -> None:
    """Do jobs until there are no more."""
    for line in jobs:
        job = json.loads(line)
        compiler_processes.hung.update(job.get("hung") or {})
        try:
            work(job)
            answer: dict[str, Any] = {"ok": True}
        except Exception as error:
            # whatever went wrong is the answer: the parent reports it for the region
            answer = {"ok": False, "error": named(error)}
        answer["hung"] = compiler_processes.hung
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _import_compiler() -> None:
    """What a first lowering would import."""
    with process_settings.named_user():
        import torch._inductor.codegen.triton
        import torch._inductor.compile_fx
        import torch._inductor.runtime.caching
        import torch._inductor.runtime.triton_heuristics
        import torch._inductor.standalone_compile
        import torch.export._trace  # noqa: F401

        import_all(_LATE)


def _warm_up(device: str) -> None:
    """What a first lowering would import and find out. No device is touched: what is forked must not hold one."""
    from torch._inductor.runtime import triton_helpers  # noqa: F401  # all that the other thread needs is imported
    from torch._inductor.runtime.triton_compat import HAS_TRITON, triton_key

    with ThreadPoolExecutor(1) as beside:  # it ends before the fork: a forked process has the thread that forks alone
        # a hash of Triton's library takes more than a second, nearly all of it without Python's lock
        found = [beside.submit(triton_key), beside.submit(_load_driver, device)] if HAS_TRITON else []
        _import_compiler()
        from torch._inductor.codecache import torch_key
        from torch._inductor.codegen.common import init_backend_registration

        torch_key()
        init_backend_registration()
        _make_patterns(device)
        for one in found:
            one.result()


def _load_driver(device: str) -> None:
    """Have Triton compile and load its driver library, which each worker would do in the directory of its first job."""
    if device != "cuda" or not torch.cuda.is_available():
        return
    from torch._inductor.runtime.triton_helpers import set_driver_to_gpu

    with Scratch() as folder, process_settings.scoped_env(TRITON_CACHE_DIR=folder):
        set_driver_to_gpu()


def _make_patterns(device: str) -> None:
    """Inductor's attention patterns, made once a process; in the order and with the device of the first lowering."""
    from torch._inductor.fx_passes.fuse_attention import _sfdp_init
    from torch._inductor.fx_passes.pad_mm import _pad_mm_init
    from torch._subclasses import FakeTensorMode

    of = torch.device(device, 0) if device == "cuda" else torch.device(device)
    with process_settings.without_device(), FakeTensorMode():
        _pad_mm_init(of)
        _sfdp_init(of)


def _fork(device: str, control: int, kernels: int, shared: str) -> int:
    """One worker for each socket that comes over the socket `control`; ends when that is closed and they have ended.

    kernels: how many processes all of them may have at once besides, for kernels. shared: a folder that goes with them.
    """
    try:
        _warm_up(device)
        warm = True
    except Exception:
        # it was to save time; workers that start anew find the problem again if it is one, and answer with it
        warm = False
    global _tokens
    _tokens = Tokens(kernels)
    gc.freeze()  # a collection in a worker would copy the pages that it shares
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for workers that end
    with socket.socket(fileno=control) as line:
        while (come := socket.recv_fds(line, 1, 1))[0]:
            for own in come[1]:  # none where there was no descriptor for it
                with contextlib.suppress(OSError):  # nor a process: who waits for the worker sees its line end
                    if not os.fork():
                        _begin(own, line, device, warm)
                os.close(own)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    if shared:
        shutil.rmtree(shared, ignore_errors=True)
    return 0


def _begin(own: int, control: socket.socket, device: str, warm: bool) -> NoReturn:
    """Be a worker, in a process that was just forked from one that is warm or failed to be."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # compilers that it starts are waited for
        control.close()
        worker_lifetime.watch()
        if not warm or (device == "cuda" and torch.cuda._is_in_bad_fork()):
            # in the second case some import asked the CUDA runtime for its devices: no forked process can use them
            os.execv(sys.executable, [sys.executable, "-m", worker_lifetime.MAIN, LINE, str(own)])
        _serve_socket(own)
        status = 0
    finally:
        os._exit(status)


def _serve_socket(number: int) -> None:
    serve(os.fdopen(number, encoding="utf-8"), os.fdopen(os.dup(number), "w", encoding="utf-8"))


def main(arguments: list[str]) -> int:
    """Serve jobs until there are no more."""
    if hasattr(os, "nice") and arguments[:1] != [LINE]:  # that one was forked from one that did so
        os.nice(_NICENESS)
    if arguments[:1] == [FORK]:
        return _fork(arguments[1], int(arguments[2]), int(arguments[3]), arguments[4])
    _import_compiler()
    if arguments[:1] == [LINE]:
        _serve_socket(int(arguments[1]))
        os._exit(0)  # at once, as workers that were forked end
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # compilers print to standard output; answers must stay readable
    serve(sys.stdin, answers)
    return 0
