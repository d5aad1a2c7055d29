# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's weights on lease: offloaded, cast and patched by its own code, layer by layer, just before a region's call.

ComfyUI's layers (comfy.ops) decide on every call: where `comfy_cast_weights` is set or functions are attached, they
copy their weights to the device of their input, cast them, and run LoRA patches over them (`cast_bias_weight`). That
very function is called here, so that the result is ComfyUI's for whatever state its patcher left the layer in.

Under dynamic VRAM a layer has a place in memory of which ComfyUI may take the pages away (`_v`). Those of a region are
fetched in one go (`cast_modules_with_vbar`), as ComfyUI does it ahead of a block; where all of them stay, the next call
only asks whether the pages are the same.

Without it ComfyUI keeps a model that fits on the GPU as a whole. What nobody needs there any more, because it is kept
prepared, goes to main memory (weights/offload.py, offload.py).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from ...modules.tree import ABSENT
from ...weights.lease import NotLeased
from ...weights.offload import AWAY, Offload, is_away, take_back
from ...weights.prepack_entry import leave_free
from ...weights.subclass_unwrap import is_plain
from . import offload as comfy_offload
from .offload import ComfyHome, is_dynamic
from .plugin_layers import OwnCasts, casts_itself
from .vram_pages import Pages, give_back, paying, unheld

_PLAIN = "disable_weight_init."  # the layers whose forward, with nothing to cast, is torch's own
_QUANTISED = "MixedPrecisionOps.Linear"  # the layers that compute with quantised weights as they are
_NAMES = ("weight", "bias")


