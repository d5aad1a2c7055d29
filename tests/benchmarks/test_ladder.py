# SPDX-License-Identifier: Apache-2.0
"""The ladder: every rung that a processor can have runs for real, the others say why not, rows hold what was measured.

The networks are ComfyUI's own classes at small sizes, run by its own sampler, each way in a process of its own.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import card, ladder, rows
from benchmarks.backbones import BACKBONES, network
from benchmarks.ratios import read
from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.config.option_catalogue import OPTION_ROWS

HOPPER = {"type": "cuda", "gpu": "A card", "torch": "2.11.0", "no_fp8": ""}
AMPERE = {**HOPPER, "no_fp8": "too old"}
RUN = ("fp32", "eager", "core", "regional", "plain", "plain+channels_last", "plain+max-autotune", "default")
REFUSED = ("plain+group_norm", "plain+fuse", "plain+cudagraphs", "plain+O3", "default+max-autotune+O3")


def config(name: str) -> CompileConfig:
    return CompileConfig.parse(ladder.rung(name).options or None)


def effect(name: str) -> tuple[Any, ...]:
    """All that a rung's config does on a card."""
    found = config(name)
    return found.lowering_options("cuda"), found.step_graphs, found.memory_format


# ---- what a rung is ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("switch", ladder.SWITCHES)
def test_each_switch_does_something_by_itself(switch: str) -> None:
    assert effect(f"plain+{switch}") != effect("plain")
    assert f"plain+{switch}" in ladder.RUNGS


def test_every_rewrite_of_the_config_is_a_rung() -> None:
    rewrites = {name.removeprefix("fuse.") for name in OPTION_ROWS if name.startswith("fuse.")}
    assert rewrites and rewrites < set(ladder.SWITCHES)
    own, _, _ = effect("plain+fuse")
    assert all(own[f"nexfort.{name}"] for name in rewrites)
    assert not any(effect("plain")[0][f"nexfort.{name}"] for name in rewrites)


def test_plain_is_without_graphs_and_default_is_what_a_user_gets() -> None:
    assert not config("plain").step_graphs and config("plain+cudagraphs").step_graphs
    assert config("default") == CompileConfig() and ladder.rung("default").ways() == ("cold", "warm")
    both = config("default+max-autotune+O3")
    assert both.has("low-precision") and both.profile == "search" and both.step_graphs


def test_what_a_device_cannot_have_is_refused() -> None:
    every = [ladder.rung(name) for name in ladder.RUNGS]
    cpu = {"type": "cpu", "no_fp8": "no card"}
    assert not any(ladder.refusal(one, HOPPER) for one in every)
    assert {one.name for one in every if ladder.refusal(one, AMPERE)} == {n for n in ladder.RUNGS if "O3" in n}
    refused = {one.name for one in every if ladder.refusal(one, cpu)}
    assert set(REFUSED) <= refused and not refused & set(RUN)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["flux", "--rungs", "eager,plain+cudagraph"], "there is no rung 'plain+cudagraph'; expected one of fp32"),
        (["flix"], "the network is 'flix'; expected one of sdxl, flux"),
        (["sdxl", "--small"], "sdxl has no small size: ComfyUI knows it by its full depth; expected one of flux"),
    ],
)
def test_what_there_is_not_is_told_before_anything_runs(
    command: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder, "child", None)
    assert ladder.main(command) == 2
    assert capsys.readouterr().err.startswith(f"ladder: {said}")


# ---- what is measured --------------------------------------------------------------------------------------


def test_operations_are_counted_as_they_are_by_hand() -> None:
    a, b = torch.randn(3, 40, 16), torch.randn(16, 24)
    q = torch.randn(2, 4, 10, 8)

    def run() -> None:
        a @ b
        torch.nn.functional.linear(a, b.T.contiguous())
        torch.nn.functional.conv2d(torch.randn(1, 5, 6, 6), torch.randn(7, 5, 3, 3))
        torch.nn.functional.scaled_dot_product_attention(q, q, q)

    with torch.no_grad():
        found = card.teraflop(run) * 1e12
    product, convolution, attention = 2 * 3 * 40 * 16 * 24, 2 * 7 * 4 * 4 * 5 * 9, 2 * (2 * 2 * 4 * 10 * 10 * 8)
    assert found == pytest.approx(2 * product + convolution + attention)


