# SPDX-License-Identifier: Apache-2.0
"""What all tests share: one artefact cache, compiled kernels, the ComfyUI of this machine, what is said without one.

Both caches lie below .pytest_cache and stay from run to run, so that a second run compiles next to nothing;
`pytest --cache-clear` begins anew. A test that is about cold starts takes a cache directory of its own; there too the
C++ compiler (compiler/g++) makes a kernel only once.
"""

from __future__ import annotations

import functools
import gc
import logging
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# A helper's failed assertion is told in full, as a test's is.
pytest.register_assert_rewrite(*(file.stem for file in (Path(__file__).parent / "support").glob("*.py")))

THREADS = 1
MOST_PROCESSES = 4
SECONDS_BETWEEN = 120.0
# Files that share what takes seconds to make, by how their paths below tests/ begin: one process runs all of a group.
TOGETHER = {
    "contracts": ("contracts", "test_changes.py"),  # compiled backbones
    "web": ("web/",),  # a server
    "kernels": ("kernels/",),  # processes that have imported Triton
    "pairs": tuple(
        f"hosts/test_comfy_{of}.py" for of in ("patches", "lora", "object_patches", "bad_patches", "lifecycles", "walk")
    ),
    "kept": tuple(f"hosts/test_comfy_{of}" for of in ("given_back", "prepack", "offload")),  # lowered with kept weights
}
LONGEST = (  # files and groups that take longest: where several processes run tests, none of these is left for the end
    *("web", "contracts", "pairs", "test_server.py", "kernels", "lowering/test_lower_ahead.py"),
    *("kept", "hosts/test_comfy_quantised.py", "hosts/test_diffusers.py"),
    *("hosts/test_comfy_controlnet.py", "lowering/test_worker_pool.py", "lowering/test_subgraph_dedup.py"),
    *("test_server_templates.py", "test_server_background.py", "test_server_controlnet.py", "test_server_routes.py"),
    *("hosts/test_diffusers_parallel.py", "benchmarks/test_text_to_image.py", "cli/test_warm.py"),
    *("compilation/test_handover.py", "cudagraphs/test_invariant_cache.py", "hosts/test_diffusers_quantize.py"),
    *("hosts/test_lower_blocks_of_comfy.py", "hosts/test_comfy.py"),
    *("cli/test_comfy_server.py", "test_old_names.py", "test_bad_cache.py", "nodes/test_workflows.py"),
    *("hosts/test_comfy_invariant_cache.py", "hosts/test_comfy_loader.py", "lowering/test_graph_split.py"),
    *("lowering/test_lower_convolutions.py", "lowering/test_lower_int8.py", "lowering/test_interleaved_loads.py"),
    *("cache/test_store_faults.py", "capture/test_operator_sizes.py", "compilation/test_background.py"),
)
HOW_TO_GIVE_ONE = (
    "set COMFYUI_PATH to the root of one (git clone https://github.com/comfyanonymous/ComfyUI), or install one "
    "with comfy-cli: pip install comfy-cli && comfy install"
)

# Threads that wait for work spin by default, and take the processor from compilers and tests beside them: up to half
# of all its time. Read when torch is loaded, also in the processes that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Networks this small are slower on two threads than on one, the more so beside other tests; and Inductor writes plain
# loops for one. test_demo.py runs on as many as there are.
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
# Inductor would try out the processor's vector instructions for each empty cache, a quarter of a minute of compiling.
# It still asks the processor for them.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Kernels without vector instructions: writing and compiling them takes a fifth less, and there are hundreds.
os.environ.setdefault("ATEN_CPU_CAPABILITY", "default")
# torch 2.11 packs keys in bfloat16 for AMX where the processor has it, and refuses to without those instructions.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
# Where several tests run at once they fill the machine themselves. Inductor would start a process beside each of theirs
# that imports torch, to compile in.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Inductor asks for the compiler once, when it is loaded, which some test files do: before any fixture runs.
if shutil.which("g++"):
    os.environ.setdefault("CXX", str(Path(__file__).parent / "support" / "compiler" / "g++"))
