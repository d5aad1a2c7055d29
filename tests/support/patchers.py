# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's own model patchers around small networks, its own sampler on them, and what a change of one must keep.

No test lives here. ComfyUI must be imported first (the fixture `comfyui` in conftest.py does it).
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from backbones import make
from large_rows import few
from subjects import graphs_as_they_are
from torch import nn

from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.hosts.comfy import model as host

STEPS = 2
TOLERANCE = 1e-3  # of the latent after the sampler's steps
MOVES = 100 * TOLERANCE  # what a contract varies must move the eager result by this much at least
CONFIG = CompileConfig.parse(None)
Change = Callable[[Any], Any]  # a patcher to a changed clone of it, as a node makes it
Conditions = list[list[Any]]

# What a loader finds out about a network: ComfyUI maps the names of LoRA keys by it, and FreeU its widths. FreeU acts
# where a level is twice or four times as wide as is found here; both of the UNet's, with their 64, are to be such.
_FOUND = {
    "SD15": {
        **{"model_channels": 32, "num_res_blocks": [2, 2], "channel_mult": [1, 1], "transformer_depth": [1] * 4},
        **{"transformer_depth_output": [1] * 6, "transformer_depth_middle": 1},
    },
    "Flux": {"depth": 2, "depth_single_blocks": 2, "hidden_size": 32},
    "SD3": {"depth": 2, "num_blocks": 2},
    "Lumina2": {"n_layers": 2, "n_refiner_layers": 1, "dim": 32},
}
FAMILIES = {  # backbones.py -> supported_models.py
    **{"comfy_unet": "SD15", "comfy_flux": "Flux", "comfy_sd3": "SD3"},
    **{"comfy_wan": "WAN21_T2V", "comfy_qwen": "QwenImage", "comfy_lumina": "Lumina2"},
}
FEW = ("comfy_unet", "comfy_flux")  # of different build: `make test` runs these, and Wan in the contracts
_BASE_MODELS = {"SD15": "BaseModel", "WAN21_T2V": "WAN21"}  # where model_base.py calls it otherwise
_FRAMES = {"WAN21": (3,), "QwenImage": (1,)}  # of the latents of families that have time


def by_family(*found: tuple[Any, ...]) -> list[Any]:
    """Rows that begin with a family, as pytest parameters: `make test` runs those of the few."""
    return [pytest.param(*row, marks=() if row[0] in FEW else pytest.mark.large) for row in found]


families = pytest.mark.parametrize("name", by_family(*((name,) for name in FAMILIES)))
one_family = pytest.mark.parametrize("name", few(list(FAMILIES), ["comfy_flux"]))  # that compiles faster


def patcher_around(network: nn.Module, *, flux: bool = False, family: str = "") -> Any:
    """A ModelPatcher as a loader makes it, with the family's sampling and conditioning; `flux` is that family."""
    import comfy.latent_formats
    import comfy.model_base
    import comfy.model_management
    import comfy.model_patcher
    import comfy.supported_models

    family = "Flux" if flux else family or "SD15"
    found = {"disable_unet_model_creation": True, "in_channels": 4, "out_channels": 4, **_FOUND.get(family, {})}
    config = getattr(comfy.supported_models, family)(found)
    kind = getattr(comfy.model_base, _BASE_MODELS.get(family, family))
    if kind.__name__ in _FRAMES:  # their own formats scale sixteen channels, one by one
        config.latent_format = comfy.latent_formats.LatentFormat()
        config.latent_format.latent_dimensions = 3
    model = kind(config, device="cpu")
    if not hasattr(network, "dtype"):
        network.dtype = torch.float32  # type: ignore[assignment]  # what every network of ComfyUI has
    model.diffusion_model = network.eval().requires_grad_(False)
    comfy.model_management.archive_model_dtypes(network)
    cpu = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(model, load_device=cpu, offload_device=cpu)


def another(name: str, seed: int = 7) -> Any:
    """A second checkpoint of a family: the same network with other weights."""
    network = make(name).module
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in network.parameters():
            weight.mul_(1.0 + 0.5 * torch.randn(weight.shape, generator=generator))
    return patcher_around(network, family=FAMILIES[name])