def test_the_ceiling_is_a_product_s(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(card.time, "perf_counter", lambda: next(clock))  # each product takes a second
    monkeypatch.setitem(card._SIDE, "cpu", 100)
    assert card.ceiling(torch.float32, torch.device("cpu")) == pytest.approx(2 * 100**3 / 1e12)


def test_distances_are_relative_to_the_reference(tmp_path: Path) -> None:
    reference = torch.full((4, 4), 2.0)
    torch.save(reference, tmp_path / "fp32.pt")
    torch.save(reference * 1.25, tmp_path / "plain.pt")
    assert rows.distance(tmp_path / "plain.pt", tmp_path / "fp32.pt") == 0.25
    assert rows.distance(tmp_path / "fp32.pt", tmp_path / "fp32.pt") == ""
    assert rows.distance(tmp_path / "gone.pt", tmp_path / "fp32.pt") == ""


# ---- rungs that fail, and a ladder that is stopped ---------------------------------------------------------


def pretended(ways: list[str], failing: str = "", stopped: str = "") -> Any:
    """What stands for the processes: each way that it is asked for is noted, one fails, one is interrupted."""

    def child(backbone: str, way: str, flags: list[str], *, latent: Path, caches: Path, log: Path | None) -> rows.Row:
        ways.append(latent.stem)
        if latent.stem == stopped:
            raise KeyboardInterrupt
        if latent.stem == failing:
            return {"reason": "it ended with status 1: out of memory"}
        return {"ms": 1.0 + len(ways), "gpu": "CPU", "torch": "2.11.0", "size": "64x64", "steps": 20}

    return child


def test_a_rung_that_fails_is_in_the_table_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(ladder, "child", pretended(ran, failing="core_0"))
    file = tmp_path / "found.csv"
    rungs = "plain,core,eager,plain+cudagraphs"
    assert ladder.main(["wan", "--small", "--rungs", rungs, "--csv", str(file)]) == 1
    assert ran == ["eager_0", "plain_0", "plain_1", "core_0"], "what others are compared with comes first"
    found = {row["way"]: row for row in read(file)}
    assert list(found) == ["eager", "plain", "plain, warm", "core", "plain+cudagraphs"]
    assert found["core"]["reason"].endswith("out of memory") and found["core"]["ms"] == ""
    assert found["plain+cudagraphs"]["reason"].startswith("CUDA graphs need")
    out = capsys.readouterr().out
    assert "| core |" in out and "out of memory |" in out and "| plain+cudagraphs |" in out
    assert found["plain"]["command"] == f"python -m benchmarks.ladder wan --rungs {rungs} --steps 20 --small"


def test_a_ladder_that_is_stopped_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ladder, "child", pretended([], stopped="plain_1"))
    file = tmp_path / "found.csv"
    assert ladder.main(["wan", "--small", "--rungs", "eager,plain", "--csv", str(file)]) == 130
    assert [row["way"] for row in read(file)] == ["eager", "plain"]
    assert "| plain |" in capsys.readouterr().out


def test_small_rows_stay_out_of_the_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ladder, "RESULTS", tmp_path / "results.csv")
    monkeypatch.setattr(ladder, "child", pretended([]))
    assert ladder.main(["wan", "--small", "--rungs", "eager"]) == 0 and not (tmp_path / "results.csv").exists()
    assert ladder.main(["wan", "--rungs", "eager"]) == 0
    assert [row["backbone"] for row in read(tmp_path / "results.csv")] == ["wan"]


def test_a_process_that_fails_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "logs" / "x.log"
    found = rows.child("nothing", "eager", [], latent=tmp_path / "x.pt", caches=tmp_path / "x", log=log)
    assert found == {"reason": "it ended with status 1: KeyError: 'nothing'"}
    assert "KeyError: 'nothing'" in log.read_text() and "nothing eager failed" in capsys.readouterr().err


