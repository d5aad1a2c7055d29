# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's control nets: a copy of the control object whose own networks run compiled.

A control object holds its network as an attribute, calls it in `get_control`, and hands it on in `copy`, which nodes
call all the time. So the network is exchanged in the copy for one that runs in an engine: ComfyUI's own code carries it
on, and what the control net is chained to stays outside of it. Loading, unloading and offloading go through the patcher
that the control object keeps of the plain network, and weights are shared.

Some control objects make their network only in `pre_run`, out of the model that is sampled, and drop it afterwards.
What is there after `pre_run` and is not the model's own is their network; it is found by that, not by a class's name.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import nn

from ...api import CompiledModule
from ...config.compile_config import CompileConfig
from ...modules.tree import replaced_forward
from ...reporting.report import Report
from ...runtime.shared_state import Known
from ...system import process_settings
from . import model as comfy

log = logging.getLogger("nexfort")

_MAKER = "_nexfort_maker"
_CALLED = ("forward",)
_WHOLE = "(whole module)"


def attach_control(control: Any, config: CompileConfig) -> Any:
    """A copy of a control net whose networks run compiled; the one that comes in stays as it is.

    Nothing is compiled before its first step. Returns the control net itself where compiling is switched off. Raises
    TypeError for what is no control net.
    """
    if not all(callable(getattr(control, name, None)) for name in ("copy", "pre_run", "get_control")):
        raise TypeError(
            f"Nexfort Compile ControlNet got a {type(control).__qualname__}, expected the CONTROL_NET output of a "
            "loader node"
        )
    if config.disable or process_settings.disabled():
        return control
    copied = control.copy()
    networks = networks_of(copied)
    for name, network in networks.items():
        setattr(copied, name, _compiled(copied, network, config))
    if not networks:
        _watch(copied, _Maker(type(control).__name__, config))
    return copied


def networks_of(control: Any) -> dict[str, nn.Module]:
    """Attribute -> what a control object holds that has weights, each as it is without Nexfort."""
    held = {name: _plain(value) for name, value in vars(control).items() if isinstance(value, nn.Module)}
    return {name: network for name, network in held.items() if next(network.parameters(), None) is not None}


def report_of(control: Any) -> Report | None:
    """The report of a control net that `attach_control` returned or of a copy of it, empty before it has run."""
    if _MAKER in vars(control):
        return control.__dict__[_MAKER].report  # type: ignore[no-any-return]
    reports = [value.report for value in vars(control).values() if isinstance(value, CompiledModule)]
    return reports[0] if reports else None


def _plain(network: nn.Module) -> nn.Module:
    return network.uncompiled() if isinstance(network, CompiledModule) else network


def _compiled(control: Any, network: nn.Module, config: CompileConfig) -> Any:
    """The network in an engine, or itself where it cannot be put into one; its report says why."""
    given = _given(control)
    engine = comfy.engine_for(network, config, network, **given)
    if _stays_plain(network, engine.report):
        return network
    device = getattr(control, "load_device", None) or getattr(control, "device", None)
    if device is not None:  # where it will run; its weights may still lie elsewhere
        engine.prepare(device)
    return comfy.wrapped(network, engine, _CALLED, **given)


def _given(control: Any) -> dict[str, Any]:
    """What an engine of a control net needs to be told. The object knows the dtype to compute in, the network not."""
    return {"computing": getattr(control, "manual_cast_dtype", None), "planned_as": _at_one_batch}


def _stays_plain(network: nn.Module, report: Report) -> bool:
    """Whether a network is left as it is, which is said."""
    if isinstance(network, torch.jit.ScriptModule):
        reason = "it is a TorchScript module, which has no Python code to capture"
    elif replaced_forward(network) is not None:
        reason = "it carries a replaced forward"
    else:
        return False
    report.eager(_WHOLE, reason)
    log.warning("Nexfort: a control net's %s runs eager: %s", type(network).__name__, reason)
    return True


def _at_one_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call for planning, with one batch for all: a single hint image is given at batch 1 whatever the batch is.

    ComfyUI gives several hint images at the batch of the latents, so that every control net may get both. A capture
    takes a size of 1 for a constant.
    """
    args, kwargs = comfy.plain_call(args, kwargs)
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.ndim > 1]
    batch = max((tensor.shape[0] for tensor in tensors), default=1)

    def whole(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[0] == 1:
            return value.expand(batch, *value.shape[1:])
        return value

    return tuple(map(whole, args)), {name: whole(value) for name, value in kwargs.items()}


# ---- networks that are made for each run -----------------------------------------------------------------------------


class _Maker:
    """What the copies of a control object share that makes its network in `pre_run`: report, and what was found before.

    Each network gets an engine of its own, which goes with it.
    """

    def __init__(self, name: str, config: CompileConfig) -> None:
        self.name, self.config = name, config
        self.report = Report(config.without_weight_versions(), str(comfy.cache_root()))
        self._known = Known()
        self._verify_due = False
        comfy.tell_of(self)

    def verify_next(self) -> None:
        """Compare the next step of the networks that are made next."""
        self._verify_due = True

    def compile(self, control: Any, model: Any) -> None:
        """Put the networks that `pre_run` has made into engines. model: what is sampled."""
        own = set(map(id, model.modules())) if isinstance(model, nn.Module) else set()
        made = {name: network for name, network in networks_of(control).items() if id(network) not in own}
        asked = False
        if not made:
            self._nothing_found()
        for name, network in made.items():
            kept = isinstance(vars(control)[name], CompiledModule)  # it was there before, and this run uses it again
            if not kept and not _stays_plain(network, self.report):
                given = {"name": self.name, "known": self._known, "report": self.report, **_given(control)}
                engine = comfy.new_engine(network, self.config, network, **given)
                if self._verify_due:
                    engine.verify_next()
                    asked = True
                setattr(control, name, comfy.wrapped(network, engine, _CALLED, **_given(control)))
        self._verify_due &= not asked

    def _nothing_found(self) -> None:
        reason = "no network was found in it, neither when the node ran nor when sampling began"
        if not self.report.as_dict()["eager"]:
            log.warning("Nexfort: the control net %s runs eager: %s", self.name, reason)
        self.report.eager(_WHOLE, reason)


def _watch(control: Any, maker: _Maker) -> None:
    """Have a control object's networks compiled when it makes them, and those of its copies."""
    kind: Any = type(control)
    control.__class__ = _watched(getattr(kind, "nexfort_watches", kind))
    control.__dict__[_MAKER] = maker


@functools.cache
def _watched(kind: type) -> type:
    def copy(self: Any) -> Any:
        copied = kind.copy(self)  # type: ignore[attr-defined]
        _watch(copied, self.__dict__[_MAKER])
        return copied

    def pre_run(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        result = kind.pre_run(self, model, *args, **kwargs)  # type: ignore[attr-defined]
        self.__dict__[_MAKER].compile(self, model)
        return result

    table = {"copy": copy, "pre_run": pre_run, "nexfort_watches": kind}
    return type(kind.__name__, (kind,), {**table, "__module__": kind.__module__, "__qualname__": kind.__qualname__})
