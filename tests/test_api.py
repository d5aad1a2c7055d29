# SPDX-License-Identifier: Apache-2.0
"""`compile(module)` and torch's backend: the result is the module it was made of in every respect but how it runs.

One small network with a list of blocks, whose artefacts all tests share; what backbones promise is in contracts.py.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from subjects import graphs_as_they_are
from torch import nn

import nexfort_engine
from nexfort_engine.api import CompiledModule
from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.system.process_settings import snapshot
from nexfort_engine.torch_backend import nexfort

pytestmark = pytest.mark.usefixtures("threads", "artefact_cache")
TOLERANCE = 1e-4
ROOT = Path(nexfort_engine.__file__).resolve().parent.parent


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.up(self.norm(x)))


class Net(nn.Module):
    """Two equal blocks; `scale` is read by its own forward, which is never captured."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.scale = 2.0

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def net() -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Net().eval().requires_grad_(False)


def given(batch: int = 2, length: int = 8) -> torch.Tensor:
    return torch.randn(batch, length, 16, generator=torch.Generator().manual_seed(6))


def run(module: Any, x: torch.Tensor | None = None) -> torch.Tensor:
    with torch.inference_mode():
        return module(given() if x is None else x).clone()


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def assert_compiled(module: Any, wanted: torch.Tensor) -> None:
    """It gives this result, and both blocks ran compiled to get it."""
    mark = module.report.mark()
    assert distance(run(module), wanted) < TOLERANCE
    found = module.report.as_dict()
    assert sorted(row["name"] for row in found["regions"]) == ["blocks.0", "blocks.1"] and not found["eager"]
    assert module.report.since(mark)["calls"] == 1


# ---- what it is ------------------------------------------------------------------------------------------------


def test_it_is_an_instance_with_the_same_keys_and_attributes() -> None:
    module = net()
    compiled = nexfort_engine.compile(module)
    assert isinstance(compiled, Net) and isinstance(compiled, CompiledModule) and not isinstance(module, CompiledModule)
    assert type(compiled).__name__ == "Net" and type(compiled).__qualname__ == Net.__qualname__
    assert list(compiled.state_dict()) == list(module.state_dict())
    assert [n for n, _ in compiled.named_modules()] == [n for n, _ in module.named_modules()]
    assert all(a is b for a, b in zip(compiled.parameters(), module.parameters(), strict=True))
    assert compiled.blocks is module.blocks and compiled.scale == 2.0 and compiled.device == module.device
    assert compiled.uncompiled() is module
    assert not compiled.training
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        compiled.nothing


def test_the_result_is_eager_s_and_the_module_is_left_alone() -> None:
    module = net()
    before, keys = run(module), list(vars(module))
    assert distance(run(module, given() + 1), before) > 100 * TOLERANCE
    compiled = nexfort_engine.compile(module)
    assert_compiled(compiled, before)
    assert torch.equal(run(module), before) and list(vars(module)) == keys


def test_the_first_call_draws_no_random_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path))
    with graphs_as_they_are():
        cold = nexfort_engine.compile(net(), dynamic=False, options={"mode": "max-autotune"})
        state = torch.get_rng_state()
        run(cold, given(1, 6))
        assert cold.report.as_dict()["artefacts_compiled"] > 0
        assert torch.equal(torch.get_rng_state(), state)


def test_changes_of_either_are_changes_of_both() -> None:
    module = net()
    compiled = nexfort_engine.compile(module)
    before = run(compiled)
    compiled.scale = 3.0
    assert module.scale == 3.0 and distance(run(compiled), 1.5 * before) < TOLERANCE
    module.scale = 2.0
    weights = {name: 1.5 * value for name, value in module.state_dict().items()}
    compiled.load_state_dict(weights)
    assert torch.equal(module.blocks[0].up.weight, weights["blocks.0.up.weight"])
    assert distance(run(module), before) > 100 * TOLERANCE
    assert_compiled(compiled, run(module))
    module.blocks[1] = nn.Identity()  # a submodule exchanged after the first call
    assert distance(run(compiled), run(module)) < TOLERANCE


def test_hooks_on_the_module_are_called() -> None:
    compiled = nexfort_engine.compile(net())
    seen: list[str] = []
    handle = compiled.register_forward_hook(lambda *_: seen.append("after"))
    run(compiled)
    handle.remove()
    run(compiled)
    assert seen == ["after"]


def test_config_and_report_are_its_own() -> None:
    module = net()
    one = nexfort_engine.compile(module, options={"mode": "O2"}, dynamic=False)
    two = nexfort_engine.compile(module, options='{"mode": "jit", "dynamic": true}', dynamic=False)
    assert one.report is not two.report
    configs = [compiled.report.as_dict()["config"] for compiled in (one, two)]
    assert [(c["mode"], c["dynamic"]) for c in configs] == [("O2", False), ("jit", True)]
    options = {"mode": "O2", "options": {"overrides.conv_benchmark": True}}
    before = copy.deepcopy(options)
    nexfort_engine.compile(module, options=options)
    assert options == before


