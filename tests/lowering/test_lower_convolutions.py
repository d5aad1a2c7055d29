# SPDX-License-Identifier: Apache-2.0
"""Convolutions lowered for a GPU that is not there: whose kernels, which weights, and what of an image is in memory."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from gpu_blocks import CONVOLVED, FROZEN, UPSAMPLED
from large_rows import few
from lowering_ahead import LoweredOnDemand, code_of, lowered_ahead

from nexfort_engine.config.compile_config import CompileConfig

pytest.importorskip("triton", reason="kernels for a GPU are compiled with Triton")
if torch.version.cuda is None or torch.cuda.is_available():
    pytest.skip("needs a torch built for CUDA and no GPU: what touches one must fail", allow_module_level=True)


@pytest.fixture(scope="module")
def payloads(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Blocks lowered with the defaults, so with kernels of our own."""
    return LoweredOnDemand(tmp_path_factory.mktemp("defaults"), CompileConfig.parse("O2").lowering_options("cuda"))


def _without(option: str, folder: Path) -> Mapping[str, Path]:
    return LoweredOnDemand(folder, CompileConfig.parse({"options": {option: False}}).lowering_options("cuda"))


@pytest.mark.parametrize("mode", few(["O2", "freezing", "untold"], 1))
def test_convolutions_read_weights_that_are_laid_out_ahead(
    mode: str, payloads: Mapping[str, Path], tmp_path: Path
) -> None:
    """Each is in memory once, and no kernel of the step copies one. 1x1 are read as they lie.

    Untold: where nobody says when weights change, kernels of the step copy them.
    """
    if mode != "O2":
        config = CompileConfig.parse(None).without_weight_versions() if mode == "untold" else CompileConfig.parse(mode)
        payloads = LoweredOnDemand(tmp_path, config.lowering_options("cuda"))
    payload = payloads["shortened"]
    call = code_of(payload).partition("def call(")[2].partition("runner = ")[0]
    weights = re.findall(r"extern_kernels.convolution\(buf\d+, (.*?), stride=", call)
    assert len(weights) == 4 and sum(weight.startswith("arg") for weight in weights) == (
        1 if mode == "untold" else 4
    ), "1x1"
    assert len(re.findall(r"lay_innermost_\d+\.run\(", call)) == (2 if mode == "untold" else 0), (
        "one that is read twice"
    )
    if mode == "untold":
        laid = r"reinterpret_tensor\(buf\d+, \(128, (\d+), 3, 3\), \(\d+, 1, \d+, \1\), 0\)"
        assert sum(re.fullmatch(laid, weight) is not None for weight in weights) == 3
        assert not (payload / "before").exists()
        return
    told = json.loads((payload / "preparation.json").read_text())
    assert told["takes"] == [2, 8] and told["gives"] == 2 and not {2, 8} & set(told["keeps"])
    before = code_of(payload / "before").partition("def call(")[2].partition("runner = ")[0]
    assert before.count(".run(") == before.count("empty_strided_cuda((128, 3, 3, ") == 2


# below are some that are launched so, kernels/test_conv3x3.py has the numbers of channels that are left
@pytest.mark.large
def test_convolutions_of_images_are_one_launch_each_or_cudnns_by_the_size_of_a_call(
    payloads: Mapping[str, Path], tmp_path: Path
) -> None:
    """In the place of cuDNN's, with no launch more; other numbers of channels are left to it."""
    launches = {}
    for own, lowered in ((True, payloads), (False, _without("fuse.convolution", tmp_path))):
        for kind in FROZEN if own else ["widened"]:
            call = code_of(lowered[kind]).partition("def call(")[2].partition("runner = ")[0]
            forms = re.findall(r"if form == (\d+):\n(?:.*\n){2}.*convolve_in_groups_\d+\.run\(", call)
            rules = re.findall(r"form = None if False else part_of\(\(s\d+\), \(s\d+\), \(s\d+\), 320, 1, 132, ", call)
            otherwise = re.findall(
                r"else:\n +torch\.ops\.aten\.cudnn_convolution\.out\(.*, out=buf\d+\.permute\(", call
            )
            others = len(re.findall(r"(?<!convolve_in_groups)_\d+\.run\(", call))
            launches[kind, own] = (forms, len(rules), len(otherwise), call.count("extern_kernels.convolution("), others)
    assert launches["widened", True][:4] == (["320", "160"] * 2, 2, 2, 0)
    assert launches["widened", False][:4] == ([], 0, 0, 2)
    assert launches["widened", True][4] == launches["widened", False][4]
    assert launches["shortened", True][:4] == ([], 0, 0, 4), "128 channels"


DOUBLED = r"empty_strided_cuda\(\(s\d+, 320, 2\*s\d+, 2\*s\d+\)"


@pytest.mark.large  # tests/passes/test_upsample.py has its numbers
def test_an_upsampled_image_is_not_in_memory_where_it_is_the_double(payloads: Mapping[str, Path]) -> None:
    """A kernel adds weights, one convolves; where the other image's sizes are others in a call cuDNN does."""
    ours = code_of(payloads["upsampled"]).partition("def call(")[2].partition("runner = ")[0]
    assert ours.count("sum_places_0.run(") == 2
    assert re.search(
        r"form = None if \(\(2\*s\d+\), \(2\*s\d+\)\) != \(2 \* \(s\d+\), 2 \* \(s\d+\)\) else part_of", ours
    )
    assert re.search(
        r"form = None if \(\(s\d+\), \(s\d+\)\) != \(2 \* \(2\*s\d+\), 2 \* \(2\*s\d+\)\) else part_of", ours
    )
    assert ours.count("cudnn_convolution.out(torch.ops.aten.upsample_nearest2d.default(") == 2
    assert ours.count(".add_(arg") == 1, "one has a bias"
    assert not re.search(DOUBLED, ours)


@pytest.mark.large  # what the kernel is for; above is what it does
def test_without_the_kernel_an_upsampled_image_is_in_memory(tmp_path: Path) -> None:
    assert re.search(DOUBLED, code_of(_without("fuse.upsampled_convolution", tmp_path)["upsampled"]))


def test_what_tunes_kernels_is_python_where_a_call_decides_between_them(tmp_path: Path) -> None:
    """As with max-autotune: the text that runs them once, and that of the artefact."""
    options = CompileConfig.parse("O2").lowering_options("cuda")
    payload = lowered_ahead(tmp_path, [*UPSAMPLED], options, module="tuning_worker")["upsampled"]
    code = code_of(payload)
    assert code.count("def part_of(") == 1 and "\ndef part_of(" in code and code.count("form = None if ") == 2


@pytest.mark.large  # tests/kernels/test_conv3x3.py has its numbers
def test_images_that_the_card_cannot_copy_from_are_copied_before(payloads: Mapping[str, Path]) -> None:
    """One that begins anywhere, and rows whose channels are what is left, where the weight says how many there are."""
    given = {}
    for kind in (*CONVOLVED, *UPSAMPLED):
        call = code_of(payloads[kind]).partition("def call(")[2].partition("runner = ")[0]
        (given[kind], *_) = re.findall(r"convolve_in_groups_\d+\.run\((?:reinterpret_tensor\()?(arg|buf)\d+", call)
        assert re.search(r"convolve_in_groups_\d+\.run\(.*, 320, \d+, buf\d+, 132, 1, 1, stream=\w+\)", call)
    assert given == {"convolved_rows": "buf", "convolved_behind": "buf", "upsampled": "arg"}
