# SPDX-License-Identifier: Apache-2.0
"""`compile(module)`: the same module, whose calls run compiled regions.

The result shares the original's attribute table, so that weights, submodules, hooks and later changes to either are one
and the same; it is an instance of the original's class, has the same state_dict keys, and stays usable eagerly through
`.uncompiled()`. Nothing is compiled before the first call.
"""

from __future__ import annotations

import copy
import functools
import logging
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .cache import ephemeral
from .cache.paths import base_root
from .cache.store import Store, default_root
from .config.compile_config import CompileConfig
from .engine import Engine
from .modules.boundaries import OwnForward
from .modules.tree import compiled_elsewhere, once_a_class, replaced_forward
from .quant.quantized_linear import holds_quantised
from .reporting.report import Report
from .runtime.engine_state import Also, HostHooks
from .system.process_settings import disabled, keeps_nothing

log = logging.getLogger("nexfort")

UNQUANTISED = (
    "no weight is quantised, and all of them are used as they are; expected nexfort_engine.quantize_pipe before "
    "compile_pipe, or a quantised checkpoint"
)
_stores: dict[tuple[Path, Path | None], Store] = {}


def store_at(root: Path | None = None) -> Store:
    """The store in a directory (default: the user's) over the base cache if there is one, one object a process.

    With NEXFORT_GRAPH_CACHE=0 it is one in a temporary directory, which goes with the process, whatever `root` is.
    """
    base = base_root()
    if keeps_nothing():
        root, base = ephemeral.directory(), None
    root = root or default_root()
    if (root, base) not in _stores:
        _stores[root, base] = Store(root, base)
    return _stores[root, base]


