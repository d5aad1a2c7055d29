# SPDX-License-Identifier: Apache-2.0
"""A node pack that `benchmarks.prompt_clock` mounts in its ComfyUI: models of random numbers, marks of the clock.

With NEXFORT_CLOCK_FILES the models are read from files in that folder, which are written where they are missing.

Marks wait for the GPU. They stand where a part of a prompt ends: the models are there, the text is encoded, the latent
is sampled, the picture is decoded.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks import card, clock_workloads
from benchmarks.one_run import use_only_efficient_attention

if os.environ.get("NEXFORT_CLOCK_NOISE"):  # the same network by other kernels: how far roundings alone go
    for kind in ("cudnn", "flash"):
        getattr(torch.backends.cuda, f"enable_{kind}_sdp")(False)
    use_only_efficient_attention()

_FILES = os.environ.get("NEXFORT_CLOCK_FILES", "")  # folder of the models' files
_marks: dict[str, float] = {}
_making: list[float] = []  # seconds in which numbers of models were drawn
_WHOLE = ("INT", {"default": 1, "min": 0, "max": 1 << 30})
_TEXT = ("STRING", {"default": ""})


class _Memory:
    """The most of the card that was in use since it was asked, in bytes, whoever used it."""

    def __init__(self) -> None:
        self.most = self.began_with = card.used()
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            self.most = max(self.most, card.used())
            time.sleep(0.005)


_memory = _Memory()


@contextmanager
def _drawing() -> Iterator[None]:
    began = time.monotonic()
    yield
    card.settle()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    _memory.most = card.used()  # what drawing took is no part of the prompt
    _making.append(time.monotonic() - began)


def _weights(name: str, draw: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What `draw` gives; where there is a folder for files, as ComfyUI reads it from its file there."""
    if not _FILES:
        with _drawing():
            return draw()
    import comfy.utils

    file = Path(_FILES) / f"{name}.safetensors"
    if not file.exists():
        with _drawing():
            safetensors.torch.save_file(draw(), file.with_suffix(".part"))
            file.with_suffix(".part").rename(file)
    return comfy.utils.load_torch_file(str(file))


class _Any(str):
    """A type that is every type."""

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class _Node:
    CATEGORY, FUNCTION = "testing", "make"
    TAKES: dict[str, Any] = {}  # noqa: RUF012  # as ComfyUI has it

    @classmethod
    def INPUT_TYPES(cls) -> dict:  # noqa: N802  # ComfyUI's name
        """The inputs as ComfyUI reads them."""
        return {"required": cls.TAKES}


class ClockModel(_Node):
    """The network of a workload; another number gives other weights."""

    RETURN_TYPES, TAKES = ("MODEL",), {"workload": _TEXT, "number": _WHOLE}

    def make(self, workload: str, number: int) -> tuple:
        """As ComfyUI's loader gives it."""
        row = clock_workloads.WORKLOADS[workload]
        weights = _weights(f"{workload}-network{number}", lambda: clock_workloads.weights_of(row, _device(), number))
        return (clock_workloads.model_of(row, weights),)


class ClockFiles(_Node):
    """The text encoder and the VAE of a workload."""

    RETURN_TYPES, TAKES = ("CLIP", "VAE"), {"workload": _TEXT}

    def make(self, workload: str) -> tuple:
        """As ComfyUI's loaders give them."""
        row, clip = clock_workloads.WORKLOADS[workload], []
        for i in range(len(row.encoder.classes)):
            drawn = partial(clock_workloads.clip_weights, row, i, _device())
            clip.append(_weights(f"{workload}-clip{i}", drawn))
        vae = _weights(f"{workload}-vae", lambda: clock_workloads.vae_weights(row, _device()))
        return clock_workloads.clip_of(row, clip), clock_workloads.vae_of(row, vae)


class ClockText(_Node):
    """A prompt of so many tokens, encoded by the text encoder."""

    RETURN_TYPES, TAKES = ("CONDITIONING",), {"clip": ("CLIP",), "tokens": _WHOLE, "seed": _WHOLE}

    def make(self, clip: Any, tokens: int, seed: int) -> tuple:
        """A conditioning, as CLIPTextEncode gives it for a text of so many tokens."""
        draw = torch.Generator().manual_seed(seed)
        places = [(number, 1.0) for number in torch.randint(100, 30000, (tokens,), generator=draw).tolist()]
        empty, other = clip.tokenize(""), clip.tokenize("a horse in the rain")
        given = {name: [_filled(rows[0], other[name][0], places)] for name, rows in empty.items()}
        return (clip.encode_from_tokens_scheduled(given),)