def sample(
    patcher: Any,
    *,
    seed: int = 0,
    prompt: int = 0,
    size: tuple[int, int] = (8, 8),
    batch: int = 1,
    length: int = 64,
    cfg: float = 4.0,
    steps: int = STEPS,
    channels: int = 4,
    edit: Callable[[Conditions, Conditions], tuple[Conditions, Conditions]] | None = None,
) -> torch.Tensor:
    """The latent of two steps of ComfyUI's sampler. With cfg 1 the network sees `batch` rows, else twice as many.

    edit: what nodes between the prompts and the sampler make of positive and negative.
    """
    import comfy.sample

    frames = _FRAMES.get(type(patcher.model).__name__, ())
    noise = torch.randn(batch, channels, *frames, *size, generator=torch.Generator().manual_seed(seed))
    words = torch.Generator().manual_seed(100 + prompt)
    positive, negative = (
        [[torch.randn(1, length, 16, generator=words), {"pooled_output": torch.randn(1, 8, generator=words)}]]
        for _ in range(2)
    )
    if edit is not None:
        positive, negative = edit(positive, negative)
    torch.manual_seed(seed)  # some patches draw from it
    with torch.inference_mode():
        return comfy.sample.sample(
            patcher, noise, steps, cfg, "euler", "simple", positive, negative, torch.zeros_like(noise),
            disable_pbar=True, seed=seed,
        ).clone()  # fmt: skip


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """||found - wanted|| / ||wanted||, infinite where one of them is not a number."""
    result = float((found - wanted).norm() / wanted.norm())
    return result if result == result else float("inf")


def node(name: str, **inputs: Any) -> Change:
    """A node of ComfyUI's as a function of the model: its module and class, and its widgets."""

    def run(patcher: Any) -> Any:
        import importlib

        module, _, kind = name.rpartition(".")
        result = getattr(importlib.import_module(module), kind).execute(patcher, **inputs)
        return result[0]

    return run


def with_method(name: str, *args: Any) -> Change:
    """A clone on which a method of the patcher was called, as patch nodes do it."""

    def change(patcher: Any) -> Any:
        clone = patcher.clone()
        getattr(clone, name)(*args)
        return clone

    return change


def with_option(name: str, value: Any) -> Change:
    """A clone with one more of the options that blocks are called with."""

    def change(patcher: Any) -> Any:
        clone = patcher.clone()
        clone.model_options["transformer_options"][name] = value
        return clone

    return change


def with_lora(patcher: Any, strength: float, size: float = 0.05, dims: int = 2) -> Any:
    """A clone with a change of every weight matrix of the blocks, as a LoRA node makes it; size: of its numbers.

    dims: 4 for weights of convolutions instead.
    """
    clone = patcher.clone()
    generator = torch.Generator().manual_seed(3)
    patches = {
        name: (size * torch.randn(weight.shape, generator=generator),)
        for name, weight in patcher.model.state_dict().items()
        if "blocks" in name and name.endswith("weight") and weight.ndim == dims
    }
    assert len(clone.add_patches(patches, strength)) == len(patches) > 4
    return clone


def in_the_middle(patcher: Any, action: Callable[[], None]) -> Any:
    """A clone in whose sampling something happens between the first and the second step."""
    from comfy.patcher_extension import WrappersMP

    clone, steps = patcher.clone(), []

    def predict(executor: Any, *args: Any, **kwargs: Any) -> Any:
        if len(steps) == 1:
            action()
        steps.append(1)
        return executor(*args, **kwargs)

    clone.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "a test's", predict)
    return clone


# ---- before and after a change ---------------------------------------------------------------------------------------


