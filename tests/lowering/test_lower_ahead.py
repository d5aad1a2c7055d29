# SPDX-License-Identifier: Apache-2.0
"""Lowering for a GPU takes no GPU: real graphs for a device that is not there, in a worker that the pool forks."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from gpu_blocks import (
    BLOCKS,
    COMPUTED,
    GATED,
    LAYERS,
    OPTIONS,
    PAYING,
    PROMPTED,
    captured,
)
from large_rows import few
from lowering_ahead import SUPPORT, LoweredOnDemand, code_of, kernels_of, lowered_ahead
from pretended_gpu import FORKED

from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.guards.shape_guards import Conditions, names
from nexfort_engine.lowering import inductor, worker_pool

pytest.importorskip("triton", reason="kernels for a GPU are compiled with Triton")
if torch.version.cuda is None or torch.cuda.is_available():
    pytest.skip("needs a torch built for CUDA and no GPU: what touches one must fail", allow_module_level=True)

KEPT = BLOCKS.keys() - {"looking"}


@pytest.fixture(scope="module")
def payloads(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Each block lowered by a forked worker, which has never seen a device."""
    return LoweredOnDemand(tmp_path_factory.mktemp("lowered"), OPTIONS)


def _lowered_anew(folder: Path, kinds: list[str]) -> tuple[dict[str, Path], list[str]]:
    """Payloads by a forking process of their own, and a line for each process that its workers forked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FORKED, str(folder / "forked"))
        patch.setattr(worker_pool._Forker, "_current", None)  # one that is there does not know the variable
        payloads = lowered_ahead(folder, kinds, OPTIONS)
    return payloads, (folder / "forked").read_text().splitlines()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The payload of layers that repeat themselves, and what their worker forked."""
    payloads, forked = _lowered_anew(tmp_path_factory.mktemp("stack"), ["stack"])
    return payloads["stack"], forked


@pytest.mark.parametrize("kind", few(BLOCKS.keys(), ("residual", "transformer", "long")))
def test_a_worker_without_a_device_makes_the_whole_artefact(kind: str, payloads: Mapping[str, Path]) -> None:
    assert len(list((payloads[kind] / "aotautograd").iterdir())) == 1
    kernels = kernels_of(payloads[kind])
    assert len(kernels) >= 3
    assert {kernel["target"]["arch"] for kernel in kernels} == {90}


@pytest.mark.parametrize("kind", few(BLOCKS.keys(), KEPT))
def test_every_kernel_has_one_configuration_so_nothing_is_ever_timed(kind: str, payloads: Mapping[str, Path]) -> None:
    names = [kernel["name"] for kernel in kernels_of(payloads[kind])]
    assert sorted(names) == sorted(set(names))


def test_symbols_stay_symbols(payloads: Mapping[str, Path]) -> None:
    call = code_of(payloads["transformer"]).partition("def call(")[2].partition("runner = ")[0]
    assert "torch.ops.nexfort.cudnn_attention.default(" in call
    assert "4096" not in call
    assert ".item()" in call, "a number of the module reaches its kernel from the CPU, and no kernel is made for that"


def test_what_kernels_take_for_granted_becomes_conditions(payloads: Mapping[str, Path], tmp_path: Path) -> None:
    """They count in 32 bits, and carry no check of it."""
    folder = tmp_path / "payload"
    shutil.copytree(payloads["transformer"], folder)
    symbols = json.loads((folder / "limits.json").read_text())
    batch, length = (name for name in sorted(names(" + ".join(f"({text})" for text in symbols))))
    manifest = {"conditions": Conditions([[batch, length, 128]]).as_json()}
    inductor.take_limits(folder, manifest)
    assert not (folder / "limits.json").exists()
    taken = Conditions(**manifest["conditions"])
    assert taken.broken([(2, 4096, 128)]) is None and taken.broken([(1, 2**20, 128)]) is None
    assert "2147483647" in (taken.broken([(2**12, 2**12, 128)]) or "")
    (folder / "limits.json").write_text('["u0 <= 3"]')
    with pytest.raises(inductor.LoweringFailed, match="u0"):
        inductor.take_limits(folder, manifest)


def test_kernels_written_here_say_what_they_count(payloads: Mapping[str, Path]) -> None:
    """A launch has 65535 programs at most in its later dimensions, of which sums of group norms take one an image."""
    texts = json.loads((payloads["residual"] / "limits.json").read_text())
    assert "group_factors" in code_of(payloads["residual"]) or "moments_of_chunks" in code_of(payloads["residual"])
    assert [text for text in texts if text.endswith("<= 65535") and names(text)]
    assert all(text.endswith(("<= 65535", "<= 2147483647")) or "==" in text for text in texts)