def test_compiling_again_compiles_the_original() -> None:
    module = net()
    first = nexfort_engine.compile(module)
    wanted = run(first)
    second = nexfort_engine.compile(first, options={"mode": "jit"})
    assert second.uncompiled() is module and type(second).__mro__.count(CompiledModule) == 1
    assert second.report is not first.report
    assert_compiled(second, wanted)
    assert_compiled(first, wanted)


# ---- copies ----------------------------------------------------------------------------------------------------


def test_a_deep_copy_has_weights_of_its_own_and_runs_compiled() -> None:
    compiled = nexfort_engine.compile(net(), options={"fullgraph": True})
    wanted = run(compiled)
    copied = copy.deepcopy(compiled)
    assert type(copied) is type(compiled) and copied.report.as_dict()["config"]["fullgraph"] is True
    with torch.no_grad():
        for weight in copied.parameters():
            weight.mul_(1.5)
    assert torch.equal(run(compiled), wanted) and distance(run(copied.uncompiled()), wanted) > 100 * TOLERANCE
    assert_compiled(copied, run(copied.uncompiled()))
    assert copied.uncompiled() is not compiled.uncompiled()


def test_a_shallow_copy_shares_weights() -> None:
    compiled = nexfort_engine.compile(net())
    copied = copy.copy(compiled)
    assert copied.blocks is compiled.blocks and copied.report is not compiled.report
    assert_compiled(copied, run(compiled.uncompiled()))


def test_it_is_pickled_with_its_weights_and_config_and_no_code() -> None:
    compiled = nexfort_engine.compile(net(), options={"fullgraph": True})
    wanted = run(compiled)
    data = pickle.dumps(compiled)
    assert len(data) < 20_000
    back = pickle.loads(data)
    assert isinstance(back, Net) and isinstance(back, CompiledModule)
    assert back.report.as_dict()["config"] == compiled.report.as_dict()["config"]
    assert torch.equal(run(back.uncompiled()), run(compiled.uncompiled()))
    assert_compiled(back, wanted)
    buffer = io.BytesIO()
    torch.save(compiled, buffer)
    buffer.seek(0)
    assert_compiled(torch.load(buffer, weights_only=False), wanted)


# ---- memory format -----------------------------------------------------------------------------------------------


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.conv(x))


@pytest.mark.parametrize("memory_format", ["channels_last", "contiguous_format", None])
def test_memory_format_changes_layout_and_no_value(memory_format: str | None) -> None:
    torch.manual_seed(0)
    module = Conv().eval().requires_grad_(False)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    x = torch.randn(2, 4, 12, 12)
    wanted = run(module, x)
    compiled = nexfort_engine.compile(module, options={"memory_format": memory_format})
    assert distance(run(compiled, x), wanted) < TOLERANCE
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    last = module.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert last == (memory_format == "channels_last")
    assert not compiled.report.as_dict()["eager"]


# ---- what it leaves to eager -----------------------------------------------------------------------------------


def test_weights_of_another_layout_in_their_place_run_compiled() -> None:
    """`module.to(memory_format=...)` is such a change: each parameter gets other data, and no call looks at that."""
    module = net()
    compiled = nexfort_engine.compile(module)
    assert_compiled(compiled, run(module))
    for block in module.blocks:
        block.up.weight.data = block.up.weight.data.mul(2).t().contiguous().t()
    changed = run(module)
    mark = compiled.report.mark()
    assert distance(run(compiled), changed) < TOLERANCE
    assert not compiled.report.since(mark)["eager"]


def test_with_gradients_it_runs_eager_with_the_reason_and_they_are_right() -> None:
    module = net().requires_grad_(True)
    compiled = nexfort_engine.compile(module)
    compiled(given()).sum().backward()
    wanted = {name: weight.grad.clone() for name, weight in module.named_parameters()}
    module.zero_grad()
    module(given()).sum().backward()
    assert all(torch.equal(weight.grad, wanted[name]) for name, weight in module.named_parameters())
    found = compiled.report.as_dict()
    (row,) = found["eager"]
    assert row["region"] == "(whole module)" and not found["artefacts"]
    assert "gradients are on" in row["reason"] and "torch.no_grad()" in row["reason"]
    mark = compiled.report.mark()
    with torch.no_grad():
        assert distance(compiled(given()), module(given())) < TOLERANCE
    assert compiled.report.since(mark)["regions"] and not compiled.report.since(mark)["eager"]


def test_an_input_with_gradients_gets_them() -> None:
    compiled = nexfort_engine.compile(net())
    x = given().requires_grad_(True)
    compiled(x).sum().backward()
    assert x.grad is not None and "gradients are on" in compiled.report.as_dict()["eager"][0]["reason"]


