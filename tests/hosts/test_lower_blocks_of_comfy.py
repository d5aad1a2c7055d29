# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's blocks lowered for a GPU that is not there: rotary operators, modulation, prompts, attention of others."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from host_blocks import HOST_BLOCKS, host_captured, with_attention_of_others
from large_rows import few
from lowering_ahead import LoweredOnDemand, code_of, lowered_ahead

from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.guards.shape_guards import Conditions
from nexfort_engine.lowering import inductor

pytest.importorskip("triton", reason="kernels for a GPU are compiled with Triton")
if torch.version.cuda is None or torch.cuda.is_available():
    pytest.skip("needs a torch built for CUDA and no GPU: what touches one must fail", allow_module_level=True)


# ---- rotary operators of ComfyUI's blocks ----------------------------------------------------------------------------


def _of_host(folder: Path, mode: str, *, fused: bool = True) -> Mapping[str, Path]:
    config = CompileConfig.parse({"mode": mode, "options": {"fuse.rotary": fused}})
    return LoweredOnDemand(folder, config.lowering_options("cuda"), host_captured)


@pytest.fixture(scope="module")
def turned(comfyui: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """ComfyUI's blocks without their rotary operators."""
    return _of_host(tmp_path_factory.mktemp("turned"), "O2")


def _launches(payload: Path) -> int:
    """Kernels of Inductor's and calls of the rotary operators in one call of a payload's code."""
    calls = "".join(piece.partition("runner = ")[0] for piece in code_of(payload).split("def call(")[1:])
    return calls.count(".run(") + calls.count("= torch.ops.comfy_kitchen.")


@pytest.mark.comfy
@pytest.mark.parametrize(
    ("kind", "launches"),
    few([("flux_double", 11), ("flux_single", 5), ("wan", 7), ("z_image", 8)], []),
)
def test_a_rotary_operator_is_part_of_the_kernel_before_it(
    kind: str, launches: int, turned: Mapping[str, Path]
) -> None:
    """One that has a norm in it is a kernel either way; Z-Image's two gates are kernels by themselves."""
    assert "comfy_kitchen" not in code_of(turned[kind])
    assert _launches(turned[kind]) == launches


@pytest.mark.comfy
@pytest.mark.large
@pytest.mark.parametrize(("kind", "launches"), [("wan", 10), ("flux_double", 14)])
def test_without_the_pass_it_is_a_launch_of_its_own(comfyui: Path, kind: str, launches: int, tmp_path: Path) -> None:
    assert _launches(_of_host(tmp_path, "O2", fused=False)[kind]) == launches


@pytest.mark.comfy
@pytest.mark.large
@pytest.mark.parametrize(("kind", "launches"), [("flux_single", 7), ("wan", 13)])
def test_rotary_operators_are_fused_in_low_precision_too(
    comfyui: Path, kind: str, launches: int, tmp_path: Path
) -> None:
    """With attention in 8 bits behind, and weights that are prepared."""
    payload = _of_host(tmp_path, "O3")[kind]
    assert _launches(payload) == launches and "comfy_kitchen" not in code_of(payload)
    assert code_of(payload).count("async_compile.triton('attend_in_groups") == 1, (
        "one for what looks at itself and the text"
    )


@pytest.mark.comfy
def test_attention_of_others_is_called_between_kernels_and_costs_none(comfyui: Path, tmp_path: Path) -> None:
    """What it is given is what the kernels before it wrote, and goes on to be written over."""
    config = CompileConfig.parse("O2")
    payloads = lowered_ahead(tmp_path, ["wan"], config.lowering_options("cuda"), with_attention_of_others)
    call = code_of(payloads["wan"]).partition("def call(")[2].partition("runner = ")[0]
    assert call.count("= torch.ops.nexfort.substitute.default(") == 2 and "_scaled_dot_product" not in call
    assert call.count("[True, True, True], [") == 2, "its own and the prompt's: nobody else reads query, key and value"
    assert _launches(payloads["wan"]) == 7, "as many as without"


@pytest.mark.comfy
@pytest.mark.parametrize("kind", few(HOST_BLOCKS.keys(), ("wan",)))
def test_sizes_that_were_taken_to_be_equal_are_conditions(
    kind: str, turned: Mapping[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "payload"
    shutil.copytree(turned[kind], folder)
    manifest = {"conditions": host_captured(kind).conditions.as_json()}
    inductor.take_limits(folder, manifest)
    taken = Conditions(**manifest["conditions"])
    shapes = [list(one[0]) for one in HOST_BLOCKS[kind]()[1] if one is not None]
    table = next(shape for shape in shapes if len(shape) == 6)
    assert taken.broken(shapes) is None, "the captured call"
    (at,) = (i for i in (1, 2) if table[i] > 1)
    for change in (1, -1):
        table[at] += change
        assert "==" in (taken.broken(shapes) or ""), "another length of the table alone"
        table[at] -= change
    table[at] += 8
    shapes[0][1] += 8
    assert taken.broken(shapes) is None and taken.broken([[1, *shape[1:]] for shape in shapes]) is None


# ---- modulation ------------------------------------------------------------------------------------------------------


def _row_kernels(payload: Path) -> list[str]:
    """Those that keep whole rows, one each."""
    return [text for text in code_of(payload).split("async_compile.triton(") if "config={'XBLOCK': 1, " in text]


@pytest.mark.comfy
def test_a_gate_s_function_is_computed_once_and_not_for_each_row(turned: Mapping[str, Path]) -> None:
    assert "tanh(" in code_of(turned["z_image"])
    assert not [text for text in _row_kernels(turned["z_image"]) if "tanh(" in text]


@pytest.mark.comfy
def test_what_is_made_of_a_prompt_alone_is_lowered_by_itself(turned: Mapping[str, Path]) -> None:
    """Two of Wan's layers, and the norm behind one."""
    part, whole = code_of(turned["wan"] / "prompt_0"), code_of(turned["wan"])
    assert part.count("extern_kernels.addmm(") == 2 and whole.count("extern_kernels.addmm(") == 9
    assert "_fused_rms_norm" in part and "attention" not in part


@pytest.mark.comfy
@pytest.mark.parametrize("kind", few(["flux_double", "z_image"], ["z_image"]))
def test_where_text_is_turned_with_the_image_nothing_is_made_of_it_alone(kind: str, turned: Mapping[str, Path]) -> None:
    assert not list(turned[kind].glob("prompt*"))


@pytest.mark.comfy
@pytest.mark.parametrize("mode", few(["O2", "O3"], []))
def test_rows_of_modulation_are_found_at_fixed_places_by_one_warp(comfyui: Path, mode: str, tmp_path: Path) -> None:
    """Places in a sixth of a size would be read one number at a time, and in fp8 all warps wait for each other."""
    payload = _of_host(tmp_path, mode)["pixart"]
    assert "6912*" in code_of(payload) and "// 6" not in code_of(payload)
    norms = [text for text in _row_kernels(payload) if "native_layer_norm" in text.partition(",")[0]]
    assert len(norms) == 2 and all("'num_warps': 1," in text for text in norms)
