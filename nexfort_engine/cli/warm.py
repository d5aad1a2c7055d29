# SPDX-License-Identifier: Apache-2.0
"""Filling the cache before the first user comes: a real ComfyUI runs one step, and what it compiled stays.

It starts and stops that ComfyUI through `comfy_server.py`; what the workflow looks like is the business of
`warm_workflow.py`. Nothing is written into the user's own output or temp folder.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..cache.ephemeral import Scratch
from ..system.process_settings import WAIT_VARIABLE, disabled, keeps_nothing
from .comfy_server import ComfyServer, failure, has_accelerator, mount, plugin_root
from .run_workflows import Console, listening, load_workflow, speeds
from .warm_workflow import CannotWarmError, Workflow, compiles_anything, for_model, kind_of, prepared

PACK = Path(__file__).resolve().parent.parent / "hosts" / "warm_pack"
NO_GPU = (
    "found no GPU: what is compiled fits only the kind of device it was compiled on, so warming needs a GPU of the "
    "target kind; with --cpu it warms for this machine's CPU only"
)
CPU_ONLY = "warming for this machine's CPU only: a GPU needs a warming of its own"


@dataclass(frozen=True)
class Wish:
    """What to warm with. Exactly one of `workflow` and `model` is a file.

    settings: widgets of compile nodes that are put in. sizes: width, height, batch, length for a model file.
    """

    workflow: Path | None = None
    model: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    steps: int = 1

    @property
    def name(self) -> str:
        """The file's path as it was given."""
        return str(self.workflow or self.model)


