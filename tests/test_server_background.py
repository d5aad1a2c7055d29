# SPDX-License-Identifier: Apache-2.0
"""A real ComfyUI server whose nodes have their defaults: nobody waits for the compiler.

The other servers of the tests wait (`served.server`), because they ask what compiled pictures are like.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import served

from nexfort_engine.cli.comfy_server import ComfyServer

pytestmark = [pytest.mark.comfy, pytest.mark.slow]
NAME = "flux_compile_model"
LONGEST = 240.0


def engine(server: ComfyServer) -> dict[str, Any]:
    (found,) = server.get("/nexfort/report")["engines"]
    return dict(found["report"])


def states(server: ComfyServer) -> list[str]:
    return [node["state"] for node in server.get("/nexfort/nodes")["nodes"]]


def until_made(server: ComfyServer) -> list[str]:
    """Wait until nothing is made any more: what the badge said meanwhile."""
    seen, deadline = [], time.monotonic() + LONGEST
    while engine(server)["compiling_beside"]:
        seen += states(server)
        assert time.monotonic() < deadline, engine(server)
        time.sleep(0.2)
    return seen


def picture(server: ComfyServer, base: Path, **words: Any) -> numpy.ndarray:
    return served.latent(base, server.run(served.tiny_workflow(NAME, **words), timeout=LONGEST))


def test_the_first_picture_is_eager_s_and_the_next_ones_are_compiled(tmp_path: Path) -> None:
    comfyui = served.comfyui_or_skip()
    base = served.base_folder(tmp_path / "base", comfyui, *served.tiny_for(NAME)["files"])
    cache = tmp_path / "cache"
    with served.server(comfyui, base, cache, "--cache-classic", waits=False) as server:
        wanted = {seed: picture(server, base, compiled=False, seed=seed) for seed in (3, 4)}
        assert numpy.array_equal(picture(server, base), wanted[3]), "eager's to the bit"
        told = engine(server)
        assert told["calls"] and not told["eager"] and not told["artefacts_loaded"]
        assert set(until_made(server)) <= {"background"} and states(server) == ["compiled"]
        assert engine(server)["artefacts_compiled"] > 2
        picture(server, base, seed=5)  # ComfyUI keeps the latent of an equal prompt
        found = {seed: picture(server, base, seed=seed) for seed in (4, 3)}
        for seed, one in found.items():
            assert not numpy.array_equal(one, wanted[seed])
            away = numpy.linalg.norm(one - wanted[seed]) / numpy.linalg.norm(wanted[seed])
            assert away < served.TOLERANCE
        assert not engine(server)["compiling_beside"], "another seed compiles nothing"
    with served.server(comfyui, base, cache, "--cache-classic", waits=False) as server:
        assert numpy.array_equal(picture(server, base), found[3]), "a warm server is compiled from its first step"
        told = engine(server)
        assert told["artefacts_loaded"] > 2 and not told["artefacts_compiled"] and states(server) == ["warm"]
