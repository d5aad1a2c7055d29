# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's autoencoders of images and sound beside the usual ones, tiny: compiled, equal to eager, at other sizes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from large_rows import few
from older_host import skipped_where_missing
from patchers import CONFIG, TOLERANCE, distance
from subjects import graphs_as_they_are
from tiny_other_vaes import OTHER_VAES

from nexfort_engine.hosts.comfy import model as host

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("comfyui", "artefact_cache")]


@pytest.mark.parametrize("name", few(list(OTHER_VAES), ["stable audio 3"]))
@torch.inference_mode()
def test_it_is_compiled_and_gives_eager_s_numbers_at_other_sizes_too(name: str) -> None:
    kind = OTHER_VAES[name]
    with skipped_where_missing():
        model = kind.made()
    with graphs_as_they_are():
        compiled = host.attach_vae(SimpleNamespace(first_stage_model=model), CONFIG).first_stage_model
        for method, sizes in (("decode", kind.latents), ("encode", kind.encoded)):
            for number, size in enumerate(sizes):
                mark = compiled.report.mark()
                assert distance(_called(compiled, method, size), _called(model, method, size)) < TOLERANCE, size
                new = compiled.report.since(mark)
                assert not new["eager"], (method, size)
                assert bool(new["artefacts"]) == (number == 0), (method, size)


def _called(model: Any, method: str, size: tuple[int, ...]) -> torch.Tensor:
    given = torch.randn(size, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(5)  # some draw what they add to a latent
    return getattr(model, method)(given)