# ---- for real ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[pytest.param(RUN, marks=pytest.mark.large)], ids=["all"])
def climbed(request: Any, comfyui: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A small ladder: its rungs, exit code, rows by way, and what each process printed."""
    folder = tmp_path_factory.mktemp("ladder")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMFYUI_PATH", str(comfyui))
        command = ["wan", "--small", "--steps", "3", "--rungs", ",".join((*request.param, *REFUSED))]
        code = ladder.main([*command, "--csv", str(folder / "rows.csv"), "--log", str(folder / "logs")])
    printed = {}
    for log in (folder / "logs").iterdir():
        name, number = log.stem.removeprefix("wan_").rsplit("_", 1)
        lines = [line for line in log.read_text().splitlines() if line.startswith("{")]
        printed[ladder.rung(name).ways()[int(number)]] = json.loads(lines[-1])
    return {
        "run": request.param,
        "code": code,
        "rows": {row["way"]: row for row in read(folder / "rows.csv")},
        "printed": printed,
    }


def ours(climbed: dict[str, Any]) -> list[str]:
    return [name for name in climbed["run"] if ladder.rung(name).way == "nexfort"]


@pytest.mark.comfy
@pytest.mark.slow
def test_every_rung_that_a_processor_can_have_runs(climbed: dict[str, Any]) -> None:
    wanted = [way for name in climbed["run"] for way in ladder.rung(name).ways()]
    assert [way for way, row in climbed["rows"].items() if row["ms"]] == wanted
    assert list(climbed["rows"]) == [*wanted, *REFUSED] and climbed["code"] == 1
    for name in REFUSED:
        assert climbed["rows"][name]["reason"] and climbed["rows"][name]["gpu"] == card.name()


@pytest.mark.comfy
@pytest.mark.slow
def test_a_row_holds_what_its_process_measured(climbed: dict[str, Any]) -> None:
    assert len(climbed["printed"]) == len([row for row in climbed["rows"].values() if row["ms"]])
    for way, found in climbed["printed"].items():
        row = climbed["rows"][way]
        for name in ("ms", "first_s", "tflops", "of_ceiling", "size", "steps", "torch", "gpu", "options"):
            assert row[name] == str(found[name]), (way, name)
        assert found["ms"] > 0 and found["finite"]
        assert found["tflops"] == pytest.approx(found["tflop"] / found["ms"] * 1e3, rel=1e-3)
        assert found["of_ceiling"] == pytest.approx(found["tflops"] / found["ceiling_tflops"], rel=1e-3)
        assert found["tflop"] == climbed["printed"]["eager"]["tflop"], "they compute the same"
    assert 5e-5 < climbed["printed"]["eager"]["tflop"] < 2e-4


@pytest.mark.comfy
@pytest.mark.slow
def test_the_first_process_compiles_and_the_second_loads(climbed: dict[str, Any]) -> None:
    for name in ours(climbed):
        cold, warm = (climbed["rows"][way] for way in ladder.rung(name).ways())
        assert int(cold["compiled"]) > 1 and cold["loaded"] == "0" and cold["eager_regions"] == "0"
        assert warm["compiled"] == "0" and warm["loaded"] == cold["compiled"] and warm["eager_regions"] == "0"


@pytest.mark.comfy
@pytest.mark.slow
def test_pictures_are_as_near_as_the_distance_rule_wants(climbed: dict[str, Any]) -> None:
    """In float32 on a processor: 1e-4 of eager's. That the columns show what is further off is tested above."""
    for way in climbed["printed"]:
        row = climbed["rows"][way]
        if way != "fp32":
            assert float(row["error_to_fp32"]) < 1e-4
        if way not in ("fp32", "eager"):
            assert float(row["error_to_eager"]) < 1e-4 and "over the distance rule" not in row["reason"]
    compiled = [climbed["rows"][way]["error_to_eager"] for name in ours(climbed) for way in ladder.rung(name).ways()]
    assert any(float(error) > 0 for error in compiled), "compiled code sums in another order: zero were eager itself"


def test_each_network_names_the_blocks_that_are_compiled_one_by_one(comfyui: Path) -> None:
    for backbone in BACKBONES.values():
        kinds = Counter(type(module).__name__ for module in network(backbone).modules())
        assert backbone.repeated and all(kinds[kind] > 1 for kind in backbone.repeated), backbone.name