@dataclass
class Warmed:
    """What a warming did. `engines` has name and report of each compiled model and VAE, `kept` counts the cache."""

    name: str
    device: str
    seconds: float
    error: str | None
    engines: list[dict[str, Any]]
    kept: int

    def total(self, key: str) -> Any:
        """The sum of one figure of the reports."""
        return sum(engine["report"][key] for engine in self.engines)

    @property
    def problem(self) -> str | None:
        """Why the cache is not warm, if it is not."""
        compiled = self.total("artefacts_compiled")
        if self.error is not None:
            return self.error
        if not compiled + self.total("artefacts_loaded"):
            return "; ".join(["nothing ran compiled", *self.eager()])
        if self.kept < compiled:
            notes = dict.fromkeys(note for engine in self.engines for note in engine["report"]["notes"])
            return "; ".join([f"{compiled} blocks were compiled and the cache holds {self.kept}", *notes])
        return None

    def eager(self) -> list[str]:
        """Each block that ran uncompiled, and why."""
        rows = [row for engine in self.engines for row in engine["report"]["eager"]]
        return list(dict.fromkeys(f"{row['region']} ran uncompiled: {row['reason']}" for row in rows))

    def __str__(self) -> str:
        facts = self.as_dict()
        made = (
            f"{self.name}: {facts['compiled']} blocks compiled in {facts['seconds_compiling']:.1f} s, "
            f"{facts['loaded']} loaded in {facts['seconds_loading']:.1f} s, {facts['seconds']:.1f} s in all, "
            f"for {self.device}"
        )
        told = [made, *speeds(self.engines), *self.eager()]
        return "\n".join([*told, *([] if self.problem is None else [f"not warm: {self.problem}"])])

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON can hold it."""
        return {
            "warmed": self.name,
            "device": self.device,
            "compiled": self.total("artefacts_compiled"),
            "loaded": self.total("artefacts_loaded"),
            "seconds": round(self.seconds, 3),
            "seconds_compiling": round(self.total("seconds_cold"), 3),
            "seconds_loading": round(self.total("seconds_warm"), 3),
            "eager": self.eager(),
            "problem": self.problem,
            "engines": self.engines,
        }


def refuse_in_vain(cpu: bool, python: str) -> None:
    """RuntimeError with one sentence where warming could fill nothing, or only for a device that was not meant."""
    if disabled():
        raise RuntimeError("NEXFORT_DISABLE is set, so nothing would be compiled; unset it and run this again")
    if keeps_nothing():
        raise RuntimeError("NEXFORT_GRAPH_CACHE is 0, so nothing would be kept; unset it and run this again")
    if not cpu and not has_accelerator(python):
        raise RuntimeError(NO_GPU)


def warm(
    comfyui: Path,
    wish: Wish,
    say: Callable[[str], None],
    *,
    cpu: bool = False,
    cache_dir: Path | None = None,
    extra_args: Sequence[str] = (),
    on_line: Callable[[str], None] | None = None,
    **server_options: Any,
) -> Warmed:
    """Starts the ComfyUI, runs one step, and says what is compiled now.

    cache_dir: fill this directory; all that is needed then lies there, also what a base cache has. server_options: as
    for ComfyServer. ValueError for a file that cannot be warmed with, ComfyError where ComfyUI does not start.
    """
    source = _source(wish)
    with _scratch(wish) as (arguments, name):
        server = ComfyServer(
            comfyui,
            plugin=plugin_root(),
            cache_dir=cache_dir,
            env={WAIT_VARIABLE: "1", **({} if cache_dir is None else {"NEXFORT_CACHE_BASE": ""})},
            extra_args=[*arguments, *(["--cpu"] if cpu and "--cpu" not in extra_args else []), *extra_args],
            on_line=on_line,
            **server_options,
        )
        say(f"starting ComfyUI in {server.comfyui}")
        with server:
            workflow = source(server.get("/object_info"), name)
            if not compiles_anything(workflow):
                raise CannotWarmError(f"{wish.name} runs no model and no VAE: there is nothing to compile in it")
            say(f"{wish.name}: {wish.steps} step{'s' if wish.steps > 1 else ''}, compiling what is not in the cache")
            return _run(server, wish.name, workflow, say)


def _source(wish: Wish) -> Callable[[Mapping[str, Any], str], Workflow]:
    """What makes the workflow once the server tells its nodes; a file that will not do is refused before."""
    if wish.workflow is not None:
        given = load_workflow(wish.workflow)
        return lambda classes, _: prepared(given, classes, wish.settings, wish.steps)
    assert wish.model is not None, "a wish has a workflow or a model"
    folder = kind_of(wish.model)
    return lambda classes, name: for_model(folder, name, classes, wish.settings, wish.sizes, wish.steps)


def _run(server: ComfyServer, name: str, workflow: Workflow, say: Callable[[str], None]) -> Warmed:
    began = time.monotonic()
    with listening(server, Console(say)):
        error = failure(server.wait(server.queue(workflow)))
    seconds = time.monotonic() - began
    devices = server.get("/system_stats").get("devices") or [{}]
    engines = server.get("/nexfort/report")["engines"]
    kept = server.get("/nexfort/cache")["count"]
    return Warmed(name, str(devices[0].get("name", "?")), seconds, error, engines, kept)


@contextmanager
def _scratch(wish: Wish) -> Iterator[tuple[list[str], str]]:
    """ComfyUI's arguments for a run that leaves nothing behind, and the name under which it lists the model file."""
    with Scratch() as folder:
        arguments = []
        for option in ("output", "temp"):
            (folder / option).mkdir()
            arguments += [f"--{option}-directory", str(folder / option)]
        name = ""
        if wish.model is not None:
            directory, name = _shown(wish.model, folder)
            models = folder / "model_paths.yaml"  # JSON is YAML, and quotes every path safely
            models.write_text(json.dumps({"warm": {kind_of(wish.model): str(directory)}}), encoding="utf-8")
            pack = mount(PACK, folder, "nexfort_warm")
            arguments += ["--extra-model-paths-config", str(pack), "--extra-model-paths-config", str(models)]
        yield arguments, name


def _shown(model: Path, folder: Path) -> tuple[Path, str]:
    """A directory that holds the model file and little else, and the file's name in it.

    The name is the file's own, for the cache is shown by it; a folder tells it from another file of that name.
    """
    alone = folder / "models"
    name = os.path.join("nexfort_warm", model.name)
    (alone / name).parent.mkdir(parents=True)
    try:
        os.symlink(model.absolute(), alone / name)
    except OSError:  # Windows lets only administrators link; the folder where it lies does as well, if more slowly
        return model.absolute().parent, model.name
    return alone, name
