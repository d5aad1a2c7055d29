# SPDX-License-Identifier: Apache-2.0
"""ComfyUI as the engine sees it: engines on model patchers and VAEs, its cache folder, cancel and progress.

A model patcher's clone gets one APPLY_MODEL wrapper, which sees the BaseModel that really runs; engines are kept on
that model's network, one for each config, so that a node that runs again finds its artefacts. Nothing of ComfyUI is
replaced, and a clone without the wrapper runs the plain network at all times. ControlNets are in controlnet.py,
weights that ComfyUI moves, casts or patches in weights.py, conditions that it moves in conditioning.py.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ...api import say_if_unquantised, store_at, wrap_methods
from ...cache.paths import chosen_root
from ...config.compile_config import CompileConfig
from ...engine import Engine
from ...modules.tree import replaced_forward
from ...reporting.report import Report
from ...runtime.engine_state import HostHooks, Picture
from ...runtime.forward_context import Calls
from ...system import process_settings
from ...system.live_objects import LiveObjects
from ..comfy_install import comfyui_version, untried
from . import malloc_graph
from .conditioning import Conds, StepInvariant
from .patch_names import PatchNames
from .progress import running_prompt, shown
from .small_weights import SmallWeights
from .weights import ComfyWeights

log = logging.getLogger("nexfort")

KEY = "nexfort"
_CORE_S_KEY = "torch.compile"  # of the wrapper of core's compile node
_CLOCK = "nexfort.pace"  # of the wrapper that times steps of the model as it came in
_ENGINES = "_nexfort_engines"
_OVERRIDE = "optimized_attention_override"
_HOST_ADDED = ("wrappers", "callbacks", "patches", "patches_replace", _OVERRIDE)


class Told(Protocol):
    """Whatever has something to tell of one network, or of those that are made anew for each run."""

    @property
    def name(self) -> str:
        """What the report calls it."""

    @property
    def report(self) -> Report:
        """What happened."""

    def verify_next(self) -> None:
        """Compare the next step with eager."""


PlainCall = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
# modules that count memory which ComfyUI has pinned, cast or loaded, and that say which back ends there are
_ACCOUNTS = (
    *("comfy.model_management", "comfy.memory_management", "comfy.model_prefetch", "comfy.pinned_memory"),
    *("comfy_aimdo", "comfy_kitchen"),
)
_live: LiveObjects[Told] = LiveObjects()


class _Engines(dict):
    """The engines of one network by config. A copy of the network starts without any: it has modules of its own.

    conds: what of its calls was copied to the GPU. small: weights that stay at their addresses.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conds, self.small = Conds(), SmallWeights()

    def __deepcopy__(self, _memo: Any) -> _Engines:
        return _Engines()

    def __reduce__(self) -> Any:
        return _Engines, ()


def cache_root() -> Path:
    """Where artefacts are kept: the directory that was chosen, else ComfyUI's private cache directory."""
    if (chosen := chosen_root()) is not None:
        return chosen
    import folder_paths

    find = getattr(folder_paths, "get_system_user_directory", None)
    if find is not None:
        return Path(find("cache")) / "nexfort"
    return Path(folder_paths.get_user_directory()) / "__nexfort_cache"


