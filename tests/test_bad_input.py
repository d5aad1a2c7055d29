# SPDX-License-Identifier: Apache-2.0
"""What is wrong around the engine, one section a fault: the eager result or a refusal, in one sentence, nothing lost.

The sentence says what was found, what was expected and what to do. Compiled code is real here, from a block that takes
seconds to lower; how the store itself takes damage is in cache/test_store.py.
"""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
from backbones import make
from patchers import patcher_around, sample
from torch import nn

import nexfort_engine
from nexfort_engine import engine
from nexfort_engine.cache import root_dir
from nexfort_engine.cache import store as store_module
from nexfort_engine.cache.store import Store
from nexfort_engine.compilation import lookup as finding
from nexfort_engine.compilation import support
from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.hosts.comfy import model as comfy_host
from nexfort_engine.lowering import inductor as lower

pytestmark = pytest.mark.usefixtures("threads", "artefact_cache")
TOLERANCE = 1e-4
ROOT = Path(nexfort_engine.__file__).resolve().parent.parent
CONFIG = CompileConfig.parse(None)


class Small(nn.Module):
    """A norm and a product: one region, a few seconds to lower."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.norm, self.up = nn.LayerNorm(16), nn.Linear(16, 24)
        with torch.no_grad():
            self.up.weight.copy_(torch.randn(24, 16, generator=generator))
            self.up.bias.copy_(torch.randn(24, generator=generator))
        self.eval().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.up(self.norm(x)))


def given() -> torch.Tensor:
    """What Small is called with."""
    return torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(4))


def run(module: Any) -> torch.Tensor:
    with torch.inference_mode():
        return module(given()).clone()


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def sentence(text: object, *words: str) -> None:
    """One line that a person can act on: all these words are in it."""
    line = str(text)
    assert "\n" not in line and len(line) < 600, line
    missing = [word for word in words if word not in line]
    assert not missing, f"{missing} not in: {line}"


def assert_runs_eager(compiled: Any, *words: str) -> None:
    """The result is eager's to the last bit, nothing was compiled, and the report gives one reason with these words."""
    assert torch.equal(run(compiled), run(compiled.uncompiled()))
    found = compiled.report.as_dict()
    assert found["artefacts_compiled"] == found["artefacts_loaded"] == 0
    (row,) = found["eager"]
    sentence(row["reason"], *words)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What Nexfort has said to the user so far, warnings and worse."""
    caplog.set_level(logging.WARNING)
    return lambda: [one.getMessage() for one in caplog.records if one.name.startswith("nexfort")]


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """No artefact is found in memory, as in a new process; those of other tests stay there for them."""
    monkeypatch.setattr(finding, "_loaded", WeakValueDictionary())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgetful: None) -> Path:
    """A cache directory of the test's own, not made yet."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(folder))
    return folder


