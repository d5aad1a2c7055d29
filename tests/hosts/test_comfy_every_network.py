# SPDX-License-Identifier: Apache-2.0
"""Every network that ComfyUI's loaders can make is one that tests run tiny, or is named here with the reason.

A ComfyUI with a new family fails this test, which names the family.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import loader_families
import pytest
from backbones import BACKBONES
from comfy_families import FAMILIES

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("comfyui")]

_NOT_SAMPLED = "it is called once for a picture, and no sampler calls it"
_NO_TINY_ONE = "no tiny one was made so far"
_FIXED = "its code fixes its sizes, so that there can be no tiny one"
# by class, below comfy.ldm
UNTRIED = {
    "rt_detr.rtdetr_v4.RTv4": _NOT_SAMPLED,
    "sam3.detector.SAM3Model": _NOT_SAMPLED,
    "depth_anything_3.model.DepthAnything3Net": _NOT_SAMPLED,
    "trellis2.model.Trellis2": _NO_TINY_ONE,
    "minimax_music.dit.MiniMaxMusic3DiT": _FIXED,
}


class _FoundError(Exception):
    """Says which class is made, in the place of making it."""


def _models(kind: type) -> Iterator[str]:
    """The classes of comfy.model_base that the detected kind of model may become, by its own code."""
    for cls in kind.__mro__:
        if "get_model" not in vars(cls):
            continue
        code = ast.parse(textwrap.dedent(inspect.getsource(vars(cls)["get_model"])))
        for node in ast.walk(code):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("model_base", "comfy.model_base"):
                yield node.attr
        if "super()" not in ast.unparse(code):
            return


def _network(model: type) -> type:
    """The network that a class of comfy.model_base makes; what it is told is made up."""
    given = list(inspect.signature(model).parameters.values())
    try:
        model(*[MagicMock() for one in given if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD])
    except _FoundError as found:
        return found.args[0]  # type: ignore[no-any-return]
    raise AssertionError(f"{model.__name__} makes no network")


def networks(monkeypatch: pytest.MonkeyPatch) -> dict[type, list[str]]:
    """Network -> the kinds of models that comfy.supported_models detects and that have it."""
    import comfy.model_base
    import comfy.supported_models

    def told(_: Any, __: Any, *args: Any, unet_model: Any = comfy.model_base.UNetModel, **___: Any) -> None:
        raise _FoundError(args[2] if len(args) > 2 else unet_model)

    found: dict[type, list[str]] = {}
    with monkeypatch.context() as patched:
        patched.setattr(comfy.model_base.BaseModel, "__init__", told)
        for kind in comfy.supported_models.models:
            models = [getattr(comfy.model_base, name) for name in dict.fromkeys(_models(kind))]
            models = [one for one in models if issubclass(one, comfy.model_base.BaseModel)]
            assert models, f"{kind.__name__} becomes no model"
            for model in models:
                found.setdefault(_network(model), []).append(kind.__name__)
    return found


def tried(known: dict[type, Any], monkeypatch: pytest.MonkeyPatch) -> set[type]:
    """Those of the known networks of which the tables of tests have a tiny one. None is made."""
    found = set()

    def told(self: Any, *_: Any, **__: Any) -> None:
        raise _FoundError(type(self))

    rows = [row for row in (*BACKBONES.values(), *FAMILIES.values()) if row.host == "comfy"]
    with monkeypatch.context() as patched:
        for network in known:
            patched.setattr(network, "__init__", told)
        for row in rows:
            try:
                row.build(1)
            except _FoundError as one:
                found.add(one.args[0])
            except (ImportError, AttributeError):  # an older ComfyUI has not all of them
                continue
    loaded = {row.name for row in (*loader_families.FAMILIES.values(), *loader_families.SOUNDING.values())}
    return found | {network for network in known if _name(network) in loaded}


def _name(network: type) -> str:
    return f"{network.__module__}.{network.__qualname__}".removeprefix("comfy.ldm.")


def test_each_network_of_comfyui_is_tried_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    known = networks(monkeypatch)
    found = {_name(network): kinds for network, kinds in known.items()}
    ours = {_name(network) for network in tried(known, monkeypatch)}
    assert len(found) > 30 and len(ours) > 25, "the walk finds them"
    new = {name: kinds for name, kinds in found.items() if name not in ours and name not in UNTRIED}
    assert not new, f"give each a row in tests/support/comfy_*_families.py, or a reason here: {new}"
    assert not ours & UNTRIED.keys(), "there is a tiny one by now"


def test_a_new_network_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import comfy.model_base
    import comfy.supported_models
    from torch import nn

    class Network(nn.Module):
        """Of a family that nobody knows."""

    class Model(comfy.model_base.BaseModel):  # type: ignore[misc, name-defined]
        """The same, as a model."""

        def __init__(self, model_config: Any, device: Any = None) -> None:
            super().__init__(model_config, device=device, unet_model=Network)

    monkeypatch.setattr(comfy.model_base, "Model", Model, raising=False)
    monkeypatch.setattr(comfy.supported_models, "models", [*comfy.supported_models.models, Detected])
    known = networks(monkeypatch)
    assert known[Network] == ["Detected"] and Network not in tried(known, monkeypatch)


class Detected:
    """A kind of model as comfy.supported_models has them."""

    def get_model(self, state_dict: Any, prefix: str = "", device: Any = None) -> Any:
        import comfy.model_base

        return comfy.model_base.Model(self, device=device)  # type: ignore[attr-defined]