class Pair:
    """A patcher and its compiled clone after a first picture. Keywords of its methods are those of `sample`."""

    def __init__(self, name: str) -> None:
        self.patcher = patcher_around(make(name).module, family=FAMILIES[name])
        self.clone = host.attach(self.patcher, CONFIG)
        self._eager: list[tuple[str, str]] = []
        report: Any = host.report_of(self.clone)
        report.eager = functools.partial(self._ran_eager, report.eager)
        self.report = report
        self.blank = self.mark()
        assert distance(sample(self.clone), sample(self.patcher)) < TOLERANCE
        assert not self.since(self.blank)["eager"]
        self.blank = self.mark()

    def _ran_eager(self, tell: Callable[[str, str], None], region: str, reason: str) -> None:
        self._eager.append((region, reason))
        tell(region, reason)

    @property
    def network(self) -> Any:
        """The plain network that both run."""
        return self.patcher.model.diffusion_model

    def mark(self) -> tuple[Any, int]:
        """This moment, for `since`."""
        return self.report.mark(), len(self._eager)

    def since(self, mark: tuple[Any, int]) -> dict[str, Any]:
        """What the report gained; "eager" has also what it knew before, if that happened again."""
        again = sorted(set(self._eager[mark[1] :]))
        return {**self.report.since(mark[0]), "eager": [{"region": r, "reason": why} for r, why in again]}

    def honours(self, change: Change, *, first: Change | None = None, **call: Any) -> dict[str, Any]:
        """Assert the contract of a change, which is: it moves eager; compiled follows; it leaves nothing behind.

        first: the change as a node in front of the compiling one; that order is asked as well, unless it is the same.
        Returns what the report gained while the change was in force.
        """
        plain, before, mark = sample(self.patcher, **call), sample(self.clone, **call), self.mark()
        wanted = sample(change(self.patcher), **call)
        assert distance(wanted, plain) > MOVES, "the change does nothing, so that the contract says nothing"
        assert distance(sample(change(self.clone), **call), wanted) < TOLERANCE, self.since(mark)
        new = self.since(mark)
        in_front = host.attach((first or change)(self.patcher), CONFIG)
        assert distance(sample(in_front, **call), wanted) < TOLERANCE, "as a node in front of the compiling one"
        self.is_left_by(plain, before, **call)
        return new

    def is_left_by(self, plain: torch.Tensor, before: torch.Tensor, **call: Any) -> None:
        """Assert that a change that was taken off leaves nothing behind: both give the bits they gave before."""
        mark = self.mark()
        assert torch.equal(sample(self.clone, **call), before), "the change is felt after it was taken off"
        assert torch.equal(sample(self.patcher, **call), plain), "bypassing the node gives another picture"
        nothing_new(self.since(mark))


def regions_of(pair: Pair) -> set[str]:
    """The names of all regions of a pair's network."""
    return {row["name"] for row in pair.report.as_dict()["regions"]}


def reported(patcher: Any) -> dict[str, Any]:
    """What the report of a compiled patcher says."""
    report = host.report_of(patcher)
    assert report is not None
    return report.as_dict()


def nothing_new(new: dict[str, Any]) -> None:
    """Assert that what the report gained is no artefact, no variant and no block that ran eager."""
    assert not new["artefacts"] and not new["variants"] and not new["eager"], new


def eager_only(new: dict[str, Any], regions: set[str], reason: str) -> None:
    """Assert that these regions ran eager with a reason that has these words, and that nothing was compiled."""
    assert {row["region"] for row in new["eager"]} == regions, new["eager"]
    assert all(reason in row["reason"] for row in new["eager"]), new["eager"]
    assert not new["artefacts"] and not new["variants"], new


def around_only(new: dict[str, Any], regions: set[str]) -> None:
    """Assert that no block ran eager, and that only these were compiled, around what others put on their layers."""
    assert not new["eager"], new["eager"]
    assert {row["region"] for row in new["artefacts"]} <= regions, new["artefacts"]


_stores: dict[str, Path] = {}  # what the first picture of a family leaves in the cache


@contextlib.contextmanager
def pairs() -> Iterator[Callable[[str], Pair]]:
    """Makes pairs by the name of their backbone, each with a cache that knows its first picture and nothing else.

    Graphs are run as they are, and captured once a session.
    """
    with graphs_as_they_are(), pytest.MonkeyPatch.context() as patch:

        def pair(name: str) -> Pair:
            if name not in _stores:
                first = Path(tempfile.mkdtemp(prefix="nexfort-first-"))
                patch.setenv("NEXFORT_CACHE_DIR", str(first))
                Pair(name)
                _stores[name] = first
            mine = Path(tempfile.mkdtemp(prefix="nexfort-pair-")) / "store"
            shutil.copytree(_stores[name], mine)
            patch.setenv("NEXFORT_CACHE_DIR", str(mine))
            made = Pair(name)
            assert not made.report.as_dict()["artefacts_compiled"]
            return made

        yield pair