def test_disable_in_the_options_is_a_pass_through() -> None:
    module = net()
    compiled = nexfort_engine.compile(module, options={"disable": True, "memory_format": "channels_last"})
    assert torch.equal(run(compiled), run(module))
    found = compiled.report.as_dict()
    assert not found["regions"] and not found["artefacts"] and not found["eager"]


# ---- NEXFORT_DISABLE ------------------------------------------------------------------------------------------


@pytest.fixture
def disabled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """NEXFORT_DISABLE=1, and a cache directory that nobody may make."""
    monkeypatch.setenv("NEXFORT_DISABLE", "1")
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def assert_untouched(report: Any, cache: Path) -> None:
    found = report.as_dict()
    assert not found["regions"] and not found["artefacts"] and not found["eager"] and not found["notes"]
    assert not cache.exists()


def test_disabled_compile_is_a_pass_through(disabled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, before = net(), snapshot()
    compiled = nexfort_engine.compile(module)
    assert isinstance(compiled, Net) and torch.equal(run(compiled), run(module))
    assert snapshot() == before
    assert_untouched(compiled.report, disabled)
    again = pickle.loads(pickle.dumps(copy.deepcopy(compiled)))
    assert torch.equal(run(again), run(module))


def test_disabling_holds_for_what_is_compiled_already(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = nexfort_engine.compile(net())
    run(compiled)
    monkeypatch.setenv("NEXFORT_DISABLE", "1")
    mark = compiled.report.mark()
    assert torch.equal(run(compiled), run(compiled.uncompiled()))
    assert compiled.report.since(mark)["calls"] == 0
    monkeypatch.setenv("NEXFORT_DISABLE", "0")
    run(compiled)
    assert compiled.report.since(mark)["calls"] == 1


class Pipe:
    """As much of a pipeline as compile_pipe asks for."""

    unet: nn.Module

    @property
    def components(self) -> dict[str, Any]:
        return {"unet": self.unet}


def test_disabled_compile_pipe_is_a_pass_through(disabled: Path) -> None:
    module = net()
    pipe = Pipe()
    pipe.unet = module
    compiled = nexfort_engine.compile_pipe(pipe)
    assert compiled.uncompiled() is pipe and pipe.unet is module
    assert torch.equal(run(compiled.unet), run(module))
    assert_untouched(compiled.reports["unet"], disabled)


def test_disabled_nodes_give_back_what_they_get(disabled: Path) -> None:
    from nexfort_engine.hosts.comfy import model as comfy

    patcher = SimpleNamespace(add_wrapper_with_key=None, model=SimpleNamespace(diffusion_model=net()))
    vae = SimpleNamespace(first_stage_model=net())
    config = CompileConfig.parse(None)
    assert comfy.attach(patcher, config) is patcher and comfy.attach_vae(vae, config) is vae
    assert not disabled.exists()


def test_disabled_backend_gives_the_graph_itself(disabled: Path) -> None:
    graph = torch.fx.symbolic_trace(net())
    assert nexfort(graph, [given()]) == graph.forward
    assert not disabled.exists()


# ---- torch.compile(backend="nexfort") ----------------------------------------------------------------------------


def test_backend_by_object() -> None:
    module = net()
    compiled = torch.compile(module, backend=nexfort, dynamic=True, fullgraph=True)
    for batch, length in ((2, 8), (3, 5)):
        x = given(batch, length)
        assert distance(run(compiled, x), run(module, x)) < TOLERANCE
    torch._dynamo.reset()


def test_backend_refuses_wrong_options() -> None:
    graph = torch.fx.symbolic_trace(net())
    with pytest.raises(ValueError, match="unknown mode token 'O7'"):
        nexfort(graph, [given()], options={"mode": "O7"})


_BY_NAME = """
import json, sys, torch
sys.path[:0] = sys.argv[1:]
from test_api import given, net, run, distance
assert "nexfort" in torch.compiler.list_backends()
module = net()
compiled = torch.compile(module, backend="nexfort", options={"mode": "jit", "dynamic": True})
print(json.dumps(distance(run(compiled), run(module))))
"""


@pytest.mark.slow
def test_backend_by_name_through_the_entry_point(tmp_path: Path) -> None:
    """An installed package is a folder of metadata beside it; here one with the entry points of pyproject.toml."""
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["torch_dynamo_backends"]
    metadata = tmp_path / "nexfort-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: nexfort\nVersion: 0.1.0\n")
    text = "".join(f"{name} = {place}\n" for name, place in points.items())
    (metadata / "entry_points.txt").write_text(f"[torch_dynamo_backends]\n{text}")
    here = Path(__file__).parent
    command = [sys.executable, "-c", _BY_NAME, *map(str, (tmp_path, ROOT, here, here / "support"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) < TOLERANCE