def attach(patcher: Any, config: CompileConfig) -> Any:
    """A clone of a model patcher whose network runs compiled. Nothing is compiled before its first step.

    Returns the patcher itself where compiling is switched off. Raises TypeError for what is no model patcher.
    """
    if not hasattr(patcher, "add_wrapper_with_key") or getattr(patcher, "model", None) is None:
        raise TypeError(
            f"Nexfort Compile Model got a {type(patcher).__qualname__}, expected the MODEL output of a loader node"
        )
    network = getattr(patcher.model, "diffusion_model", None)
    if not isinstance(network, nn.Module):
        raise TypeError(
            f"Nexfort Compile Model got a {type(patcher.model).__qualname__}, which holds no diffusion model; connect "
            "the MODEL output of a checkpoint or diffusion model loader"
        )
    if config.disable or process_settings.disabled():
        return patcher
    from comfy.patcher_extension import CallbacksMP, WrappersMP

    engine_for(network, config, patcher.model).prepare(patcher.load_device)
    clone = patcher.clone()
    if clone.get_wrappers(WrappersMP.APPLY_MODEL, _CORE_S_KEY):
        clone.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, _CORE_S_KEY)
        log.warning("Nexfort: the model carried ComfyUI's TorchCompileModel as well; it is taken off this branch")
    for key in (KEY, _CLOCK):
        clone.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, key)
    clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, _wrapper(config))
    clone.remove_wrappers_with_key(WrappersMP.OUTER_SAMPLE, KEY)
    clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, _around_sampling(config))
    for one in (clone, patcher):  # whichever was used last is the one that ComfyUI takes off the GPU
        one.remove_callbacks_with_key(CallbacksMP.ON_DETACH, KEY)
        one.add_callback_with_key(CallbacksMP.ON_DETACH, KEY, _release)
    clone.remove_callbacks_with_key(CallbacksMP.ON_LOAD, KEY)
    clone.add_callback_with_key(CallbacksMP.ON_LOAD, KEY, _loaded)
    if not patcher.get_wrappers(WrappersMP.APPLY_MODEL, KEY):
        patcher.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, _CLOCK)
        patcher.add_wrapper_with_key(WrappersMP.APPLY_MODEL, _CLOCK, _clock(config))
    clone.set_attachments(KEY, config)
    return clone


def _release(patcher: Any, unloaded: bool, *_: Any) -> None:
    """ComfyUI takes the model off the GPU: what engines hold there goes too. Not when a mere clone ends."""
    network = getattr(patcher.model, "diffusion_model", None)
    if unloaded and isinstance(network, nn.Module):
        engines = _engines(network)
        engines.conds.clear()
        engines.small.clear()
        for engine in engines.values():
            engine.release()


def _loaded(patcher: Any, *_: Any) -> None:
    """ComfyUI loaded the model."""
    network = getattr(patcher.model, "diffusion_model", None)
    if isinstance(network, nn.Module):
        _engines(network).small.loaded(patcher)


def _wrapper(config: CompileConfig) -> Callable[..., Any]:
    def run_compiled(executor: Any, *args: Any, **kwargs: Any) -> Any:
        network = getattr(executor.class_obj, "diffusion_model", None)
        if not isinstance(network, nn.Module):
            return executor(*args, **kwargs)
        engine = engine_for(network, config, executor.class_obj)
        reason = _core_s_compile(args, kwargs) or engine.passes()
        if reason is not None:
            if not reason:
                return engine.promise.without(executor, args, kwargs)
            engine.report.eager("(whole module)", reason)
            return executor(*args, **kwargs)
        if engine.steps_aside(None, args, kwargs):
            return executor(*args, **kwargs)
        asked = (None, args, kwargs)
        step_invariant: StepInvariant = {}
        if args and isinstance(args[0], torch.Tensor):
            is_last = _is_last(executor)  # a wrapper behind this one may write to what it is given
            dtype = executor.class_obj.get_dtype_inference() if is_last else None
            run = _run(args, kwargs)
            engine.poll_versions(run)
            args, kwargs, step_invariant = _engines(network).conds.sent(
                args, kwargs, args[0].device, dtype, run if is_last else None
            )
        calls = Calls(engine=asked, step_invariant=step_invariant)
        with shown(engine.report), engine.active(watch_root=True, calls=calls):
            return executor(*args, **kwargs)

    return run_compiled


def _around_sampling(config: CompileConfig) -> Callable[..., Any]:
    """A wrapper of one sampling, after which the log says how fast it was."""

    def sample(executor: Any, *args: Any, **kwargs: Any) -> Any:
        model = getattr(getattr(executor.class_obj, "model_patcher", None), "model", None)
        network = getattr(model, "diffusion_model", None)
        if not isinstance(network, nn.Module):
            return executor(*args, **kwargs)
        speed = engine_for(network, config, model).promise.speed
        speed.begin_picture()
        result = executor(*args, **kwargs)
        if (line := speed.end_picture()) is not None:
            log.info("%s", line)
        return result

    return sample


