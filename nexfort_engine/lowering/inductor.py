# SPDX-License-Identifier: Apache-2.0
"""Graph -> artefact: Inductor run on a captured graph, into a directory of its own, and loaded from it again.

An artefact's payload *is* a private Inductor cache directory: generated code, compiled kernels and Triton's cubins all
land in it, so a later process finds everything by content and neither traces nor compiles. Weights are inputs, so the
payload holds none.

This file does not decide what is lowered (dispatch/region.py) nor where it is kept (cache/).
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from ..cache.os_errors import refusal
from ..capture.shape_recorder import Equalities, Limits
from ..capture.types import Captured
from ..config.pass_catalogue import PASSES
from ..graph.const_subgraph import take_out
from ..guards.shape_guards import Conditions
from ..kernels import known_to_inductor
from ..passes.registry import REWRITES, register, split
from ..passes.video_convolutions import more_at_once
from ..quant import card_figures
from ..system import torch_modes
from ..system.compiler_processes import bounded
from ..system.device_timer import by_the_device
from ..system.process_settings import inductor_scope, replaced, told_to_log
from ..system.traced_thread import own_pre_dispatch_modes
from .async_compile_pool import watched
from .graph_split import part
from .interleaved_loads import pairs_read_once
from .loaded_code import FoldedCode, Loaded, PreparingCode, PromptedCode, _WithConstants
from .prompt_subgraph import take_out_prompts
from .reduction_heuristics import whole_rows
from .subgraph_dedup import Folded, fold
from .traced_metadata import kept
from .vec_isa_cache import check_instructions, note_instructions, remembered_probes

log = logging.getLogger("nexfort")

CONSTANTS = "constants.safetensors"
_LIMITS = "limits.json"
_BEFORE, _PREPARATION = "before", "preparation.json"
_FOLDED, _PIECE = "folded.json", "piece_"
_TEMPORARY = "temporary"
_PROMPTED, _PROMPT = "prompted.json", "prompt_"
_WHOLE = "Nexfort: a graph could not be lowered in pieces, and is lowered as a whole"
Works = Sequence[Callable[[], list[str]]]


def in_turn(works: Works) -> list[list[str]]:
    """What each gives, one after another."""
    return [work() for work in works]


class LoweringFailed(Exception):
    """Inductor could not make an artefact that can be stored. The text is the reason for the report."""


def lower(captured: Captured, payload: Path, options: Mapping[str, object]) -> None:
    """Lower a captured graph into the directory `payload`; see lower_graph."""
    lower_graph(captured.graph, captured.constants, payload, options, captured.lasting)


def lower_graph(
    graph: torch.fx.GraphModule,
    constants: list[torch.Tensor],
    payload: Path,
    options: Mapping[str, object],
    lasting: Sequence[bool] = (),
    each: Callable[[Works], list[list[str]]] = in_turn,
) -> None:
    """Lower a graph with its literal tensors into the empty directory `payload`.

    options: Inductor settings by name, and the engine's own (passes/). lasting: of the weights, as in Captured. each:
    does the parts of the work, which need nothing of each other, and gives what they give.
    Raises LoweringFailed, and OSError where the system refuses what is needed; what else Inductor raises goes through.
    """
    with _plainly(payload):
        own, options = split(options)
        card_figures.use_told(own.get("card"))
        with torch_modes.applied(own.get("modes") or {}), own_pre_dispatch_modes():  # type: ignore[arg-type]
            _lower_graph(graph, constants, payload, options, own, lasting, each)


@contextmanager
def _plainly(payload: Path) -> Iterator[None]:
    """Inside, whatever fails because the system refuses what it needs is an OSError that says so."""
    with told_to_log() as noted:
        try:
            yield
        except Exception as error:
            if (found := refusal(error, noted, payload)) is not None:
                raise found from error
            raise
        if noted and (found := refusal(None, noted, payload)) is not None:
            raise found


def _lower_graph(
    graph: torch.fx.GraphModule,
    constants: list[torch.Tensor],
    payload: Path,
    options: Mapping[str, object],
    own: Mapping[str, object],
    lasting: Sequence[bool],
    each: Callable[[Works], list[list[str]]],
) -> None:
    equal = Equalities([node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"])
    for name, rewrite in REWRITES.items():
        if own.get(name):
            rewrite(graph)
    agreed = equal.texts()
    # in full precision a weight that is unpacked would lie beside its packed self
    larger = any(own.get(one.name) is True for one in PASSES if one.packs_weights)
    others, copies = own.get("prepare") is True, own.get("prepare_copies") is True
    before = take_out(graph, lasting, larger=larger, copies=copies, others=others) if others or copies else None
    left = [*lasting] if before is None else [*(lasting[i] for i in before.keeps), *[True] * before.gives]
    taken_out = own.get("prompt_once") and left
    prompted = take_out_prompts(graph, [*left, *[True] * len(constants)]) if taken_out else None
    graphs = {payload: graph} if before is None else {payload: graph, payload / _BEFORE: before.graph}
    for number, aside in enumerate(prompted.parts if prompted is not None else []):
        graphs[payload / f"{_PROMPT}{number}"] = aside.graph
    texts = [*agreed, *_lowered(graphs, options, own, each)]
    if prompted is not None:
        (payload / _PROMPTED).write_text(json.dumps(prompted.as_json()), encoding="utf-8")
    if before is not None:
        (payload / _PREPARATION).write_text(json.dumps(before.as_json()), encoding="utf-8")
    if texts:
        (payload / _LIMITS).write_text(json.dumps(texts), encoding="utf-8")
    if constants:
        from safetensors.torch import save_file

        tensors = {str(i): t.detach().contiguous().cpu() for i, t in enumerate(constants)}
        save_file(tensors, str(payload / CONSTANTS))


def _lowered(
    graphs: Mapping[Path, torch.fx.GraphModule],
    options: Mapping[str, object],
    own: Mapping[str, object],
    each: Callable[[Works], list[list[str]]],
) -> list[str]:
    """Lower graphs, each into its place and in pieces where that saves time; what that takes for granted about sizes.

    All of it is handed to `each` at once: who forks processes for it can do so only until something was lowered here.
    """
    # begun before the pieces: what is asked of sizes is noted once, and pieces that fail have asked it too
    nodes = [node for graph in graphs.values() for node in graph.graph.nodes]
    limits = Limits([node.meta["val"] for node in nodes if node.op == "placeholder"])

    def lowered(graph: torch.fx.GraphModule, place: Path) -> list[str]:
        _inductor(graph, place, options, own)
        return limits.texts()

    def works(folds: Mapping[Path, Folded]) -> Works:
        """All there is to lower; the pieces of those that are folded."""
        found: list[tuple[torch.fx.GraphModule, Path]] = []
        for place, graph in graphs.items():
            pieces = folds[place].pieces if place in folds else []
            found += [(piece, place / f"{_PIECE}{number}") for number, piece in enumerate(pieces)] or [(graph, place)]
        return [functools.partial(lowered, *one) for one in found]

    folds = _folds(graphs) if own.get("fold") else {}
    try:
        found = each(works(folds))
    except Exception as error:
        if not folds or refusal(error, (), next(iter(graphs))) is not None:
            raise
        # pieces are to save time: what goes wrong with them is no reason to run eager, the whole may do
        log.warning(_WHOLE, exc_info=True)
        for place in graphs:
            shutil.rmtree(place, ignore_errors=True)
        folds, found = {}, in_turn(works({}))
    for place, folded in folds.items():
        (place / _FOLDED).write_text(json.dumps(folded.as_json()), encoding="utf-8")
    return list(dict.fromkeys(text for texts in found for text in texts))


def _folds(graphs: Mapping[Path, torch.fx.GraphModule]) -> dict[Path, Folded]:
    """Those of the graphs that repeat themselves or are large, in pieces."""
    found = {}
    for place, graph in graphs.items():
        try:
            folded = fold(graph) or part(graph)
        except Exception:
            log.warning(_WHOLE, exc_info=True)
            continue
        if folded is not None:
            found[place] = folded
    return found


def _inductor(
    graph: torch.fx.GraphModule, payload: Path, options: Mapping[str, object], own: Mapping[str, object]
) -> None:
    """Lower one graph into a directory."""
    for node in graph.graph.nodes:
        # Inductor looks for the capture's shape environment under this name alone. Without it every size is made
        # anew from the example, and two sizes that happen to be equal there become one.
        if "val" in node.meta:
            node.meta["example_value"] = node.meta["val"]
    inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    (payload / _TEMPORARY).mkdir(parents=True, exist_ok=True)
    from torch._inductor import compile_fx, standalone_compile  # noqa: F401  what starts compilers is bounded below

    rows = whole_rows(measured=measures(options)) if own.get("whole_rows") else nullcontext()
    pairs = pairs_read_once() if own.get("rotary") else nullcontext()
    known = known_to_inductor(convolutions=own.get("convolution") is True)
    clock = by_the_device() if measures(options) else nullcontext()
    scope, written = inductor_scope(payload, options), _all_written()
    with ExitStack() as stack:
        for one in (scope, _compiling(payload), _libraries_anew(), kept(), rows, pairs, known, clock, written):
            stack.enter_context(one)
        stack.enter_context(torch.no_grad())
        patches = {"triton.autotune_at_compile_time": measures(options), **more_at_once(graph)}
        standalone_compile(graph, inputs, dynamic_shapes="from_graph", options={"config_patches": patches})
        _check_complete(payload)
        note_instructions(payload)
    # Triton's compiled kernels are inside the stored graph too and are laid out again on load, with paths of that place
    for name in ("triton", "locks", _TEMPORARY):
        shutil.rmtree(payload / name, ignore_errors=True)


@contextmanager
def _compiling(payload: Path) -> Iterator[None]:
    """Inside, compilers work for Inductor, none of which is waited for without end."""
    with bounded(payload / _TEMPORARY), watched(), remembered_probes():
        yield


@contextmanager
def _libraries_anew() -> Iterator[None]:
    """Inside, Inductor compiles each kernel in C++, also one that it has loaded for another graph.

    It knows a loaded library by its source and writes the source alone then. Each process would compile what it loads.
    """
    from torch._inductor.codecache import CppCodeCache, CppPythonBindingsCodeCache

    with ExitStack() as stack:
        for kind in (CppCodeCache, CppPythonBindingsCodeCache):
            stack.callback(kind.cache.update, dict(kind.cache))
            kind.cache.clear()
        yield


@contextmanager
def _all_written() -> Iterator[None]:
    """Raises what kept Inductor from writing a file, which as of torch 2.11 it only logs, at the end of the block."""
    from torch._functorch._aot_autograd import autograd_cache
    from torch._inductor import codecache

    failures: list[OSError] = []

    def noted(write: Callable[..., None]) -> Callable[..., None]:
        def noting(*given: Any, **more: Any) -> None:
            try:
                write(*given, **more)
            except OSError as error:
                failures.append(error)
                raise

        return noting

    with ExitStack() as stack:
        for module in (codecache, autograd_cache):
            if hasattr(module, "write_atomic"):
                stack.enter_context(replaced(module, "write_atomic", noted(module.write_atomic)))
        try:
            yield
        except Exception as error:
            if failures and not isinstance(error, OSError):  # such as that nothing complete was stored
                raise failures[0] from error
            raise
        if failures:
            raise failures[0]


def take_limits(payload: Path, manifest: dict[str, Any]) -> None:
    """Move what lowering took for granted about sizes from the payload to the conditions in its manifest.

    Raises LoweringFailed where that cannot be checked.
    """
    file = payload / _LIMITS
    if not file.exists():
        return
    texts = json.loads(file.read_text(encoding="utf-8"))
    file.unlink()
    conditions = manifest["conditions"]
    conditions["guards"] = [*conditions["guards"], *(t for t in texts if t not in conditions["guards"])]
    free = Conditions(**conditions).unbound()
    if free:
        raise LoweringFailed(
            f"what its code takes for granted about sizes cannot be checked: no input has these alone: {sorted(free)}"
        )


def measures(options: Mapping[str, object]) -> bool:
    """Whether lowering with these settings runs kernels to compare them, and so needs the device."""
    return any(options.get(name) for name in ("max_autotune", "max_autotune_gemm", "coordinate_descent_tuning"))


def _check_complete(payload: Path) -> None:
    entries = list((payload / "aotautograd").iterdir()) if (payload / "aotautograd").is_dir() else []
    if len(entries) != 1:
        raise LoweringFailed(
            f"Inductor stored {len(entries)} compiled graphs where one was expected: the graph holds something that "
            "cannot be written to disk"
        )


def load(payload: Path, options: Mapping[str, object], modules: list[str], weights: int = 0) -> Loaded:
    """Load an artefact: a function of the list of its inputs (see Captured), which gives the list of its outputs.

    modules: Python modules that register operators the graph calls; imported first. weights: how many of the inputs
    come before the literal tensors of the code. Raises OSError where the system refuses what loading needs.
    """
    with _plainly(payload):
        return _load(payload, options, modules, weights)


def _load(payload: Path, options: Mapping[str, object], modules: list[str], weights: int) -> Loaded:
    for name in modules:
        importlib.import_module(name)
    constants, rows = _constants(payload), payload / _PREPARATION
    own, options = split(options)
    register(own)
    if not rows.exists():
        return _with_constants(_loaded(payload, options), constants, weights)
    told = json.loads(rows.read_text(encoding="utf-8"))
    before, code = _loaded(payload / _BEFORE, options), _loaded(payload, options)
    given = len(told["keeps"]) + told["gives"]
    return PreparingCode(_with_constants(code, constants, given), before, weights, told["takes"], told["keeps"])


def _loaded(payload: Path, options: Mapping[str, object]) -> Callable[..., Any]:
    file = payload / _PROMPTED
    if not file.exists():
        return _in_pieces(payload, options)
    told = json.loads(file.read_text(encoding="utf-8"))
    parts = [_in_pieces(payload / f"{_PROMPT}{number}", options) for number in range(len(told["parts"]))]
    return PromptedCode(_in_pieces(payload, options), parts, told)


def _in_pieces(payload: Path, options: Mapping[str, object]) -> Callable[..., Any]:
    file = payload / _FOLDED
    if not file.exists():
        return _code(payload, options)
    told = json.loads(file.read_text(encoding="utf-8"))
    return FoldedCode([_code(payload / f"{_PIECE}{number}", options) for number in range(told["pieces"])], told)


def _code(payload: Path, options: Mapping[str, object]) -> Callable[..., Any]:
    # Nothing is compiled here, so Inductor must not start its pool of compiler processes: sixteen new interpreters
    # were measured to slow the next twenty steps by a quarter. Nor does it need headers compiled: 0.7 s.
    options = {**options, "compile_threads": 1, "cpp_cache_precompile_headers": False}
    with inductor_scope(payload, options), remembered_probes():
        from torch._inductor import CompiledArtifact

        check_instructions(payload)
        return CompiledArtifact.load(path=str(payload), format="unpacked")


def _with_constants(artefact: Callable[..., Any], constants: list[torch.Tensor], weights: int) -> Loaded:
    return _WithConstants(artefact, constants, weights) if constants else lambda inputs: artefact(*inputs)


def _constants(payload: Path) -> list[torch.Tensor]:
    file = payload / CONSTANTS
    if not file.exists():
        return []
    from safetensors.torch import load_file

    tensors = load_file(str(file))
    return [tensors[str(i)] for i in range(len(tensors))]
