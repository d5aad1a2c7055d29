# SPDX-License-Identifier: Apache-2.0
"""`quantize_pipe`: a diffusers pipeline whose denoiser keeps linear layers in fp8 or int8. Before `compile_pipe`."""

from __future__ import annotations

import copy
import difflib
import json
import logging
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ...api import CompiledModule
from ...modules.tree import foreign
from ...quant.cost_model import H200, Card
from ...quant.plan import BUDGET, Chooser, Quantisation, by_likeness, by_structure, linear_layers, quantise
from ...quant.profitability import ROWS, only_what_pays
from ...quant.quant_types import quant_type as type_named
from .row_probe import look

log = logging.getLogger("nexfort")

# What runs on every step. A VAE runs once, and its layers are convolutions.
NETWORKS = ("unet", "transformer", "transformer_2", "controlnet", "fast_unet", "prior", "decoder")
_EXAMPLE = '{"a.layer": {"ssim": 0.99}, ...}'


def quantize_pipe(
    pipe: Any,
    quant_submodules_config_path: str | Path | None = None,
    top_percentage: float = 90,
    *,
    quant_type: str = "fp8_e4m3_e4m3_dynamic",
    ignores: Iterable[str] = (),
    budget: float = BUDGET,
    everything: bool | None = None,
    call: Mapping[str, Any] | None = None,
    card: Card = H200,
) -> Any:
    """A pipeline whose denoiser and ControlNet keep linear layers packed; the one that comes in stays as it is.

    quant_submodules_config_path: JSON with layer -> {"ssim": of the picture with that layer alone packed}; of these the
        best top_percentage % are packed. Without it, the layers inside blocks but for those that shift and scale.
    quant_type: int8_dynamic, fp8_<activations>_<weights>_dynamic or _weightonly (e4m3, e5m2), with _per_tensor or not.
    ignores: networks ("controlnet") or places in one ("transformer.proj_out") to leave alone.
    budget: a layer whose product is further than this from the full one, as a relative norm, stays as it is.
    everything: False: layers whose product would take as long packed, or longer, stay as they are; True: they do not;
        None: as False for networks on a GPU. Weightonly types save memory and pack everything.
    call: keywords of a call as the pipeline will be called, such as {"height": 1024, "width": 1024}: with everything
        False its first step is run, because only a call says how many rows a layer sees. Where it cannot be, layers
        are judged by their sizes, and the plan has a note.
    card: what products cost (quant/cost_model.py).

    The result has `.quantisation`, the plan with each layer's type and error or the reason why it stays as it is (print
    it), and `.unquantised()`, the pipeline that was given, while somebody holds it: to save memory let it go. All other
    weights are shared. LoRAs are loaded into the result, or fused before; packed weights take no fusing. Raises
    TypeError for what is no pipeline, ValueError for anything else that is wrong.
    """
    if not hasattr(pipe, "components"):
        raise TypeError(f"quantize_pipe got a {type(pipe).__qualname__}, expected a diffusers pipeline")
    _check_options(top_percentage, ignores, budget, everything, call, card)
    kind, skip = type_named(quant_type), tuple(ignores)
    measured = measured_layers(quant_submodules_config_path) if quant_submodules_config_path is not None else None
    networks = _networks(pipe, skip)
    for name, net in networks.items():
        _check(pipe, name, net)
    chooser: Chooser = by_structure
    if measured is not None:
        _check_names(measured, networks, quant_submodules_config_path)
        chooser = by_likeness(measured, top_percentage, Path(quant_submodules_config_path or "").name)
    result, plan = copy.copy(pipe), Quantisation(kind.name, budget)
    judged = {} if kind.activation is None else {n: net for n, net in networks.items() if _judged(net, everything)}
    found = look(pipe, judged, call or {})
    for name, net in networks.items():
        chosen = {path: _ignored(f"{name}.{path}", skip) or reason for path, reason in chooser(net).items()}
        seen = found.seen.get(name)
        if name in judged:
            chosen = only_what_pays(net, kind, chosen, seen, card)
            plan.notes.extend([] if seen is not None else [_unknown(name, found.problem)])
        rows = {path: one.rows for path, one in (seen or {}).items()}
        packed, plan.parts[name] = quantise(net, kind, chosen, budget, rows)
        setattr(result, name, packed)
        log.info("Nexfort: %s: %s", name, plan.summary(name))
    for note in plan.notes:
        log.warning("Nexfort: %s", note)
    result.__class__ = _class_of(type(pipe))
    result.__dict__.update(quantisation=plan, _nexfort_unquantised=weakref.ref(pipe))
    return result