def test_attention_that_pays_in_8_bits_is_two_launches(payloads: Mapping[str, Path]) -> None:
    call = code_of(payloads["long"]).partition("def call(")[2].partition("runner = ")[0]
    assert "_scaled_dot_product" not in call and "8192" not in call
    assert call.count("narrow_keys_values_0.run(") == call.count("attend_in_groups_1.run(") == 1
    kernels = [kernel for kernel in kernels_of(payloads["long"]) if kernel["name"].startswith("attend")]
    assert [kernel["num_warps"] for kernel in kernels] == [12], "four that copy, and two times four that compute"
    few = code_of(payloads["wide"]).partition("def call(")[2].partition("runner = ")[0]
    assert "torch.ops.nexfort.cudnn_attention.default(" in few and "attend_" not in few, "of 1024 tokens it is cuDNN's"


def test_low_precision_multiplies_in_fp8_with_weights_that_are_prepared(payloads: Mapping[str, Path]) -> None:
    payload = payloads["feed_forward"]
    before, code = code_of(payload / "before"), code_of(payload)
    assert code.count("extern_kernels._scaled_mm(") + code.count("aten._scaled_mm.default(") == 2
    assert "float8e4nv" in code and "extern_kernels.addmm(" not in code
    assert before.count(".run(") == 2 and "float8e4nv" in before, "one kernel for each weight"
    told = json.loads((payload / "preparation.json").read_text())
    assert told == {"takes": [0, 2], "keeps": [1, 3], "gives": 4}


def test_low_precision_in_int8_multiplies_whole_numbers_with_weights_that_are_prepared(tmp_path: Path) -> None:
    """By cuBLAS, with inputs from the kernel before; the one behind scales what comes out."""
    options = CompileConfig.parse({"mode": "O3", "options": {"quant.int8": True}}).lowering_options("cuda")
    payload = lowered_ahead(tmp_path, ["feed_forward"], options)["feed_forward"]
    before, call = code_of(payload / "before"), code_of(payload).partition("def call(")[2].partition("runner = ")[0]
    assert call.count("extern_kernels._int_mm(") == call.count("addmm(") == 1, "the first is estimated not to pay"
    assert call.count(".run(") == 2 and "_scaled_mm" not in call, "gated and narrowed, with rows of zeros; scaled"
    assert before.count(".run(") == 1 and "int8" in before
    assert json.loads((payload / "preparation.json").read_text())["gives"] == 2


def test_gelu_is_computed_by_the_product_before_it_where_a_product_reads_it(payloads: Mapping[str, Path]) -> None:
    call = code_of(payloads["gelus"]).partition("def call(")[2].partition("runner = ")[0]
    assert call.count("aten._addmm_activation.default(") == call.count("use_gelu=True") == 1
    assert call.count("extern_kernels.addmm(") == 4 and call.count(".run(") == 3, "a norm, the gated one's, a sum"


def test_a_row_has_few_warps_and_is_read_once(payloads: Mapping[str, Path]) -> None:
    """4096 numbers of a GELU, brought to fp8, on two warps."""
    code = code_of(payloads["feed_forward"])
    kernels = code.split("async_compile.triton(")
    (row,) = (kernel for kernel in kernels if "'num_warps': 2" in kernel)
    assert "triton_heuristics.fixed_config" in row and "R0_BLOCK: tl.constexpr = 4096" in row and "reciprocal" in row


@pytest.mark.parametrize(("mode", "warps"), [pytest.param("O2", 2, marks=pytest.mark.large), ("O3", 1)])
def test_what_a_norm_adds_up_first_is_read_once_too(mode: str, warps: int, tmp_path: Path) -> None:
    """Though it also reads one number for each row of the batch; two tensors are more registers, so two warps.

    Not so where the result is brought to fp8, for which they would wait for each other once more.
    """
    options = CompileConfig.parse(mode).lowering_options("cuda")
    kernels = code_of(lowered_ahead(tmp_path, ["joined"], options)["joined"]).split("async_compile.triton(")[1:]
    (norm,) = (kernel for kernel in kernels if "layer_norm" in kernel.partition(",")[0])
    assert f"'XBLOCK': 1, 'num_warps': {warps}" in norm and "R0_BLOCK: tl.constexpr = 2048" in norm


@pytest.mark.parametrize(("kind", "block"), few([("residual", "'C_BLOCK': 4, "), ("innermost", "'C_BLOCK': 32, ")], 1))
def test_a_group_norm_is_three_launches(kind: str, block: str, payloads: Mapping[str, Path]) -> None:
    """Moments of its chunks, a factor for each channel, the result; the first reads what lies side by side."""
    code = code_of(payloads[kind])
    call = code.partition("def call(")[2].partition("runner = ")[0]
    assert call.count("moments_of_chunks_") == call.count("factors_of_groups_") == 2
    assert block in code.partition("moments_of_chunks_0 = ")[2].partition("def moments_of_chunks_0")[0]
    assert call.count(".run(") == 2 * 3 + 4, "two norms; besides two weights laid out, a SiLU and the sum at the end"


