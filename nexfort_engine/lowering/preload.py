# SPDX-License-Identifier: Apache-2.0
"""The compiler imported ahead: seconds that a first step need not wait for, on threads beside what loads the model."""

from __future__ import annotations

import gc
import importlib
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import torch

from ..cache.ephemeral import Scratch
from ..cache.key import engine_source_hash
from ..reporting.resource_shortages import begun
from ..system.process_settings import inductor_scope
from ..system.yielding import switching_within

log = logging.getLogger("nexfort")

# imported by torch.export when it comes to a first graph
_TRACING = (
    "sympy.physics.units",
    "torch._export.passes._node_metadata_hook",
    "torch._export.passes.add_runtime_assertions_for_constraints_pass",
    "torch._export.passes.replace_autocast_with_hop_pass",
    "torch._export.passes.replace_set_grad_with_hop_pass",
    "torch._inductor.compiler_bisector",
    "torch._subclasses.schema_check_mode",
    "torch.export._trace",
    "torch.export._unlift",
    "torch.fx.experimental.validator",
)
_INDUCTOR, _LATE = "nexfort-import", "nexfort-import-late"
# seconds that other threads wait for Python: an operator beside an import takes 340 microseconds at the usual 5 ms and
# 130 to 190 so, the import 2.4 s and 3.3 (2 cores, 2026-11-28)
SWITCH = 0.00005
_LOOK = 0.1  # seconds between two looks at whether to go on waiting

_threads: dict[str, threading.Thread] = {}


def import_ahead() -> None:
    """Import Inductor. Once a process; where there is no thread for it, whoever needs it imports it.

    What it calls its cache's keys follows on another thread, which nobody waits for: hashes of the files of the engine,
    torch and Triton.
    """
    _once(_INDUCTOR, _import_inductor)


def import_tracing_ahead(names: Sequence[str] = (), idle: Callable[[], bool] = lambda: False) -> None:
    """Import what a first trace needs as well, behind `import_ahead`. Once a process.

    names: modules that are imported before that. idle: whether the host does nothing now. Then all objects are looked
        through for garbage at once: the imports make so many that Python would soon do it, for 0.4 s in a first prompt.
    """

    def work() -> None:
        try:
            if names:
                import_all(names)
        except Exception:  # whoever needs it is told what is wrong
            log.warning("Nexfort: importing the engine ahead failed", exc_info=True)
        import_all(_TRACING)
        if idle():
            gc.collect()

    _once(_LATE, work)


def wait_for_import(cancel: Callable[[], None] = lambda: None) -> None:
    """Let what is imported ahead be there: two threads that import Inductor may see half of one of its modules.

    cancel: raises to stop waiting.
    """
    for thread in list(_threads.values()):
        while thread.is_alive():
            cancel()
            thread.join(_LOOK)


def import_all(names: Iterable[str]) -> None:
    """Import modules; not every version of torch has all of them."""
    for name in names:
        with suppress(ImportError):
            importlib.import_module(name)


def _once(name: str, work: Callable[[], None]) -> None:
    if name not in _threads:
        thread = threading.Thread(target=_work, args=(work, _threads.get(_INDUCTOR)), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            log.debug("Nexfort: nothing is imported ahead: %s", error)
        else:
            _threads[name] = thread  # who finds it may wait for it


def _work(work: Callable[[], None], behind: threading.Thread | None) -> None:
    if behind is not None:
        behind.join()
    # in the scope, because importing Inductor writes to the environment and starts compiler processes
    try:
        with Scratch() as folder, inductor_scope(folder), switching_within(SWITCH):
            work()
    except (ImportError, OSError, RuntimeError) as error:  # an old torch, a full disk: the first call says what it is
        log.debug("Nexfort: importing the compiler ahead failed: %s", error)


def _import_inductor() -> None:
    from torch._inductor import CompiledArtifact, compile_fx, standalone_compile  # noqa: F401

    if (reason := begun("nexfort-hashes", _hash_ahead)) is not None:
        log.debug("Nexfort: nothing is hashed ahead: %s", reason)


def _hash_ahead() -> None:
    """What a first load asks once a process; more than a second, nearly all of it without Python's lock."""
    try:
        from torch._inductor.codecache import torch_key

        engine_source_hash()
        torch_key()
        if torch.cuda.is_available():
            from torch._inductor.runtime.triton_compat import HAS_TRITON, triton_key

            if HAS_TRITON:
                triton_key()
    except (ImportError, OSError):  # another version, a file that is gone: the first load says what is the matter
        log.debug("Nexfort: hashing ahead failed", exc_info=True)