@pytest.fixture(scope="module")
def filled_once(threads: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds the artefact of Small. To be copied, not used."""
    folder = tmp_path_factory.mktemp("filled") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEXFORT_CACHE_DIR", str(folder))
        patch.setattr(finding, "_loaded", WeakValueDictionary())
        compiled = nexfort_engine.compile(Small())
        assert distance(run(compiled), run(Small())) < TOLERANCE
        assert compiled.report.as_dict()["artefacts_compiled"] == 1
    return folder


@pytest.fixture
def filled(filled_once: Path, cache: Path) -> Path:
    """A cache of the test's own that holds the artefact of Small."""
    shutil.copytree(filled_once, cache)
    return cache


# ---- not a diffusion model -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), ("object", "MODEL output")),
        (None, ("NoneType", "MODEL output")),
        ("a path.safetensors", ("str", "MODEL output")),
        (SimpleNamespace(add_wrapper_with_key=None, model=None), ("SimpleNamespace", "MODEL output")),
        (
            SimpleNamespace(add_wrapper_with_key=None, model=nn.Linear(2, 2)),
            ("Linear", "holds no diffusion model", "MODEL output"),
        ),
    ],
)
def test_what_is_no_model_is_refused(value: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(TypeError) as refusal:
        comfy_host.attach(value, CONFIG)
    sentence(refusal.value, "Nexfort Compile Model got a", *words)


@pytest.mark.comfy
def test_a_text_encoder_in_a_patcher_is_refused_and_unharmed(comfyui: Path) -> None:
    import comfy.model_patcher

    cpu = torch.device("cpu")
    clip = comfy.model_patcher.ModelPatcher(Small(), load_device=cpu, offload_device=cpu)
    before = set(vars(clip.model)), dict(clip.wrappers)
    with pytest.raises(TypeError) as refusal:
        comfy_host.attach(clip, CONFIG)
    sentence(refusal.value, "Small", "holds no diffusion model", "connect the MODEL output")
    assert (set(vars(clip.model)), dict(clip.wrappers)) == before


@pytest.mark.parametrize("value", [object(), None, nn.Linear(2, 2), SimpleNamespace(first_stage_model="latents")])
def test_what_is_no_vae_is_refused(value: Any) -> None:
    with pytest.raises(TypeError) as refusal:
        comfy_host.attach_vae(value, CONFIG)
    sentence(refusal.value, f"Nexfort Compile VAE got a {type(value).__name__}", "expected the VAE output of a loader")


@pytest.mark.parametrize("value", [run, torch.nn.functional.gelu, None, {"unet": 1}, Small])
def test_compile_refuses_what_is_no_module(value: Any) -> None:
    with pytest.raises(TypeError) as refusal:
        nexfort_engine.compile(value)
    sentence(refusal.value, f"got a {type(value).__name__}", "expected a torch.nn.Module", "torch.compile")


@pytest.mark.parametrize("value", [Small(), None, "stabilityai/a-model", run])
def test_compile_pipe_refuses_what_is_no_pipeline(value: Any) -> None:
    with pytest.raises(TypeError) as refusal:
        nexfort_engine.compile_pipe(value)
    sentence(refusal.value, f"got a {type(value).__name__}", "expected a diffusers pipeline", "nexfort_engine.compile")


def test_compile_pipe_refuses_a_pipeline_without_a_part_it_knows() -> None:
    pipe = SimpleNamespace(components={"upscaler": None}, upscaler=Small(), unet=None)
    before = dict(vars(pipe))
    with pytest.raises(ValueError) as refusal:
        nexfort_engine.compile_pipe(pipe)
    sentence(refusal.value, "SimpleNamespace", "none of the parts", "unet, transformer", "expected at least one")
    assert vars(pipe) == before


# ---- nothing to compile --------------------------------------------------------------------------------------


class NoWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList([nn.ReLU(), nn.Sigmoid()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            x = step(x)
        return x


def test_a_model_without_weights_runs_as_it_is_and_a_note_says_so(cache: Path) -> None:
    compiled = nexfort_engine.compile(NoWeights())
    for _ in range(2):
        assert torch.equal(run(compiled), run(NoWeights()))
    found = compiled.report.as_dict()
    assert found["calls"] == 2 and not found["regions"] and not found["artefacts"] and not found["eager"]
    (note,) = found["notes"]
    sentence(note, "no region", "no weights", "runs as it is")
    assert not cache.exists()


class Stubborn(Small):
    """What it computes depends on a value: no graph holds it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if float(x.sum()) > 1e6 else super().forward(-x)


def test_a_model_that_no_graph_holds_runs_eager_with_its_reason(cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    compiled = nexfort_engine.compile(Stubborn())
    for _ in range(2):
        assert_runs_eager(compiled, "branches on the value of a tensor")
    assert compiled.report.as_dict()["eager"][0]["region"] == "(whole module)"
    assert "def forward" not in capfd.readouterr().err, "torch printed its graph"


# ---- no compiler ---------------------------------------------------------------------------------------------

_NO_GCC = """
import json, logging, sys, torch
sys.path[:0] = sys.argv[1:]
logging.basicConfig(level=logging.WARNING, format="%(name)s|%(message)s")
import nexfort_engine
from test_bad_input import Small, run
compiled = nexfort_engine.compile(Small())
same = all(torch.equal(run(compiled), run(Small())) for _ in range(3))
print(json.dumps({"same": same, "report": compiled.report.as_dict()}))
"""


@pytest.mark.parametrize(
    "cxx",
    [
        pytest.param(None, id="empty PATH"),
        pytest.param("/nowhere/bin/g++", id="CXX of nowhere", marks=pytest.mark.large),
    ],
)
def test_without_a_cpp_compiler_one_line_and_the_eager_result(cxx: str | None, tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": str(tmp_path), "NEXFORT_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("TORCH_INDUCTOR_INSTALL_GXX", None)
    environment.pop("CXX", None)
    if cxx is not None:
        environment |= {"PATH": os.environ["PATH"], "CXX": cxx}
    command = [sys.executable, "-c", _NO_GCC, str(ROOT), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["same"] and answer["report"]["artefacts_compiled"] == 0
    (row,) = answer["report"]["eager"]
    sentence(row["reason"], "no C++ compiler was found", "compiling for the CPU needs one", "install gcc", "CXX")
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("nexfort")]
    sentence(line, row["reason"])
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "cache").exists()


@pytest.fixture
def fresh_support() -> Iterator[None]:
    """What is known about this machine is found out anew, and forgotten again."""
    support.reason_for.cache_clear()
    yield
    support.reason_for.cache_clear()


@pytest.mark.usefixtures("fresh_support")
def test_without_triton_one_line_and_the_eager_result(
    monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]], cache: Path
) -> None:
    from torch.utils import _triton

    monkeypatch.setattr(_triton, "has_triton", lambda: False)
    monkeypatch.setattr(engine, "unsupported", lambda root, folder=None: support.reason_for("cuda"))
    compiled = nexfort_engine.compile(Small())
    for _ in range(3):
        assert_runs_eager(compiled, "Triton was not found", "cuda", "needs Triton", "install the triton package")
    (line,) = lines()
    sentence(line, "Nexfort: running eager:", "Triton")
    assert not cache.exists()


# ---- torch too old -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_support")
@pytest.mark.parametrize("version", ["2.10.1", "2.4.0+cu121", "1.13.1"])
def test_with_an_old_torch_one_line_and_the_eager_result(
    version: str, monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]], cache: Path
) -> None:
    compiled = nexfort_engine.compile(Small())
    monkeypatch.setattr(torch, "__version__", version)
    for _ in range(3):
        assert_runs_eager(compiled, f"torch {version} was found", "2.11 or newer is needed", "update torch")
    (line,) = lines()
    sentence(line, "Nexfort: running eager:", version)
    assert not cache.exists()


# ---- a cache directory that cannot be written ------------------------------------------------------------------


def _file_in_its_place(folder: Path, _patch: pytest.MonkeyPatch) -> None:
    folder.write_text("somebody's notes")


def _below_a_file(folder: Path, patch: pytest.MonkeyPatch) -> None:
    folder.write_text("somebody's notes")
    patch.setenv("NEXFORT_CACHE_DIR", str(folder / "nexfort"))


def _no_permission(folder: Path, _patch: pytest.MonkeyPatch) -> None:
    if os.name != "posix" or os.geteuid() == 0:
        pytest.skip("permissions do not bind this user")
    folder.mkdir(mode=0o500)


def _refuse(patch: pytest.MonkeyPatch, number: int, times_before: int = 0) -> None:
    """A disk that takes `times_before` files of the store more and then fails."""
    left = [times_before]
    write_new = store_module.write_new

    def write(path: Path, content: bytes, **more: Any) -> None:
        if left[0] == 0:
            raise OSError(number, os.strerror(number), str(path))
        left[0] -= 1
        write_new(path, content, **more)

    for module in (root_dir, store_module):
        patch.setattr(module, "write_new", write)


def _read_only(_folder: Path, patch: pytest.MonkeyPatch) -> None:
    _refuse(patch, errno.EROFS)


def _full(_folder: Path, patch: pytest.MonkeyPatch) -> None:
    _refuse(patch, errno.ENOSPC)


def _full_at_the_end(_folder: Path, patch: pytest.MonkeyPatch) -> None:
    _refuse(patch, errno.ENOSPC, times_before=1)


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (_file_in_its_place, "expected a directory"),
        (_below_a_file, "directory"),
        (_no_permission, os.strerror(errno.EACCES)),
        (_read_only, os.strerror(errno.EROFS)),
        (_full, os.strerror(errno.ENOSPC)),
        (_full_at_the_end, os.strerror(errno.ENOSPC)),
    ],
)
def test_an_unwritable_cache_costs_persistence_only(
    spoil: Callable[[Path, pytest.MonkeyPatch], None],
    found: str,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    lines: Callable[[], list[str]],
) -> None:
    spoil(cache, monkeypatch)
    compiled = nexfort_engine.compile(Small())
    for _ in range(2):
        assert distance(run(compiled), run(Small())) < TOLERANCE
    report = compiled.report.as_dict()
    assert report["artefacts_compiled"] == 1 and not report["eager"]
    (note,) = report["notes"]
    sentence(note, "artefacts last only as long as this process", str(cache), found, "Make room or give access")
    sentence(note, "NEXFORT_CACHE_DIR")
    (line,) = lines()
    sentence(line, str(cache), found)
    if cache.is_file():
        assert cache.read_text() == "somebody's notes"


def test_a_cache_that_is_read_only_now_is_still_read(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _refuse(monkeypatch, errno.EROFS)
    compiled = nexfort_engine.compile(Small())
    assert distance(run(compiled), run(Small())) < TOLERANCE
    report = compiled.report.as_dict()
    assert (report["artefacts_loaded"], report["artefacts_compiled"], report["eager"]) == (1, 0, [])


def test_a_disk_that_fills_up_while_lowering_leaves_the_eager_result(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(lower, "lower", fill)
    compiled = nexfort_engine.compile(Small())
    for _ in range(2):
        assert_runs_eager(compiled, "lowering it failed", os.strerror(errno.ENOSPC), "NEXFORT_CACHE_DIR")
    assert not list((cache / "staging").iterdir()) and not Store(cache).entries()


# ---- two processes with one cache -------------------------------------------------------------------------------

_ONE_OF_TWO = """
import json, pathlib, sys, time, torch
sys.path[:0] = sys.argv[2:]
torch.set_num_threads(1)
import nexfort_engine
import torch._inductor.compile_fx
from test_bad_input import Small, digest, run
compiled = nexfort_engine.compile(Small())
folder = pathlib.Path(sys.argv[1])
(folder / f"ready-{time.monotonic_ns()}").touch()
while len(list(folder.glob("ready-*"))) < 2:
    time.sleep(0.02)
first = digest(run(compiled))
again = nexfort_engine.compile(Small())
print(json.dumps({"digests": [first, digest(run(again))], "report": compiled.report.as_dict()}))
"""


def digest(tensor: torch.Tensor) -> str:
    """The exact bits of a result."""
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.mark.slow
def test_two_processes_start_on_one_cache_at_once(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "meet").mkdir()
    command = [sys.executable, "-c", _ONE_OF_TWO, str(tmp_path / "meet"), str(ROOT), str(Path(__file__).parent)]
    environment = {**os.environ, "NEXFORT_CACHE_DIR": str(cache)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    both = [subprocess.Popen(command, **pipes) for _ in range(2)]
    try:
        ended = [process.communicate(timeout=300) for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], ended[0][1][-2000:] + ended[1][1][-2000:]
    answers = [json.loads(out.splitlines()[-1]) for out, _ in ended]
    for answer in answers:
        assert answer["report"]["artefacts_loaded"] + answer["report"]["artefacts_compiled"] == 1
        assert not answer["report"]["eager"] and not answer["report"]["notes"]
    assert len({one for answer in answers for one in answer["digests"]}) == 1
    store = Store(cache)
    (entry,) = store.entries()
    assert entry.verify() is None and [row["id"] for row in store.rows()] == [entry.id]
    assert not list((cache / "staging").iterdir()) and not list((cache / "broken").iterdir())
    compiled = nexfort_engine.compile(Small())
    assert distance(run(compiled), run(Small())) < TOLERANCE
    assert compiled.report.as_dict()["artefacts_compiled"] == 0


# ---- a damaged cache ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["{", '{"schema": 1, "entries": 7}', "[]", "\0\0\0", '{"schema": 99}'])
def test_a_corrupt_index_is_rebuilt_and_costs_nothing(text: str, filled: Path) -> None:
    rows = Store(filled).rows()
    (filled / "index.json").write_text(text)
    compiled = nexfort_engine.compile(Small())
    assert distance(run(compiled), run(Small())) < TOLERANCE
    report = compiled.report.as_dict()
    assert (report["artefacts_loaded"], report["artefacts_compiled"]) == (1, 0)
    again = Store(filled).rows()
    assert [row["id"] for row in again] == [row["id"] for row in rows]
    assert json.loads((filled / "index.json").read_text())["entries"]


def _truncated(payload: Path) -> None:
    file = max((p for p in payload.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _foreign(payload: Path) -> None:
    for file in payload.rglob("*.so"):
        file.write_bytes(bytes(file.stat().st_size))


def _missing(payload: Path) -> None:
    shutil.rmtree(payload / "aotautograd")


def _no_manifest(payload: Path) -> None:
    payload.with_name("manifest.json").write_text("{")


def _a_link_out(payload: Path) -> None:
    (payload / "more").symlink_to("/etc")


@pytest.mark.parametrize("damage", [_truncated, _foreign, _missing, _no_manifest, _a_link_out])
def test_a_damaged_payload_is_set_aside_and_rebuilt(
    damage: Callable[[Path], None], filled: Path, lines: Callable[[], list[str]]
) -> None:
    (filled / "notes.txt").write_text("the user's own")
    store = Store(filled)
    with store.stage() as staged:
        (staged / "payload" / "code").write_text("another model's")
        other = store.commit("0123456789abcdef", staged, {})
    (entry,) = [one for one in store.entries() if one.id != other.id]
    damage(entry.payload)
    compiled = nexfort_engine.compile(Small())
    for _ in range(2):
        assert distance(run(compiled), run(Small())) < TOLERANCE
    report = compiled.report.as_dict()
    assert (report["artefacts_compiled"], report["eager"]) == (1, [])
    (line,) = lines()
    sentence(line, entry.id, "set aside")
    (reason,) = (filled / "broken").glob("*.reason.txt")
    assert entry.id in reason.name and reason.with_name(reason.name.removesuffix(".reason.txt")).is_dir()
    assert other.verify() is None and (filled / "notes.txt").read_text() == "the user's own"
    assert {one.id for one in Store(filled).entries()} == {entry.id, other.id}


def test_code_that_is_whole_and_does_not_load_is_rebuilt(
    filled: Path, monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]
) -> None:
    load, calls = lower.load, [0]

    def fail_once(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 1:
            raise RuntimeError("undefined symbol: made by another build of torch")
        return load(*args)

    monkeypatch.setattr(lower, "load", fail_once)
    compiled = nexfort_engine.compile(Small())
    assert distance(run(compiled), run(Small())) < TOLERANCE
    assert compiled.report.as_dict()["artefacts_compiled"] == 1
    (line,) = lines()
    sentence(line, "set aside", "undefined symbol")


# ---- a checkpoint of an unknown family ----------------------------------------------------------------------------


@pytest.mark.comfy
def test_an_unknown_family_is_compiled_by_its_structure(comfyui: Path) -> None:
    network = make("torch_dit").module  # none of ComfyUI's classes
    patcher = patcher_around(network)
    wanted = sample(patcher)
    assert distance(sample(patcher, seed=1), wanted) > 100 * TOLERANCE
    compiled = comfy_host.attach(patcher, CONFIG)
    assert distance(sample(compiled), wanted) < TOLERANCE
    report = comfy_host.report_of(compiled)
    assert report is not None
    found = report.as_dict()
    assert not found["eager"] and {"blocks.0", "blocks.1"} <= {row["name"] for row in found["regions"]}


class Alien(nn.Module):
    """A network nobody has seen: a list of nothing, weights of its own, and a branch on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.ModuleList()
        self.mix = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor, t: torch.Tensor, context: torch.Tensor, **_: Any) -> torch.Tensor:
        push = 0.1 if float(context.mean()) > 0 else 0.2
        return self.mix(x) * self.gain + push * context.mean()


@pytest.mark.comfy
def test_a_network_that_cannot_be_compiled_samples_eagerly_with_a_reason(comfyui: Path, cache: Path) -> None:
    torch.manual_seed(0)
    network = Alien()
    patcher = patcher_around(network)
    keys, wanted = list(network.state_dict()), sample(patcher)
    compiled = comfy_host.attach(patcher, CONFIG)
    assert torch.equal(sample(compiled), wanted)
    report = comfy_host.report_of(compiled)
    assert report is not None
    found = report.as_dict()
    (row,) = found["eager"]
    sentence(row["reason"])
    assert not found["artefacts"] and list(network.state_dict()) == keys


# ---- options that are no options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"mode": "O2"', ("not valid JSON", "line 1 column 14", "expected for example")),
        ('{"mode": "O2",\n "dynamic": ture}', ("not valid JSON", "line 2 column 13", "near")),
        ("{'mode': 'O2'}", ("not valid JSON", "line 1 column 2", "double quotes")),
        ("[1, 2]", ("JSON list", "expected an object")),
        ('{"mode": "O2", "mode": "jit"}', ("'mode' twice", "expected each key once")),
        ('{"mod": "O2"}', ("unknown key 'mod'", "did you mean 'mode'", "Valid:")),
        ("max-autotun", ("'max-autotun'", "did you mean 'max-autotune'", "Valid:")),
    ],
)
def test_broken_options_are_refused_with_the_place(text: str, words: tuple[str, ...]) -> None:
    module = Small()
    before = set(vars(module)), list(module.state_dict())
    pipe = SimpleNamespace(components={}, unet=module)
    calls: list[Callable[[], Any]] = [
        lambda: nexfort_engine.compile(module, options=text),
        lambda: nexfort_engine.compile_pipe(pipe, options=text),
        lambda: CompileConfig.parse(text),
    ]
    for call in calls:
        with pytest.raises(ValueError) as refusal:
            call()
        sentence(str(refusal.value).replace("\n", " "), *words)
        assert "Traceback" not in str(refusal.value)
    assert (set(vars(module)), list(module.state_dict())) == before and vars(pipe)["unet"] is module


# ---- nothing stays behind -------------------------------------------------------------------------------------


def test_a_refused_or_eager_model_is_let_go(cache: Path) -> None:
    import weakref

    module = Stubborn()
    compiled = nexfort_engine.compile(module)
    run(compiled)
    gone = weakref.ref(module)
    del module, compiled
    deadline = time.monotonic() + 5
    while gone() is not None and time.monotonic() < deadline:
        gc.collect()
    assert gone() is None