def _check_options(top_percentage: Any, ignores: Any, budget: Any, everything: Any, call: Any, card: Any) -> None:
    """Raise ValueError for values that these cannot have."""
    if not _is_number(top_percentage) or not 0 <= top_percentage <= 100:
        raise ValueError(f"top_percentage is {top_percentage!r}; expected a number from 0 to 100")
    if isinstance(ignores, str):  # whose letters would be taken for names
        raise ValueError(f'ignores is {ignores!r}; expected several names, such as ["{ignores}"]')
    if not _is_number(budget) or not budget >= 0:
        raise ValueError(f"budget is {budget!r}; expected a number such as {BUDGET}")
    if everything is not None and not isinstance(everything, bool):
        raise ValueError(f"everything is {everything!r}; expected True, False or None")
    if not isinstance(call or {}, Mapping):
        raise ValueError(f'call is {call!r}; expected keywords of the pipeline\'s call, such as {{"height": 1024}}')
    if not isinstance(card, Card):
        raise ValueError(f"card is {card!r}; expected a Card of nexfort_engine.quant.cost_model, such as H200")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _networks(pipe: Any, skip: tuple[str, ...]) -> dict[str, nn.Module]:
    """The networks that can be quantised and are not ignored. Raises ValueError where there are none."""
    networks = {name: net for name in NETWORKS if isinstance(net := getattr(pipe, name, None), nn.Module)}
    networks = {name: net for name, net in networks.items() if name not in skip}
    if not networks:
        raise ValueError(
            f"a {type(pipe).__qualname__} was given, and none of the networks that can be quantised was found in it "
            f"({', '.join(NETWORKS)}); expected at least one that is not ignored"
        )
    return networks


def _judged(net: nn.Module, everything: bool | None) -> bool:
    """Whether only those layers of a network are packed that pay."""
    if everything is not None:
        return not everything
    return any(weight.device.type == "cuda" for weight in net.parameters())


def _unknown(name: str, problem: str) -> str:
    return (
        f"{name}: how many rows its layers see is not known ({problem or 'the call did not come to it'}), so "
        f"each is judged as with {ROWS}; expected call= with keywords that the pipeline can be called with"
    )


def _ignored(place: str, skip: tuple[str, ...]) -> str | None:
    return "it is ignored" if any(place == name or place.startswith(f"{name}.") for name in skip) else None


def _check(pipe: Any, name: str, net: nn.Module) -> None:
    """Raise ValueError where a copy of a network would not be what the network is."""
    what = None
    if hasattr(pipe, "_nexfort_original") or isinstance(net, CompiledModule):
        what = "is compiled; expected quantize_pipe first and then compile_pipe, so give it pipe.uncompiled()"
    elif hasattr(net, "_orig_mod"):
        what = "went through torch.compile; expected quantize_pipe before that"
    elif getattr(net, "peft_config", None):
        what = (
            "has a LoRA beside its weights; expected it fused (fuse_lora, then unload_lora_weights), or loaded into "
            "the pipeline that quantize_pipe returns"
        )
    elif (carried := foreign(net)) is not None:
        what = f"carries {carried}; expected quantize_pipe before offloading and hooks are switched on"
    if what is not None:
        raise ValueError(f"the {name} of the {type(pipe).__qualname__} {what}")


def measured_layers(path: str | Path) -> dict[str, float]:
    """Layer -> ssim, from a file. Raises ValueError."""
    try:
        found = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}; expected JSON such as {_EXAMPLE}") from error
    rows = found.items() if isinstance(found, dict) else [("", None)]
    measured = {}
    for name, row in rows:
        value = row.get("ssim") if isinstance(row, dict) else None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{path} has {name!r}: {row!r}; expected a number for ssim, such as {_EXAMPLE}")
        measured[name] = float(value)
    return measured


def _check_names(measured: dict[str, float], networks: dict[str, nn.Module], path: Any) -> None:
    """Raise ValueError where a file is about none of the layers there are: it is another network's."""
    there = [name for net in networks.values() for name, _ in linear_layers(net)]
    if not measured or set(measured) & set(there):
        return
    name = next(iter(measured))
    near = difflib.get_close_matches(name, there, n=1, cutoff=0.0)
    raise ValueError(
        f"{path} names none of the {len(there)} linear layers of {', '.join(networks)}: its first is {name!r}, the "
        f"nearest there is {near[0] if near else None!r}; expected a file made for this network"
    )


def _class_of(kind: type) -> type:
    def unquantised(self: Any) -> Any:
        """The pipeline with whole weights. Raises RuntimeError once nobody holds it any more."""
        found = self._nexfort_unquantised()
        if found is None:
            raise RuntimeError("the pipeline with whole weights is gone: nobody held it, so its memory was given back")
        return found

    def fuse_lora(self: Any, components: Iterable[str] = (), *args: Any, **kwargs: Any) -> Any:
        """diffusers' own, for parts whose weights are not packed."""
        packed = [name for name in self.quantisation.parts if name in components or not components]
        if packed:
            # peft would add to the bits; with safe_fusing it would not even fail
            raise ValueError(
                f"the weights of {', '.join(packed)} are packed, and a LoRA cannot be fused into them; expected it "
                "fused before quantize_pipe, or left beside the weights"
            )
        return kind.fuse_lora(self, components, *args, **kwargs)  # type: ignore[attr-defined]

    table = {"unquantised": unquantised, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    if hasattr(kind, "fuse_lora"):
        table["fuse_lora"] = fuse_lora
    return type(kind.__name__, (kind,), table)