class ComfyWeights:
    """The weight provider of one network.

    model: what ComfyUI holds it in, and may say on what dtype to compute in. computing: that dtype where it says so
    elsewhere.
    """

    signs = (*comfy_offload.SIGNS, AWAY)
    # what lies in the pages of a layer as it was fetched last, and in main memory ready to be fetched: in a tensor of
    # its own before 0.33, then in dictionaries, of which all layers share one
    copies = frozenset({"_v_weight", "_v_bias", "_pin", "_pins", "_pin_state", "_prefetch", "_v_signature"})
    hidden: ClassVar[Mapping[str, Any]] = dict(zip(signs, (False, [], [], ABSENT, ABSENT), strict=True))

    def __init__(self, model: Any, computing: torch.dtype | None = None) -> None:
        self._model, self._computing = weakref.ref(model), computing
        self._own_casts = OwnCasts(self.hidden)
        self._home = ComfyHome(self._model)
        self._offload = Offload(self._home)
        self._run: object = None  # that looked at weights last
        leave_free(comfy_offload.wanted_free)
        self.reports_versions = hasattr(model, "current_patcher")  # which a VAE has not, nor a control net

    def weights_version(self) -> Hashable:
        """What ComfyUI notes of the patches that the weights were loaded with, and how often they were found changed.

        None where hooks change them as well.
        """
        model = self._model()
        patcher = getattr(model, "current_patcher", None)
        if patcher is None or getattr(patcher, "current_hooks", None) or getattr(patcher, "hook_patches", None):
            return None
        said = getattr(model, "current_weight_patches_uuid", None)
        return (said, self._offload.edits) if said is not None and self._offload.edits else said

    def room(self, device: torch.device) -> int:
        """What dynamic VRAM keeps in pages, which go away when somebody else needs the room."""
        patcher = getattr(self._model(), "current_patcher", None)
        if device.type == "cpu" or patcher is None or not hasattr(patcher, "get_free_memory"):
            return 0
        import comfy.model_management as management

        return int(max(0, patcher.get_free_memory(device) - management.get_free_memory(device)))

    def can_release(self, device: torch.device) -> bool:
        """Whether weights make room: dynamic VRAM gives pages back, and without it weights may go to main memory."""
        patcher = self._home.patcher
        if patcher is None or device.type not in comfy_offload.FROM:
            return False
        if is_dynamic(patcher):
            return True
        version = self.weights_version()
        if not self._home.may_go() or self._offload.stays(version):
            return False
        return self._offload.begun(version) or self._home.fits()

    @property
    def has_pending_release(self) -> bool:
        """Whether weights were copied to main memory and may leave the device."""
        return self._offload.ready

    def stop_releasing(self) -> None:
        """Drop what is being copied to main memory."""
        self._offload.forget()

    def poll_versions(self, run: object) -> None:
        """Once for each run, see whether weights in main memory were changed in their place. None: it has no name."""
        if run is None or run is not self._run:
            self._offload.poll_versions()
            self._run = run

    def release(self, layers: list[nn.Module], kept: Iterable[list[torch.Tensor]] = ()) -> int:
        """Give back the pages in which no other layer of the model has its place, or have weights go to main memory."""
        version, given = self.weights_version(), 0
        if self._home.may_go() and (self._offload.begun(version) or self._home.fits()):
            given = self._offload.without(self._home.resident(layers, self.can_lease), version, kept)
        else:
            self._offload.forget()
        given = given or self._give_back(layers)
        if given:
            import comfy.model_management as management

            management.soft_empty_cache()  # memory of the device, and not of torch's allocator
        return given

    @property
    def layout(self) -> Hashable:
        """Under dynamic VRAM the memory in whose pages the layers have their places."""
        return next((id(sub._v[0]) for sub in self._paged()), None) if is_dynamic(self._home.patcher) else None

    def is_release_profitable(self, groups: list[list[nn.Module]]) -> list[bool]:
        """Those whose places are for the most part in pages that no other layer needs. All, in several memories."""
        own = {id(layer) for layers in groups for layer in layers}
        needed = [sub._v for sub in self._paged() if id(sub) not in own]
        places = [[layer.__dict__["_v"] for layer in layers if "_v" in layer.__dict__] for layers in groups]
        memories = {id(place[0]): place[0] for group in (needed, *places) for place in group}
        if len(memories) != 1:
            return [True] * len(groups)
        return paying(next(iter(memories.values())), places, needed)

    def _paged(self) -> Iterator[Any]:
        """The layers that have a place in memory of dynamic VRAM."""
        model = self._model()
        return (sub for sub in (model.modules() if model is not None else ()) if sub.__dict__.get("_v") is not None)

    def _give_back(self, layers: list[nn.Module]) -> int:
        idle, paged = set(map(id, layers)), list(self._paged())
        memories = {id(sub._v[0]): sub._v[0] for sub in paged if id(sub) in idle}
        needed = [sub._v for sub in paged if id(sub) not in idle]
        return sum(give_back(one, [place for place in needed if place[0] is one]) for one in memories.values())

    def can_lease(self, layer: nn.Module) -> bool:
        """Layers of comfy.ops that cast in the plain way, and those for quantised weights, which ask the same code.

        Of others those that make their weights by a method of their own. The rest is traced as it is.
        """
        kind = type(layer)
        for base in kind.__mro__:
            if base.__module__ == "comfy.ops" and base.__qualname__.endswith(_QUANTISED):
                own = ("forward", "forward_comfy_cast_weights", "_forward")
                return all(getattr(kind, n) is getattr(base, n) for n in own)
            if base.__module__ == "comfy.ops" and base.__qualname__.startswith(_PLAIN):
                if "Embedding" in base.__qualname__ or kind.forward is not base.forward:  # type: ignore[attr-defined]
                    return False
                if casts_itself(layer):
                    return self._own_casts.can_lease(layer, self._dtype_of_calls())
                cast = "forward_comfy_cast_weights"
                return getattr(kind, cast) is getattr(base, cast)
        return False

    def needs_host_forward(self, layer: nn.Module) -> bool:
        """As the layer's own forward asks, or because its weights are in main memory."""
        own = layer.__dict__
        if is_away(layer):
            return True
        if own.get("weight_function") or own.get("bias_function"):
            return True
        return bool(layer.comfy_cast_weights) and layer.weight is not None

    def unpacks(self, layer: nn.Module, name: str) -> bool:
        """Functions that ComfyUI runs over a quantised weight are given it in full, and so is the layer then."""
        return name == "weight" and _is_quantised(layer) and bool(layer.__dict__.get("weight_function"))

    def shown(self, layer: nn.Module) -> Mapping[str, Any]:
        """A quantised layer with such functions quantises no input either, as if ComfyUI had asked it to cast."""
        functions = layer.__dict__.get("weight_function") or layer.__dict__.get("bias_function")
        return {"comfy_force_cast_weights": True} if functions and _is_quantised(layer) else {}

    def covers(self, layer: nn.Module) -> bool:
        """Whether nothing but ComfyUI's own patches changes the layer's weights on their way."""
        if casts_itself(layer):
            return False
        functions = (*(layer.__dict__.get("weight_function") or ()), *(layer.__dict__.get("bias_function") or ()))
        return all(type(one).__module__.startswith("comfy.") for one in functions)

    def dtype(self, layer: nn.Module, name: str) -> torch.dtype:
        """The dtype that ComfyUI computes in where it is not that of the weights. A wider weight stays as it is.

        ComfyUI casts to the dtype of a layer's input, which may be float32 in the middle of a network that computes in
        less: networks make islands so, of layers whose weights are wider. The graph casts them (shadow_module.py).

        A weight that dynamic VRAM left in the file may have another dtype there than in the model. A layer with a
        quantised weight casts by itself what it takes.
        """
        if _is_quantised(layer):
            return getattr(layer, name).dtype
        if casts_itself(layer):
            return self._dtype_of_calls()
        computing = self._computing or getattr(self._model(), "manual_cast_dtype", None)
        own = getattr(layer, f"{name}_comfy_model_dtype", None) if "_v" in layer.__dict__ else None
        stored = own or getattr(layer, name).dtype
        if computing is None or (stored.is_floating_point and stored.itemsize > computing.itemsize):
            return stored
        return computing

    def _dtype_of_calls(self) -> torch.dtype:
        """The dtype that ComfyUI gives a network its inputs in."""
        model = self._model()
        computing = self._computing or getattr(model, "manual_cast_dtype", None)
        own = getattr(model, "get_dtype", torch.get_default_dtype)
        return computing or own()

    def acquire(self, layers: list[nn.Module], device: torch.device) -> _Lease:
        """Copy, cast and patch as ComfyUI does. Raises NotLeased."""
        for layer in filter(is_away, layers):
            take_back(layer)
        lease = _Lease()
        paged = [layer for layer in layers if _is_paged(layer, device)]
        try:
            fetched = dict(zip(map(id, paged), self._fetched(paged, device, lease), strict=True))
            for layer in layers:
                lease.tensors.append(fetched.get(id(layer)) or self._cast(layer, device, lease))
        except BaseException:
            lease.release()
            raise
        return lease

    def _cast(self, layer: Any, device: torch.device, lease: _Lease) -> dict[str, torch.Tensor]:
        """One layer by the function that it calls itself."""
        import comfy.ops

        if casts_itself(layer):
            lease.kept = False
            return self._own_casts.cast(layer, self._dtype_of_calls(), device)
        own = {name: value for name in _NAMES if (value := getattr(layer, name, None)) is not None}
        functions = layer.weight_function or layer.bias_function
        if not functions and all(t.device == device and t.dtype == self.dtype(layer, n) for n, t in own.items()):
            return own
        lease.kept = False
        dtypes = {name: self.dtype(layer, name) for name in own}
        weight, bias, ticket = comfy.ops.cast_bias_weight(
            layer,
            dtype=dtypes["weight"],
            device=device,
            bias_dtype=dtypes.get("bias", dtypes["weight"]),
            offloadable=True,
            **_as_it_is(layer, dtypes["weight"]),
        )
        found = {name: value for name, value in zip(_NAMES, (weight, bias), strict=True) if value is not None}
        if ticket is not None and ticket[0] is not None:
            # what went over a stream may lie in a buffer that the next layer overwrites
            went = dict(zip(_NAMES, ticket[1:], strict=True))
            found = {name: value.clone() if _lies_in(value, went[name]) else value for name, value in found.items()}
            comfy.ops.uncast_bias_weight(layer, weight, bias, ticket)
        return found

    def _fetched(self, layers: list[Any], device: torch.device, lease: _Lease) -> list[dict[str, torch.Tensor]]:
        """Layers under dynamic VRAM, all at once."""
        if not layers:
            return []
        import comfy.model_management as management
        import comfy.ops

        cast = getattr(comfy.ops, "cast_modules_with_vbar", None)
        resolve = getattr(comfy.ops, "resolve_cast_module_with_vbar", None)
        if cast is None or resolve is None:
            raise NotLeased(
                "its weights are kept by a dynamic VRAM that this version of Nexfort does not know; to compile, start "
                "ComfyUI with --disable-dynamic-vram"
            )
        if (reason := unheld()) is not None:
            raise NotLeased(
                f"its weights are kept by a dynamic VRAM that this version of Nexfort does not know ({reason}); to "
                "compile, start ComfyUI with --disable-dynamic-vram"
            )
        # what ComfyUI fetched ahead is there already, and is ComfyUI's to give back
        lease.pages = [layer for layer in layers if not hasattr(layer, "_prefetch")]
        if lease.pages:
            lease.device = device
            lease.stream = cast(lease.pages, None, device, None, management.device_supports_non_blocking(device))
            management.sync_stream(device, lease.stream)
        found = []
        for layer in layers:
            dtypes = [self.dtype(layer, name) if getattr(layer, name, None) is not None else None for name in _NAMES]
            words = {"compute_dtype": None, "want_requant": False, **_as_it_is(layer, dtypes[0])}
            resolved = zip(_NAMES, resolve(layer, dtypes[0], device, dtypes[1] or dtypes[0], **words), strict=True)
            own = {name: _as_it_lies(layer, name, value) for name, value in resolved if value is not None}
            found.append(own)
            # a copy was cast or patched for this call, and what has no place of its own goes with the call
            lease.kept &= all(value is getattr(layer, f"_v_{name}", None) for name, value in own.items())
            lease.kept &= layer._prefetch["signature"] is not None
        lease.kept &= len(lease.pages) == len(layers)
        return found