def _clock(config: CompileConfig) -> Callable[..., Any]:
    """A wrapper for the model that came in: where its user bypasses the node, a step shows how long eager takes."""

    def run_timed(executor: Any, *args: Any, **kwargs: Any) -> Any:
        network = getattr(executor.class_obj, "diffusion_model", None)
        engines = network.__dict__.get(_ENGINES) if isinstance(network, nn.Module) else None
        engine = engines.get(config) if engines else None
        is_plain = engine is not None and _is_last(executor) and replaced_forward(network) is None  # type: ignore[arg-type]
        if engine is None or not is_plain or _core_s_compile(args, kwargs):
            return executor(*args, **kwargs)
        return engine.promise.without(executor, args, kwargs)

    return run_timed


def _is_last(executor: Any) -> bool:
    """Whether ComfyUI's own code is called by this wrapper, and no other wrapper in between."""
    return executor.idx + 1 == len(executor.wrappers) and hasattr(executor.class_obj, "get_dtype_inference")


def _run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """What all steps of one picture have and no other: the noise levels of ComfyUI's sampler. None without any.

    Custom nodes may change weights between two pictures without a word, in place; within one nobody does.
    """
    found = (value.get("sample_sigmas") for value in (*args, *kwargs.values()) if isinstance(value, dict))
    return next((levels for levels in found if levels is not None), None)