def _filled(empty: list[Any], other: list[Any], places: list[Any]) -> list[Any]:
    """The tokens of an empty text with others where a text stands. other: the tokens of any text.

    Encoders of a fixed length keep it. Where the last token is another, the text stands at the end. RuntimeError where
    the tokenizer has no vocabulary.
    """
    pairs = enumerate(zip(empty, other, strict=False))
    at = next((i for i, (one, two) in pairs if one[0] != two[0]), min(len(empty), len(other)))
    if at == max(len(empty), len(other)):
        raise RuntimeError("the tokenizer gives the same for every text; are its files there?")
    if len(empty) == len(other) and empty[-1][0] != other[-1][0]:
        return [*empty, *places][-len(empty) :]
    filled = [*empty[:at], *places, *empty[at:]]
    return filled[: len(empty)] if len(empty) == len(other) else filled


class ClockLora(_Node):
    """A LoRA of random numbers for all large matrices; another seed is another file."""

    RETURN_TYPES = ("MODEL",)
    TAKES = {  # noqa: RUF012
        "model": ("MODEL",),
        "workload": _TEXT,
        "seed": _WHOLE,
        "strength": ("FLOAT", {"default": 1.0}),
    }
    _files: dict[tuple[str, int], dict[str, torch.Tensor]] = {}  # noqa: RUF012

    def make(self, model: Any, workload: str, seed: int, strength: float) -> tuple:
        """The patched model."""
        import comfy.sd

        key = workload, seed
        if key not in self._files:
            with _drawing():
                self._files[key] = clock_workloads.lora_of(model, clock_workloads.WORKLOADS[workload], seed)
        return (comfy.sd.load_lora_for_models(model, None, self._files[key], strength, 0)[0],)


class ClockReference(_Node):
    """The latent of a picture that a prompt of a workload refers to."""

    RETURN_TYPES = ("LATENT",)
    TAKES = {"workload": _TEXT, "height": _WHOLE, "width": _WHOLE, "seed": _WHOLE}  # noqa: RUF012

    def make(self, workload: str, height: int, width: int, seed: int) -> tuple:
        """Random numbers."""
        return ({"samples": clock_workloads.WORKLOADS[workload].reference(height, width, seed)},)


class ClockLatent(_Node):
    """An empty latent of a workload."""

    RETURN_TYPES, TAKES = ("LATENT",), {"workload": _TEXT, "height": _WHOLE, "width": _WHOLE}

    def make(self, workload: str, height: int, width: int) -> tuple:
        """Zeros."""
        return ({"samples": clock_workloads.WORKLOADS[workload].latent(height, width)},)


class ClockMark(_Node):
    """What it is given, at a moment that is remembered by a name."""

    RETURN_TYPES, TAKES = (_Any("*"),), {"value": (_Any("*"),), "name": _TEXT}

    def make(self, value: Any, name: str) -> tuple:
        """The same value."""
        card.settle()
        _marks[name] = time.time()
        return (value,)


class ClockKeep(_Node):
    """The end of a prompt: writes the picture to a file and tells what was marked."""

    RETURN_TYPES, OUTPUT_NODE, TAKES = (), True, {"image": ("IMAGE",), "file": _TEXT}

    def make(self, image: torch.Tensor, file: str) -> dict:
        """For the history: seconds since the epoch by mark, and GiB of the card that were in use at most."""
        _marks["end"] = time.time()
        torch.save(image.cpu(), file)
        told = {"marks": [dict(_marks)], "gib": [card.gib(_memory.most - _memory.began_with)], "gpu": [card.name()]}
        told["making"] = [sum(_making)]
        _marks.clear()
        _making.clear()
        _memory.most = card.used()
        return {"ui": told}


_NODES: list[Callable[..., Any]] = [
    *(ClockModel, ClockFiles, ClockText, ClockReference, ClockLora, ClockLatent, ClockMark, ClockKeep)
]
NODE_CLASS_MAPPINGS = {kind.__name__: kind for kind in _NODES}