def _lies_in(value: torch.Tensor, other: Any) -> bool:
    """Whether a weight may lie in the memory of what it was made of. A weight that was unpacked does not."""
    if not is_plain(value) or not isinstance(other, torch.Tensor):
        return True
    return is_plain(other) and value.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _is_quantised(layer: nn.Module) -> bool:
    """Whether the layer computes with its weight as it is stored."""
    return hasattr(getattr(layer, "weight", None), "__tensor_flatten__")


def _as_it_is(layer: nn.Module, dtype: Any) -> dict[str, Any]:
    """What ComfyUI's function is asked so that a quantised weight comes back as one, patched or not.

    Not where functions are run over it: those give it in full.
    """
    return {"compute_dtype": dtype, "want_requant": True} if _is_quantised(layer) else {}


def _as_it_lies(layer: Any, name: str, value: torch.Tensor) -> torch.Tensor:
    """A weight where it lies in its pages, if the same numbers are there as ComfyUI gives.

    A LoRA is run over a weight once, and its result goes there too. What ComfyUI gives in that call is a copy beside.
    """
    lies = getattr(layer, f"_v_{name}", None)
    if lies is None or layer._prefetch["signature"] is None or getattr(layer, f"{name}_function", None):
        return value
    is_same_kind = hasattr(lies, "__tensor_flatten__") == hasattr(value, "__tensor_flatten__")
    return lies if is_same_kind and lies.dtype == value.dtype else value