def compile(
    module: nn.Module, *, options: str | Mapping[str, Any] | CompileConfig | None = None, dynamic: bool = True
) -> Any:
    """Compile a diffusion backbone, or any module, region by region.

    options: a dict or JSON text such as {"mode": "O2", "memory_format": "channels_last"}; see CompileConfig.
    dynamic: sizes stay free, so that one artefact serves every batch, resolution and prompt length.

    Returns a module that is an instance of `type(module)` with the same state_dict, whose calls give results of the
    same shapes and dtypes on the same device; `.report` says what happened, `.uncompiled()` gives the original. With
    memory_format channels_last the module's own weights are converted, which changes their layout and no value. Raises
    TypeError for what is no module, ValueError for options that are wrong.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"nexfort_engine.compile got a {type(module).__qualname__}, expected a torch.nn.Module such as a UNet or a "
            "transformer; for a diffusers pipeline use nexfort_engine.compile_pipe, for a function torch.compile"
        )
    config = CompileConfig.parse(options, dynamic=dynamic)
    compiled = compile_as(module, config)
    say_if_unquantised(config, [module], [compiled.report])
    return compiled


def say_if_unquantised(config: CompileConfig, modules: Iterable[nn.Module], reports: Iterable[Report]) -> None:
    """Where the mode has `quant` and none of the networks that belong together has packed weights, say so."""
    if "quant" in config.tokens and not holds_quantised(modules):
        for report in reports:
            report.inactive("quant", UNQUANTISED)


def compile_as(module: nn.Module, config: CompileConfig, *, also: Also | None = None) -> Any:
    """`compile` for hosts, which know of calls that a first one does not show; `also` as for HostHooks."""
    original = module.uncompiled() if isinstance(module, CompiledModule) else module
    if config.memory_format == "channels_last" and not config.disable:
        original.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    engine = Engine(original, config, store_at(), hooks=HostHooks() if also is None else HostHooks(also=also))
    # one that stands before the class's has to call that, where the engine begins
    unreached = replaced_forward(original) is not None and not OwnForward(original).places()
    if unreached or compiled_elsewhere(original):
        reason = "its forward was replaced before it was compiled, by one that never calls the module's own"
        if compiled_elsewhere(original):
            reason = "torch.compile compiled it already; give nexfort_engine.compile the module as it was before"
        engine.report.eager("(whole module)", reason)
        log.warning("Nexfort: %s runs eager: %s", type(original).__name__, reason)
    weight = next(original.parameters(), None)
    if not (config.disable or disabled()):
        engine.prepare(weight.device if weight is not None else torch.device("cpu"))
    again = None if also is None else functools.partial(compile_as, config=config, also=also)
    return wrap_methods(original, engine, ("forward",), again=again)


class CompiledModule:
    """What compiled modules are besides instances of their own class. Made by `compile`, never directly."""

    __slots__ = ("_nexfort_again", "_nexfort_engine")
    _nexfort_engine: Engine
    _nexfort_again: Callable[[nn.Module], Any]

    @property
    def report(self) -> Report:
        """What the engine did for this module."""
        return self._nexfort_engine.report

    def verify_next(self) -> None:
        """Compare the next call with eager, region by region, once it has ended.

        The result, under "verifications" in the report, holds milliseconds both ways, distances (relative norms) and
        errors to a wider computation; a region over the budget runs eager from then on. It costs about eight calls.
        """
        self._nexfort_engine.verify_next()

    def uncompiled(self) -> nn.Module:
        """The original module; it shares every weight with this one."""
        return self._nexfort_engine.root

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._nexfort_again(copy.deepcopy(self.uncompiled(), memo))

    def __copy__(self) -> Any:
        return self._nexfort_again(copy.copy(self.uncompiled()))

    def __reduce_ex__(self, protocol: Any) -> Any:
        methods = type(self).nexfort_methods  # type: ignore[attr-defined]
        return _rebuild, (self.uncompiled(), self._nexfort_engine.config.as_dict(), methods)


def engine_of(compiled: CompiledModule) -> Engine:
    """The engine of a compiled module, for hosts."""
    return compiled._nexfort_engine


def _again(methods: tuple[str, ...], config: CompileConfig, module: nn.Module) -> Any:
    return wrap_methods(module, Engine(module, config, store_at()), methods)


def _rebuild(module: nn.Module, options: dict[str, Any], methods: tuple[str, ...]) -> Any:
    return wrap_methods(module, Engine(module, CompileConfig.parse(options), store_at()), methods)


def wrap_methods(
    module: nn.Module,
    engine: Engine,
    methods: tuple[str, ...],
    *,
    around: Callable[..., Any] | None = None,
    again: Callable[[nn.Module], Any] | None = None,
) -> Any:
    """A module object with the same attribute table, whose `methods` run inside the engine.

    around: a decorator for those calls, for what a host wants to be true during each.
    again: wraps a copy of the module as this one is wrapped; without it the copy's engine knows no host.
    """
    kind = _compiled_class(type(module), methods, around)
    wrapper = kind.__new__(kind)
    object.__setattr__(wrapper, "__dict__", module.__dict__)
    object.__setattr__(wrapper, "_nexfort_engine", engine)
    object.__setattr__(wrapper, "_nexfort_again", again or functools.partial(_again, methods, engine.config))
    return wrapper


@once_a_class
def _compiled_class(kind: type[nn.Module], methods: tuple[str, ...], around: Callable[..., Any] | None = None) -> Any:
    table: dict[str, Any] = {name: _through_engine(getattr(kind, name)) for name in methods if hasattr(kind, name)}
    if around is not None:
        table = {name: around(method) for name, method in table.items()}
    if "forward" in table:
        table["forward"] = _Forward(table["forward"])
    table.update(__slots__=(), __module__=kind.__module__, __qualname__=kind.__qualname__, nexfort_methods=methods)
    return type(kind.__name__, (CompiledModule, kind), table)


class _Forward:
    """The forward of a compiled module. One that others put on the module stands before it, and may call it.

    They may have put it there before the module was compiled. Then the engine begins where it calls the module's own.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        if owner is None:
            return self._run
        replaced = owner.__dict__.get("forward")
        if replaced is None:
            return types.MethodType(self._run, owner)
        return functools.partial(owner._nexfort_engine.called_by, replaced)

    def __set__(self, owner: Any, value: Any) -> None:
        owner.__dict__["forward"] = value

    def __delete__(self, owner: Any) -> None:
        try:
            del owner.__dict__["forward"]
        except KeyError:
            raise AttributeError("forward") from None


def _through_engine(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        engine: Engine = self._nexfort_engine
        return engine.call(functools.partial(method, engine.root), args, kwargs)

    return run