def picture(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Picture | None:
    """What a call is a step of: one run of a sampler; without noise levels one node that runs, such as a VAE's."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, dict) and isinstance(levels := value.get("sample_sigmas"), torch.Tensor):
            return Picture(levels, len(levels) - 1, functools.partial(_ended, levels, value.get("sigmas")))
    from comfy_execution.utils import get_executing_context

    context = get_executing_context()
    return Picture(context) if context is not None else None


def _ended(levels: torch.Tensor, now: Any) -> int:
    """How many steps of a sampler's run have ended, by the noise level now. It waits for the device."""
    if not isinstance(now, torch.Tensor) or not now.numel():
        return 0
    return int((levels[:-1] > now.max().to(levels)).sum())


def _core_s_compile(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why the call is left to core's compile node, which would trace through the shims; None if it is not there."""
    for value in (*args, *kwargs.values()):
        wrappers = value.get("wrappers") if isinstance(value, dict) else None
        if wrappers and wrappers.get("apply_model", {}).get(_CORE_S_KEY):
            return "ComfyUI's TorchCompileModel comes after Nexfort's node and compiles the model too; keep one of them"
    return None


def engine_for(network: nn.Module, config: CompileConfig, model: Any, **given: Any) -> Engine:
    """The engine of a network and config; made on first use and kept as long as the network lives.

    model: what the host holds the network in, or the network itself. given: more of what `new_engine` takes.
    """
    engines = _engines(network)
    engine = engines.get(config)
    if engine is None:
        engine = engines[config] = new_engine(network, config, model, **given)
        say_if_unquantised(config, [network], [engine.report])
        tell_of(engine)
    return engine


def _engines(network: nn.Module) -> _Engines:
    found = network.__dict__.get(_ENGINES)
    if found is None:
        found = network.__dict__[_ENGINES] = _Engines()
    return found


def new_engine(
    network: nn.Module,
    config: CompileConfig,
    model: Any,
    *,
    name: str = "",
    computing: torch.dtype | None = None,
    planned_as: PlainCall | None = None,
    **given: Any,
) -> Engine:
    """An engine that asks ComfyUI what only it knows.

    name: of the engine, where the class of `model` is none. computing: the dtype to compute in, where `model` does not
    say it. planned_as: in the place of `plain_call`. given: more of what Engine takes.
    """
    malloc_graph.count_pauses()  # before the first one that an engine's own could lie in
    hooks = HostHooks(
        cancel=_cancel,
        stops=_stops,
        apart=malloc_graph.paused,
        plain_call=planned_as or plain_call,
        others_code=_others_code,
        weights_name=PatchNames(model).name,
        picture=picture,
        works_on=running_prompt,
        accounts=_ACCOUNTS,
    )
    name, provider = name or type(model).__name__, ComfyWeights(model, computing)
    engine = Engine(network, config, store_at(cache_root()), name=name, provider=provider, hooks=hooks, **given)
    for reason in (untried(_version()), malloc_graph.unknown()):
        if reason is not None:
            engine.report.note(reason)
    return engine


def _version() -> str | None:
    import folder_paths

    return comfyui_version(Path(folder_paths.__file__).parent)


def tell_of(told: Told) -> None:
    """Have `reports` list this one as long as it lives."""
    _live.add(told)


def attach_vae(vae: Any, config: CompileConfig) -> Any:
    """A copy of a VAE whose decoder and encoder run compiled; the one that comes in stays as it is.

    Returns the VAE itself where compiling is switched off. Raises TypeError for what is no VAE.
    """
    model = getattr(vae, "first_stage_model", None)
    if not isinstance(model, nn.Module):
        raise TypeError(f"Nexfort Compile VAE got a {type(vae).__qualname__}, expected the VAE output of a loader node")
    if config.disable or process_settings.disabled():
        return vae
    original = model.uncompiled() if hasattr(model, "uncompiled") else model  # type: ignore[operator]
    engine = engine_for(original, config, original, whole=False)  # it is called by decode and encode
    if hasattr(vae, "device"):  # where it will run; its weights may still lie elsewhere
        engine.prepare(vae.device)
    copied = copy.copy(vae)
    copied.first_stage_model = wrapped(original, engine, ("decode", "encode"), whole=False)
    return copied


def wrapped(network: nn.Module, engine: Engine, methods: tuple[str, ...], **given: Any) -> Any:
    """The network as an object whose methods run in the engine and show progress; copies of it get an engine too.

    given: what that engine takes besides.
    """

    def again(copied: nn.Module) -> Any:
        return wrapped(copied, engine_for(copied, engine.config, copied, **given), methods, **given)

    report = engine.report  # not the engine, which would keep the network alive

    def around(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with shown(report):
                return call(*args, **kwargs)

        return run

    return wrap_methods(network, engine, methods, around=around, again=again)


def report_of(value: Any) -> Report | None:
    """The report of a patcher that `attach` returned or a VAE that `attach_vae` returned, empty before it has run."""
    model = getattr(value, "first_stage_model", None)
    if model is not None:
        return getattr(model, "report", None)
    config = value.get_attachment(KEY) if hasattr(value, "get_attachment") else None
    engine = _engines(value.model.diffusion_model).get(config) if config else None
    return engine.report if engine is not None else None


def reports() -> list[tuple[str, Report]]:
    """Name and report of every engine that is alive."""
    return [(told.name, told.report) for told in _live.listed()]


def memory() -> dict[str, Any]:
    """{"device", "used", "total"}: where ComfyUI computes and how many bytes of its memory are in use by anybody."""
    import comfy.model_management as management

    device = management.get_torch_device()
    total, free = management.get_total_memory(device), management.get_free_memory(device)
    return {"device": str(device), "used": int(total - free), "total": int(total)}


def verify_next(report: Report, *, once: bool = False) -> bool:
    """Have the next step of the engine with this report compared with eager; False where it is gone.

    once: not again where it was done before.
    """
    found = [told for told in _live.listed() if told.report is report]
    for told in found:
        if not (once and report.verifications):
            told.verify_next()
    return bool(found)


def _cancel() -> None:
    import comfy.model_management

    comfy.model_management.throw_exception_if_processing_interrupted()


def _stops() -> tuple[type[BaseException], ...]:
    import comfy.model_management

    return (comfy.model_management.InterruptProcessingException,)


def plain_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The network's arguments without other packs' wrappers and patches, which may count their calls."""
    options = kwargs.get("transformer_options")
    if not isinstance(options, dict):
        return args, kwargs
    plain = {k: v for k, v in options.items() if k not in _HOST_ADDED}
    if options.get(_OVERRIDE) is not None:  # blocks call whatever is there, so let them be planned with it
        plain[_OVERRIDE] = _as_it_is
    return args, {**kwargs, "transformer_options": {**plain, "wrappers": {}, "callbacks": {}}}


def _as_it_is(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What an attention override is that changes nothing."""
    return own(*args, **kwargs)


def _others_code(options: dict[Any, Any]) -> str | None:
    """Why ComfyUI's options for one call bring code of others into the network, or None."""
    for key in ("patches", "patches_replace"):
        if any(options.get(key, {}).values()):
            return f"the model carries {key}"
    if options.get(_OVERRIDE) is not None:
        return "the model carries an attention override"
    if options.get("wrappers", {}).get("diffusion_model"):
        return "the model carries wrappers of its network"
    if any(isinstance(v, list) and any(hasattr(t, "shape") for t in v) for v in options.values()):
        return "a ControlNet is connected"
    return None