def _is_paged(layer: nn.Module, device: torch.device) -> bool:
    if casts_itself(layer):
        return False
    return "_v" in layer.__dict__ and device.type != "cpu" and layer.weight.device != device


class _Lease:
    """Weights of some layers, taken out.

    kept: every tensor lies where the next call would find it. pages: the layers whose pages this lease holds.
    """

    def __init__(self) -> None:
        self.tensors: list[dict[str, torch.Tensor]] = []
        self.kept = True
        self.pages: list[Any] = []
        self.device: torch.device | None = None
        self.stream: Any = None
        self._held = Pages()
        self._finish: Callable[[], None] = self._give_back_fetched

    def release(self) -> None:
        """Let go of the pages; ComfyUI waits for the device before it uses them for something else."""
        self._finish()

    def reacquire(self) -> bool:
        """Hold the same pages once more, if ComfyUI moved none and changed no weight since."""
        return self.kept and self._held.take_again()

    def _take_from(self, layer: Any) -> None:
        """End what ComfyUI prepared of a layer; its pages are this lease's."""
        try:
            for name in _NAMES:
                patch = getattr(layer, f"{name}_lowvram_function", None)
                if patch is not None:
                    patch.clear_prepared()
        finally:
            if layer._prefetch["signature"] is not None:
                self._held.took(layer)
            del layer._prefetch

    def _give_back_fetched(self) -> None:
        self._finish = self._held.let_go
        if not self.pages:
            return
        import comfy.model_management as management

        with contextlib.ExitStack() as stack:  # each layer's turn comes, also where one before it raises
            stack.callback(self._held.let_go)
            for layer in reversed(self.pages):
                if "_prefetch" in layer.__dict__:  # otherwise it failed before this one
                    stack.callback(self._take_from, layer)
        if self.stream is not None:
            self.stream.wait_stream(management.current_stream(self.device))
