# SPDX-License-Identifier: Apache-2.0
"""diffusers pipelines: `compile_pipe` compiles the parts of a pipeline that run on every step, and the VAE."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ...api import CompiledModule, compile_as, engine_of, say_if_unquantised
from ...compilation.builder import Coming
from ...config.compile_config import CompileConfig
from ...quant.plan import Quantisation
from ...reporting.report import Report
from ...runtime.engine_state import Also
from ...system.process_settings import disabled
from .timesteps import at_hand

log = logging.getLogger("nexfort")

# Text encoders run once a prompt: compiling them costs more than it gives, so they stay as they are.
PARTS = (
    "unet",
    "transformer",
    "transformer_2",
    "controlnet",
    "fast_unet",
    "prior",
    "decoder",
    "vqgan.down_blocks",
    "vqgan.up_blocks",
    "vae.decoder",
    "vae.encoder",
)
_DENOISERS, _SAMPLES = ("unet", "transformer"), ("sample", "hidden_states")
UNFUSED = "packed weights are not fused; where it pays, call pipe.fuse_qkv_projections() before quantize_pipe"


def compile_pipe(
    pipe: Any,
    *,
    options: str | Mapping[str, Any] | CompileConfig | None = None,
    fuse_qkv_projections: bool = False,
    ignores: Iterable[str] = (),
) -> Any:
    """A pipeline whose denoiser, ControlNet and VAE run compiled; the one that comes in stays as it is.

    options: as for `nexfort_engine.compile`. fuse_qkv_projections: let diffusers fuse them first, where it can; packed
        weights (quantize_pipe) cannot be joined any more.
    ignores: parts to leave alone ("vae" leaves "vae.decoder" and "vae.encoder").

    The result has `.reports` (part -> Report) and `.uncompiled()`, which gives the original pipeline. Weights are
    shared, and calls give what the original's give. Raises TypeError for what is no pipeline, ValueError for wrong
    options or a pipeline without such parts.
    """
    if not hasattr(pipe, "components"):
        raise TypeError(
            f"compile_pipe got a {type(pipe).__qualname__}, expected a diffusers pipeline (an object with components); "
            "for a single module use nexfort_engine.compile"
        )
    config = CompileConfig.parse(options)
    original = pipe.uncompiled() if hasattr(pipe, "_nexfort_original") else pipe
    plan: Quantisation | None = getattr(original, "quantisation", None)
    if fuse_qkv_projections and plan is None and hasattr(original, "fuse_qkv_projections"):
        original.fuse_qkv_projections()
    compiled = copy.copy(original)
    skip = tuple(ignores)
    reports: dict[str, Report] = {}
    for part in PARTS:
        if not any(part == name or part.startswith(f"{name}.") for name in skip):
            module = _compile_part(compiled, part, config)
            if module is not None:
                reports[part] = module.report
    if not reports:
        raise ValueError(
            f"a {type(pipe).__qualname__} was given, and none of the parts that can be compiled was found in it "
            f"({', '.join(PARTS)}); expected at least one that is not ignored"
        )
    _decode_is_to_come(compiled, original, reports)
    say_if_unquantised(config, [getattr(original, part.partition(".")[0]) for part in reports], reports.values())
    if plan is not None:
        for part in reports.keys() & plan.parts.keys():
            reports[part].note(f"quantised: {plan.summary(part)}")
            if fuse_qkv_projections:
                reports[part].note(UNFUSED)
    compiled.__class__ = _class_of(type(original), config)
    compiled.__dict__.update(_nexfort_original=original, reports=reports)
    return compiled


def _class_of(kind: Any, config: CompileConfig) -> type:
    def uncompiled(self: Any) -> Any:
        """The original pipeline; it shares every weight with this one."""
        return self._nexfort_original

    table = {"uncompiled": uncompiled, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    if not any("__call__" in vars(base) for base in kind.__mro__):  # a base class, run by methods of other names
        return type(kind.__name__, (kind,), table)

    @functools.wraps(kind.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.nullcontext() if config.disable or disabled() else at_hand(getattr(self, "scheduler", None)):
            return kind.__call__(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {**table, "__call__": call})


def _compile_part(pipe: Any, part: str, config: CompileConfig) -> CompiledModule | None:
    """Compile one part of a pipeline copy in place; containers on the way are copied, so the original keeps its own."""
    names = part.split(".")
    owner: Any = pipe
    for name in names[:-1]:
        inner = getattr(owner, name, None)
        if not isinstance(inner, nn.Module):
            return None
        if not getattr(inner, "_nexfort_copied", False):
            inner = _shallow(inner)
            setattr(owner, name, inner)
        owner = inner
    module = getattr(owner, names[-1], None)
    if not isinstance(module, nn.Module):
        return None
    compiled = compile_as(module, config, also=_other_sides(module))
    setattr(owner, names[-1], compiled)
    return compiled


def _other_sides(module: nn.Module) -> Also | None:
    """For a UNet: to any call, one with sides that can be halved to the end where its own cannot, or the reverse.

    A UNet names the sizes that it upsamples to in the one case and not in the other. With only one of them planned, the
    first picture of a rare size would wait for a compiler.
    """
    halvings = getattr(module, "num_upsamplers", None)
    if not isinstance(halvings, int):
        return None

    def also(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        sample = kwargs.get("sample", args[0] if args else None)
        beside = [value for name, value in kwargs.items() if "residual" in name and value is not None]
        if not isinstance(sample, torch.Tensor) or sample.ndim != 4 or beside:  # a ControlNet's have sizes of their own
            return []
        whole = all(side % 2**halvings == 0 for side in sample.shape[-2:])
        # as small as can be without a side of one on the way
        sides = [2 * 2**halvings + 1, 2 * 2**halvings + 3] if whole else [2 * 2**halvings, 3 * 2**halvings]
        other = sample.new_zeros(*sample.shape[:2], *sides)
        if "sample" in kwargs:
            return [(args, {**kwargs, "sample": other})]
        return [((other, *args[1:]), dict(kwargs))]

    return also


def _decode_is_to_come(pipe: Any, original: Any, parts: Iterable[str]) -> None:
    """Have what decoding needs made together with what the first step needs: one wait, with all workers at work.

    Where latents are images of the size that the denoiser sees, or frames of it; not where the VAE cuts them in pieces,
    is kept elsewhere until then or was exchanged, or where something is stored for it.
    """
    if "vae.decoder" not in parts or any(isinstance(module, nn.Conv3d) for module in pipe.vae.decoder.modules()):
        return
    decoder = pipe.vae.decoder
    engine, pipes = engine_of(decoder), (weakref.ref(pipe), weakref.ref(original))

    @contextlib.contextmanager
    def then(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Coming]:
        ours: Any
        theirs: Any
        ours, theirs = (getattr(found(), "vae", None) for found in pipes)
        sample: Any = next((kwargs[name] for name in _SAMPLES if name in kwargs), args[0] if args else None)
        weight = next(engine.root.parameters(), None)
        cut = any(getattr(vae, name, False) for vae in (ours, theirs) for name in ("use_tiling", "use_slicing"))
        # the decoder of `theirs` is for the planner to run: no compiled one, and not of another engine
        known = getattr(ours, "decoder", None) is decoder and getattr(theirs, "decoder", None) is engine.root
        fits = known and not cut and _holds_latents(sample, theirs)
        if not fits or weight is None or sample.device != weight.device or engine.stored(weight.device):
            yield []
            return
        image = sample[:1] if sample.ndim == 4 else sample[:1, :, 0]
        with _as_it_decodes(pipes[1](), theirs):
            latents = image.to(next(engine.root.parameters()).dtype)
            yield [functools.partial(engine.builder.expecting, theirs.decode, (latents,))]

    for part in _DENOISERS:
        if part in parts:
            engine_of(getattr(pipe, part)).followed_by(then)


def _holds_latents(sample: Any, vae: Any) -> bool:
    channels = getattr(getattr(vae, "config", None), "latent_channels", None)
    return isinstance(sample, torch.Tensor) and sample.ndim in (4, 5) and sample.shape[1] == channels


@contextlib.contextmanager
def _as_it_decodes(pipe: Any, vae: nn.Module) -> Iterator[None]:
    """Inside the block the VAE is in the dtype in which the pipeline decodes: some bring it from float16 to float32."""
    code = getattr(inspect.unwrap(type(pipe).__call__), "__code__", None)
    asks = "force_upcast" in getattr(code, "co_names", ())  # most VAEs say so of themselves, not all pipelines ask
    whole = {p.dtype for p in vae.parameters()} == {torch.float16}
    upcast = asks and whole and getattr(vae.config, "force_upcast", False)
    try:
        if upcast:
            nn.Module.to(vae, dtype=torch.float32)
        yield
    finally:
        if upcast:
            nn.Module.to(vae, dtype=torch.float16)


def _shallow(module: nn.Module) -> nn.Module:
    """A module with the same weights and submodules whose tables are its own."""
    new = copy.copy(module)
    new.__dict__ = {k: dict(v) if k in ("_modules", "_parameters", "_buffers") else v for k, v in new.__dict__.items()}
    new.__dict__["_nexfort_copied"] = True
    return new
