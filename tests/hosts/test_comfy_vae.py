# SPDX-License-Identifier: Apache-2.0
"""`attach_vae` on ComfyUI's own VAE objects, in this process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from large_rows import few
from outside import unexplained
from patchers import CONFIG, MOVES, TOLERANCE, distance
from subjects import graphs_as_they_are
from tiny_autoencoders import kl_vae, taesd, vae, wan_vae

from nexfort_engine.hosts.comfy import model as host

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("comfyui", "artefact_cache")]
KINDS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "taesd": (taesd(4), (1, 4, 8, 12)),
    "kl": (kl_vae(4), (1, 4, 8, 12)),
    "wan": (wan_vae, (1, 16, 3, 4, 6)),
}


class Coder(torch.nn.Module):
    """An autoencoder without a list of blocks whose forward is neither of the two that a VAE calls."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = torch.nn.Linear(8, 4), torch.nn.Linear(4, 8)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(-x)


@torch.inference_mode()
def test_decode_is_not_taken_for_forward() -> None:
    model = Coder()
    compiled = host.attach_vae(SimpleNamespace(first_stage_model=model), CONFIG).first_stage_model
    latent = torch.randn(2, 4)
    for _ in range(2):
        assert distance(compiled.decode(latent), model.decode(latent)) < TOLERANCE
        assert distance(compiled.encode(model.decode(latent)), model.encode(model.decode(latent))) < TOLERANCE
    found = compiled.report.as_dict()
    assert sorted(row["name"] for row in found["regions"]) == ["decoder", "encoder"] and not found["eager"]


@pytest.mark.parametrize("kind", few(["taesd", "kl", "wan"], ["taesd"]))
@torch.inference_mode()
def test_every_part_of_an_autoencoder_is_compiled_or_named(kind: str) -> None:
    build, size = KINDS[kind]
    given_vae = vae(build)
    draw = torch.Generator().manual_seed(3)
    latent, other = torch.randn(size, generator=draw), torch.randn(*size[:-2], size[-1], size[-2], generator=draw)
    model = given_vae.first_stage_model
    with graphs_as_they_are():
        compiled = host.attach_vae(given_vae, CONFIG)
        for given in (latent, other):
            wanted = given_vae.decode(given)
            assert distance(compiled.decode(given), wanted) < TOLERANCE
            assert distance(compiled.encode(wanted), given_vae.encode(wanted)) < TOLERANCE
        assert distance(given_vae.decode(-9 * latent), given_vae.decode(latent)) > MOVES
        found = host.report_of(compiled).as_dict()
        assert not found["eager"]
        for call in (lambda: compiled.decode(latent), lambda: compiled.encode(wanted)):
            assert not unexplained(model, found, call, whole=False)


@pytest.mark.usefixtures("quick")  # test_server.py has one that is lowered
@torch.inference_mode()  # as ComfyUI runs its nodes
def test_a_vae_s_copy_decodes_and_encodes_as_eager_tiled_too() -> None:
    given_vae = vae(taesd(4))
    latent = torch.randn(1, 4, 8, 12, generator=torch.Generator().manual_seed(3))
    wanted = given_vae.decode(latent)
    compiled = host.attach_vae(given_vae, CONFIG)
    assert compiled is not given_vae and compiled.patcher is given_vae.patcher
    assert host.report_of(compiled) is not None and host.report_of(given_vae) is None
    assert distance(compiled.decode(latent), wanted) < TOLERANCE
    assert distance(compiled.encode(wanted), given_vae.encode(wanted)) < TOLERANCE
    tiled = {"tile_x": 8, "tile_y": 8, "overlap": 2}
    assert distance(compiled.decode_tiled(latent, **tiled), given_vae.decode_tiled(latent, **tiled)) < TOLERANCE
    found = host.report_of(compiled).as_dict()
    assert found["calls"] > 2 and found["regions"] and not found["eager"]
    assert torch.equal(given_vae.decode(latent), wanted)
    assert host.report_of(host.attach_vae(compiled, CONFIG)) is host.report_of(compiled)