def test_kernels_that_transpose_an_image_have_a_tile_of_their_own(payloads: Mapping[str, Path]) -> None:
    kernels = code_of(payloads["residual"]).split("async_compile.triton(")
    tiles = [kernel for kernel in kernels if "'YBLOCK': 64, 'XBLOCK': 32, 'num_warps': 4" in kernel]
    assert len(tiles) == 2, "the first norm's result, and the sum at the end"


@pytest.mark.parametrize("kind", few(["residual", "innermost"], 1))
def test_a_norm_puts_no_image_in_memory_in_fp32(kind: str, payloads: Mapping[str, Path]) -> None:
    sizes = re.findall(r"empty_strided_cuda\(\(s\d+, ([^)]*)\), .*torch.float32\)", code_of(payloads[kind]))
    assert sizes and not [text for text in sizes if not re.fullmatch(r"[\d, ]+", text)], sizes


def test_layers_are_lowered_once_and_launch_no_kernel_more_for_it(
    payloads: Mapping[str, Path], stack: tuple[Path, list[str]]
) -> None:
    """Sum and norm are one kernel, across the cut too; nothing is copied at it."""
    payload, _ = stack
    told = json.loads((payload / "folded.json").read_text())
    repeated = [piece for piece, _ in told["calls"]]
    layer = max(set(repeated), key=repeated.count)
    assert repeated.count(layer) >= LAYERS - 1
    assert "2147483647" in (payload / "limits.json").read_text(), "what is asked of sizes in a piece"
    alone = code_of(payloads["wide"]).count(".run(")
    assert code_of(payload / f"piece_{layer}").count(".run(") == alone - 1, "its last sum is with the next layer's norm"


def _pieces(payload: Path) -> list[int]:
    """How many pieces a payload has, and how many what it prepares."""
    pieces = [len(list(place.glob("piece_*"))) or 1 for place in (payload, payload / "before")]
    assert (payload / "folded.json").exists() and pieces[0] > 1
    return pieces


@pytest.mark.large  # test_worker_pool.py has parts of a work that are done in forks
def test_pieces_are_lowered_at_once_where_the_worker_has_not_asked_for_its_device(
    stack: tuple[Path, list[str]],
) -> None:
    """Those of what is prepared too."""
    payload, forked = stack
    assert forked.count("_forked") == sum(_pieces(payload)) - 1


@pytest.mark.large
def test_a_worker_that_has_asked_for_its_device_lowers_pieces_one_after_another(tmp_path: Path) -> None:
    payloads, forked = _lowered_anew(tmp_path, ["feed_forward", "stack"])
    _pieces(payloads["stack"])
    assert forked.count("_forked") == 1