# Read when sympy is loaded. Lowering asks it the same things again and again; workers have as large a memory.
os.environ.setdefault("SYMPY_CACHE_SIZE", "100000")

# Compilers make a great many objects, and while these tests run Python would look through them for garbage a fourteenth
# of the time. Full collections still come, only later.
gc.set_threshold(50_000, 20, 20)

# no test is judged by its time, and on a busy machine the first draw of a strategy is slow
hypothesis.settings.register_profile("nexfort", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("nexfort")


class Loggers(dict[str, Any]):
    """Python's table of loggers. pytest walks over it before each test, while threads may import what adds to it."""

    def values(self) -> Any:
        return list(super().values())


def pytest_configure() -> None:
    """Have loggers as the tests need them.

    Torch writes its machine-readable trace, thousands of long texts, only as long as somebody takes it.
    """
    logging.Logger.manager.loggerDict = Loggers(logging.Logger.manager.loggerDict)
    trace = logging.getLogger("torch.__trace")

    def nobody_does(_: logging.LogRecord) -> bool:
        trace.handlers.clear()  # pytest's own among them, which would show thousands of empty lines
        return False

    trace.addFilter(nobody_does)


@pytest.fixture(scope="session", autouse=True)
def artefact_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory that NEXFORT_CACHE_DIR names during the session."""
    kept = getattr(request.config, "cache", None)
    made = kept.mkdir if kept is not None else tmp_path_factory.mktemp
    folder, kernels = Path(made("nexfort")), Path(made("kernels"))
    os.chmod(folder, 0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEXFORT_CACHE_DIR", str(folder))
        # torch.compile's own cache, which tests compare with, names an entry without the vector instructions that it
        # was written for, so one that anybody else left in the default place may not compile here
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        patch.setenv("NEXFORT_TEST_KERNELS", str(kernels))
        run = tmp_path_factory.getbasetemp()  # with pytest-xdist each process has one of its own below that of all
        files = (run.parent if "PYTEST_XDIST_WORKER" in os.environ else run) / "tiny-files"
        files.mkdir(exist_ok=True)
        patch.setenv("NEXFORT_TEST_FILES", str(files))
        patch.delenv("NEXFORT_DISABLE", raising=False)
        if "PYTEST_XDIST_WORKER" in os.environ and "NEXFORT_WORKERS" not in os.environ:
            patch.setenv("NEXFORT_WORKERS", "0")  # the tests themselves fill the machine
        yield folder


@pytest.fixture(scope="session", autouse=True)
def _self_check_made(artefact_cache: Path) -> Iterator[None]:
    """A torch other than the reference is tried out before a test breaks what that needs, and once for all caches."""
    if metadata.version("torch").startswith("2.11."):
        yield
        return
    from nexfort_engine.compilation import support

    reason = support.reason_for("cpu", artefact_cache)
    assert reason is None, reason
    own, passed = support._passed, support._passed(artefact_cache)

    @functools.wraps(own)
    def passed_for_all(folder: Path) -> list[str]:
        return [*own(folder), *passed]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(support, "_passed", passed_for_all)
        yield


@pytest.fixture(scope="module", autouse=True)
def _one_cache(artefact_cache: Path) -> Iterator[None]:
    """A file whose fixtures put the tests' cache back in another order than they took it away is told so.

    So is one whose steps leave Python's garbage collector in another way, or whose traces leave modes behind.
    """
    collected = gc.get_threshold()
    yield
    assert os.environ.get("NEXFORT_CACHE_DIR") == str(artefact_cache), "a test of this file left another cache"
    assert gc.get_threshold() == collected, "a step of this file ended, and what was begun for it did not"
    ops = sys.modules.get("torch._ops")
    assert ops is None or not ops._len_torch_dispatch_stack_pre_dispatch(), "a trace ended, and its modes did not"


@pytest.fixture(scope="session")
def threads() -> int:
    """Torch on a fixed number of threads, so that sums are taken in one order everywhere."""
    import torch

    torch.set_num_threads(THREADS)
    return THREADS


@pytest.fixture(scope="session")
def comfyui(threads: int) -> Path:
    """The ComfyUI of this machine, importable and set to the CPU; skips the test where there is none."""
    from nexfort_engine.hosts.comfy_install import find_comfyui

    found = find_comfyui()
    if found is None:
        pytest.skip(f"no ComfyUI was found; {HOW_TO_GIVE_ONE}")
    import_comfyui(found[0])
    return found[0]


_thawed = -math.inf


@pytest.fixture(scope="module", autouse=True)
def garbage() -> None:
    """Tests and ComfyUI look for garbage often, and need not go through all that is there since earlier files.

    What was set aside before is looked through again only now and then: that takes seconds.
    """
    global _thawed
    if time.monotonic() - _thawed > SECONDS_BETWEEN:
        gc.unfreeze()  # or what has died since would never go
        _thawed = time.monotonic()
    gc.collect()
    gc.freeze()


@pytest.fixture
def host(name: str, request: pytest.FixtureRequest) -> str:
    """The name of a backbone whose host is there; skips where it is not."""
    from backbones import BACKBONES  # it loads torch

    if BACKBONES[name].host == "comfy":
        request.getfixturevalue("comfyui")
    elif BACKBONES[name].host == "diffusers":
        pytest.importorskip("diffusers")
    return name


@pytest.fixture
def tiny(host: str) -> Any:
    """The backbone after its first compiled call, shared by the tests of a session: leave it as it was."""
    from subjects import subject  # it loads torch

    return subject(host)


def import_comfyui(root: Path) -> None:
    """Import comfy from a ComfyUI's root, for a CPU and with attention that can be traced."""
    if str(root) not in sys.path:
        sys.path.append(str(root))  # last: it has modules called nodes, utils and app
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    comfy.cli_args.args.use_pytorch_cross_attention = True
    try:
        import comfy.ops
    except ImportError as error:
        raise RuntimeError(
            f"the ComfyUI at {root} does not import ({error}); expected its requirements to be installed here: "
            f"pip install -r {root / 'requirements.txt'}"
        ) from error


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist nobody asks
def pytest_xdist_auto_num_workers() -> int:
    """How many processes `-n auto` means: each may start a compiler of its own, with a gigabyte or two.

    One more than there are processors, because tests wait for servers, browsers and restarted processes.
    """
    return min((os.cpu_count() or 1) + 1, MOST_PROCESSES)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile` each process runs whole files, and whole groups of them."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduler(LoadFileScheduling):
        def __init__(self, config: pytest.Config, log: Any) -> None:
            super().__init__(config, log)
            config.option.loadscopereorder = False  # by number of tests; the longest files have few

        def _split_scope(self, nodeid: str) -> str:
            return _group_of(Path(nodeid.partition("::")[0]))

    return Scheduler(config, log) if config.getvalue("dist") == "loadfile" else None


def _group_of(file: Path) -> str:
    """The group of files that a file belongs to, or else its own path below tests/."""
    path = file.as_posix().rpartition("tests/")[2]
    return next((group for group, begin in TOGETHER.items() if path.startswith(begin)), path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a GPU are skipped where there is none; the longest files come first, for whoever runs several."""
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(_group_of(item.path), len(place)))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One closing line if tests were skipped for want of a ComfyUI."""
    skipped = terminalreporter.stats.get("skipped", [])
    count = sum(1 for report in skipped if "no ComfyUI" in str(report.longrepr))
    if count:
        terminalreporter.write_line(
            f"{count} tests that need ComfyUI were skipped: none was found; {HOW_TO_GIVE_ONE}", yellow=True
        )