@pytest.mark.large  # tests/lowering/test_worker_pool.py has the processes
def test_kernels_are_compiled_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes of their own, as many as the machine has cores; each is in the artefact once, those as well."""
    monkeypatch.setenv(FORKED, str(tmp_path / "forked"))
    monkeypatch.setattr(worker_pool._Forker, "_current", None)  # one that is there does not know the variable
    kernels = kernels_of(lowered_ahead(tmp_path, ["feed_forward"], OPTIONS)["feed_forward"])
    noted = (tmp_path / "forked").read_text().splitlines()
    assert noted.count("submit") >= min(2, len(os.sched_getaffinity(0))) and "again" not in noted
    assert len({kernel["name"] for kernel in kernels}) == len(kernels) >= 2
    before = (tmp_path / "forked").read_text().splitlines().count("submit")
    (tmp_path / "again").mkdir()
    again = kernels_of(lowered_ahead(tmp_path / "again", ["feed_forward"], OPTIONS)["feed_forward"])
    assert [kernel["name"] for kernel in again] == [kernel["name"] for kernel in kernels]
    noted = (tmp_path / "forked").read_text().splitlines()
    assert noted.count("submit") == before and "again" not in noted, "another of the batch had begun with all of them"


@pytest.mark.large  # tests/lowering/test_prompt_subgraph.py has its numbers
def test_what_layers_make_of_a_prompt_is_one_launch(tmp_path: Path) -> None:
    payload = lowered_ahead(tmp_path, [*PROMPTED], CompileConfig.parse("O2").lowering_options("cuda"))["prompted"]
    call = code_of(payload).partition("def call(")[2].partition("runner = ")[0]
    assert call.count("multiply_rows_0.run(") == 1 and call.count("extern_kernels.mm(") == 6, "three times q and out"
    assert not re.search(r"empty_strided_cuda\(\([^)]*192", call), "the prompt is read as it lies"


def test_attention_in_8_bits_is_told_how_its_tensors_lie(tmp_path: Path) -> None:
    """Those too of which Inductor says something else before it lays them out: tokens before heads, as the input."""
    call = code_of(lowered_ahead(tmp_path, [*COMPUTED], OPTIONS)["computed_heads"]).partition("def call(")[2]
    made = dict(re.findall(r"(buf\d+) = empty_strided_cuda\(\(s\d+, 10, s\d+, 64\), \(([^()]*)\)", call))
    (keys,) = re.findall(r"narrow_keys_values_\d+\.run\((.*)\)", call)
    (queries,) = re.findall(r"attend_in_groups_\d+\.run\((.*)\)", call)
    k, v, *rest = keys.split(", ")
    strides = [made[name].split(", ")[:3] for name in (k, v, queries.split(", ")[0])]
    assert all(one[1:] == ["64", "640"] for one in strides), strides
    assert rest[7:13] == strides[0] + strides[1], keys
    assert queries.split(", ")[10:13] == strides[2], queries


@pytest.mark.large  # below it is in fp8, kernels/test_descriptors.py lowers one in 16 bits
def test_a_layer_and_the_gate_between_its_halves_are_one_launch(tmp_path: Path) -> None:
    """By torch's own launcher, which gives the kernel the memory that Triton would give it."""
    payloads = lowered_ahead(tmp_path, [*GATED], CompileConfig.parse("O2").lowering_options("cuda"))
    code = code_of(payloads["gated"])
    call = code.partition("def call(")[2].partition("runner = ")[0]
    assert len(re.findall(r"multiply_gated_in_groups_[01]\.run\(", call)) == call.count("multiply_gated") == 2
    assert call.count("extern_kernels.mm(") + call.count("extern_kernels.addmm(") == 2, "those behind the gates"
    assert len(re.findall(r"multiply_gated_in_groups_[01] = gluon_autotune\(", code)) == 2, "one has no bias"
    call = code_of(payloads["shifted"]).partition("def call(")[2].partition("runner = ")[0]
    assert re.search(r"multiply_gated_in_groups_\d\.run\((reinterpret_tensor\()?buf", call), (
        "a copy: it begins anywhere"
    )


@pytest.mark.parametrize("kind", few(PAYING.keys(), 1))
def test_a_gate_behind_a_product_in_fp8_is_part_of_its_launch(kind: str, tmp_path: Path) -> None:
    """What is packed of the weight is prepared, the input brought to fp8 by one kernel, and that is all."""
    payload = lowered_ahead(tmp_path, [kind], OPTIONS)[kind]
    code = code_of(payload)
    call = code.partition("def call(")[2].partition("runner = ")[0]
    assert call.count(".run(") == 2 and "_scaled_mm" not in call and "extern_kernels" not in call, call
    (launch,) = re.findall(r"multiply_gated_in_groups_\d\.run\((.*)\)", call)
    assert launch.startswith("buf"), "rows in fp8, as they were written"
    (found,) = re.findall(r"'signature': (\{'x': .*?\})", code)
    assert "'x': '*fp8e4nv', 'weight': '*fp8e4nv'" in found and "'x_scale': '*fp32'" in found, found
    told = json.loads((payload / "preparation.json").read_text())
    assert told == {"takes": [0], "keeps": [1] if kind == "paying" else [], "gives": 2}


@pytest.mark.large  # test_lower_convolutions.py has an image that begins so
def test_an_input_that_begins_anywhere_is_copied_for_the_card(tmp_path: Path) -> None:
    """As it was in the captured call: Inductor hands on what it was told to lie so."""
    options = CompileConfig.parse("O2").lowering_options("cuda")
    payload = lowered_ahead(tmp_path, ["unaligned"], options, lambda _: captured("gated", behind=1))["unaligned"]
    call = code_of(payload).partition("def call(")[2].partition("runner = ")[0]
    launches = re.findall(
        r"multiply_gated_in_groups_\d\.run\((?:reinterpret_tensor\()?(\w+)[^,]*,(?: \(.*?\),)* (\w+),", call
    )
    assert len(launches) == 2 and all(weight.startswith("buf") for _, weight in launches), call


# above a worker that compiles kernels in forks has been forked by a process that has asked for none
@pytest.mark.large
def test_what_is_done_before_a_fork_asks_no_device() -> None:
    """Without a GPU every question to CUDA's runtime raises; with one it would keep the forked workers from it."""
    code = (
        "import os, torch; from nexfort_engine.lowering import worker; worker._warm_up('cuda'); "
        "pid = os.fork(); pid or os._exit(torch.cuda._is_in_bad_fork() or torch.cuda.is_initialized()); "
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=SUPPORT.parents[1], env=variables)
