# SPDX-License-Identifier: Apache-2.0
"""Process-wide settings: set inside a scope, exactly as before outside, after errors and between threads."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path

import pytest

from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.system import process_settings
from nexfort_engine.system.shared_settings import RARE

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def nothing_leaks():
    before = process_settings.snapshot(compiler=True)
    yield
    assert process_settings.snapshot(compiler=True) == before


@pytest.mark.parametrize(
    ("value", "off"),
    [(None, False), ("", False), ("0", False), ("false", False), ("No", False), ("1", True), ("true", True)],
)
def test_disabled_reads_the_variable_afresh(monkeypatch, value, off):
    monkeypatch.delenv(process_settings.DISABLE_VARIABLE, raising=False)
    assert not process_settings.disabled()
    if value is not None:
        monkeypatch.setenv(process_settings.DISABLE_VARIABLE, value)
    assert process_settings.disabled() is off


def test_scoped_env_restores_values_and_absence(monkeypatch, tmp_path):
    monkeypatch.setenv("NEXFORT_TEST_A", "before")
    monkeypatch.setenv("NEXFORT_TEST_B", "before")
    monkeypatch.delenv("NEXFORT_TEST_C", raising=False)
    with (
        pytest.raises(RuntimeError, match="inside"),
        process_settings.scoped_env(NEXFORT_TEST_A="now", NEXFORT_TEST_B=None, NEXFORT_TEST_C=tmp_path),
    ):
        assert os.environ["NEXFORT_TEST_A"] == "now"
        assert "NEXFORT_TEST_B" not in os.environ
        assert os.environ["NEXFORT_TEST_C"] == str(tmp_path)
        raise RuntimeError("inside")
    assert os.environ["NEXFORT_TEST_A"] == os.environ["NEXFORT_TEST_B"] == "before"
    assert "NEXFORT_TEST_C" not in os.environ


def test_scoped_env_restores_what_it_had_set_when_a_value_is_refused():
    with pytest.raises(TypeError), process_settings.scoped_env(NEXFORT_TEST_A="now", NEXFORT_TEST_B=3):
        pass
    assert "NEXFORT_TEST_A" not in os.environ


@pytest.mark.parametrize("before", [None, "/elsewhere"])
def test_inductor_scope_sets_and_restores(monkeypatch, tmp_path, before):
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
        if before is not None:
            monkeypatch.setenv(name, before)
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    outside = process_settings.snapshot(compiler=True)
    options = CompileConfig.parse("max-autotune").inductor_options("cpu")
    with (
        inductor_config.patch({"freezing": True, "fx_graph_cache": False}),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        with process_settings.inductor_scope(tmp_path, options):
            assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path)
            assert "TRITON_CACHE_DIR" not in os.environ
            assert inductor_config.fx_graph_cache and functorch_config.enable_autograd_cache
            assert inductor_config.max_autotune is True
            assert inductor_config.freezing is False
            assert inductor_config.fx_graph_remote_cache is False
            os.environ["TRITON_CACHE_DIR"] = "/written/by/inductor"  # as its Triton launcher does on a GPU
        assert inductor_config.freezing is True and inductor_config.fx_graph_cache is False
        assert functorch_config.enable_autograd_cache is False
    assert process_settings.snapshot(compiler=True) == outside


def test_inductor_scope_restores_after_an_error_and_can_be_entered_again(tmp_path):
    before = process_settings.snapshot(compiler=True)
    with pytest.raises(RuntimeError, match="inside"), process_settings.inductor_scope(tmp_path / "outer"):
        with process_settings.inductor_scope(tmp_path / "inner", {"max_autotune": True}):
            assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inner")
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "outer")
        raise RuntimeError("inside")
    assert process_settings.snapshot(compiler=True) == before
    with process_settings.inductor_scope(tmp_path):
        pass


def test_inductor_scope_puts_inductors_files_under_its_directory(tmp_path):
    from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir

    with process_settings.inductor_scope(tmp_path / "c"):
        assert cache_dir() == str(tmp_path / "c")
        assert Path(triton_cache_dir(0)) == tmp_path / "c" / "triton" / "0"


@pytest.mark.parametrize("users", [None, "0", "1"])
def test_inductor_scope_starts_no_compiler_processes_and_restores_the_users_choice(tmp_path, monkeypatch, users):
    if users is None:
        monkeypatch.delenv("TORCH_WARM_POOL", raising=False)
    else:
        monkeypatch.setenv("TORCH_WARM_POOL", users)
    with process_settings.inductor_scope(tmp_path / "outer"):
        with process_settings.inductor_scope(tmp_path / "inner"):
            assert os.environ["TORCH_WARM_POOL"] == "0"
        assert os.environ["TORCH_WARM_POOL"] == "0"
    assert os.environ.get("TORCH_WARM_POOL") == users


def test_compiler_processes_that_start_inside_know_how_kernels_are_launched_and_this_one_forgets(tmp_path):
    """They launch what they compile in the way that is kept with an artefact."""
    code = """
        import functools, sys
        from nexfort_engine.system.process_settings import inductor_scope

        NAME = "static_launch_user_defined_triton_kernels"
        options = {"compile_threads": 2, "worker_start_method": "subprocess"}
        with inductor_scope(sys.argv[1], options):
            from torch._inductor import config
            from torch._inductor.async_compile import AsyncCompile, shutdown_compile_workers

            asked = functools.partial(eval, f"__import__('torch._inductor.config')._inductor.config.{NAME}")
            there = AsyncCompile.process_pool().submit(asked).result()
        shutdown_compile_workers()
        print(there, getattr(config, NAME))
    """
    run = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    assert done.stdout == "True False\n", done.stderr


def test_inductor_scope_admits_one_thread_at_a_time(tmp_path):
    inside, overlap = [], []

    def work(name: str) -> None:
        for _ in range(10):
            with process_settings.inductor_scope(tmp_path / name):
                inside.append(name)
                time.sleep(0.002)  # lets a thread in that is not kept out
                if len(inside) > 1 or os.environ["TORCHINDUCTOR_CACHE_DIR"] != str(tmp_path / name):
                    overlap.append(name)
                inside.remove(name)

    threads = [threading.Thread(target=work, args=(str(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not overlap


def test_a_name_this_torch_does_not_have_is_left_out_and_logged_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(process_settings, "_unsupported", set())
    with caplog.at_level(logging.WARNING, logger="nexfort_engine.system.process_settings"):
        for _ in range(2):
            with process_settings.inductor_scope(tmp_path, {"gone_in_a_later_torch": 1, "max_autotune": True}):
                import torch._inductor.config as inductor_config

                assert inductor_config.max_autotune is True
    assert [r.getMessage() for r in caplog.records] == [
        "Nexfort: this torch has no torch._inductor.config.gone_in_a_later_torch; going on without it"
    ]
    assert process_settings.supported_options({"gone_in_a_later_torch": 1, "triton.cudagraphs": False}) == {
        "triton.cudagraphs": False
    }


def test_every_base_setting_exists_in_the_reference_torch():
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    if not torch.__version__.startswith("2.11."):
        pytest.skip(f"the reference is torch 2.11, this is {torch.__version__}")
    assert all(hasattr(inductor_config, name) for name in process_settings._INDUCTOR_BASE)
    assert all(hasattr(functorch_config, name) for name in process_settings._FUNCTORCH_BASE)


def test_backend_scope_sets_and_restores():
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    with (
        pytest.raises(RuntimeError, match="inside"),
        process_settings.backend_scope(
            conv_benchmark=True, matmul_allow_tf32=True, matmul_allow_fp16_accumulation=True
        ),
    ):
        assert cudnn.benchmark is True and matmul.allow_tf32 is True and matmul.allow_fp16_accumulation is True
        with process_settings.backend_scope(conv_benchmark=False):
            assert cudnn.benchmark is False and matmul.allow_tf32 is True
        assert cudnn.benchmark is True
        raise RuntimeError("inside")
    assert cudnn.benchmark is False and matmul.allow_tf32 is False and matmul.allow_fp16_accumulation is False
    with process_settings.backend_scope():
        assert cudnn.benchmark is False


def test_backend_scopes_of_two_threads_restore_what_was_before_both():
    first_in, second_in = threading.Event(), threading.Event()

    def first() -> None:
        with process_settings.backend_scope(conv_benchmark=True):
            first_in.set()
            assert second_in.wait(10)

    thread = threading.Thread(target=first)
    thread.start()
    assert first_in.wait(10)
    with process_settings.backend_scope(conv_benchmark=True):
        second_in.set()
        thread.join()
        assert torch.backends.cudnn.benchmark is True, "the other scope's end must not end this one"
    assert torch.backends.cudnn.benchmark is False


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_backend_scope_respects_a_user_of_the_newer_precision_switch(precision):
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("this torch has only allow_tf32")
    before = matmul.fp32_precision
    matmul.fp32_precision = precision
    try:
        with process_settings.backend_scope(matmul_allow_tf32=precision != "tf32"):
            assert matmul.fp32_precision == ("ieee" if precision == "tf32" else "tf32")
        assert matmul.fp32_precision == precision
    finally:
        matmul.fp32_precision = before


def test_snapshot_shows_a_change_of_each_kind(monkeypatch):
    before = process_settings.snapshot(compiler=True)
    assert process_settings.snapshot(compiler=True) == before
    import torch._inductor.config as inductor_config

    with monkeypatch.context() as patch:
        patch.setenv("TRITON_TEST_ONLY", "1")
        assert process_settings.snapshot() != {k: v for k, v in before.items() if not k.startswith("torch._")}
    with inductor_config.patch(max_autotune=not inductor_config.max_autotune):
        after = process_settings.snapshot(compiler=True)
        assert {k for k in before if before[k] != after[k]} == {"torch._inductor.config.max_autotune"}
    with torch.backends.cudnn.flags(benchmark=True):
        assert process_settings.snapshot()["cudnn.benchmark"] is True


def test_flags_import_and_snapshot_stay_light():
    code = (
        "import sys, torch; before = set(sys.modules); "
        "from nexfort_engine.system import process_settings; process_settings.snapshot(); "
        "new = [m for m in set(sys.modules) - before if m.startswith(('torch._inductor', 'triton'))]; "
        "assert not new, new; assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_the_first_look_at_inductor_leaves_the_environment_alone(tmp_path):
    code = (
        "import os, sys; from nexfort_engine.system import process_settings as flags; before = flags.snapshot(); "
        "flags.supported_options({}); flags.snapshot(compiler=True); "
        "scope = flags.inductor_scope(sys.argv[1]); scope.__enter__(); scope.__exit__(None, None, None); "
        "assert 'torch._inductor.config' in sys.modules; assert flags.snapshot() == before, os.environ"
    )
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    env = {name: value for name, value in os.environ.items() if name not in names}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=env, cwd=Path(__file__).parents[2])


def test_garbage_waits_until_the_last_of_overlapping_scopes_is_left():
    first, second = process_settings.without_collection(), process_settings.without_collection()
    first.__enter__()
    second.__enter__()
    assert not gc.isenabled()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_a_process_that_collects_nothing_itself_is_left_so():
    gc.disable()
    try:
        with process_settings.without_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_everything_is_seldom_looked_through_until_the_last_of_overlapping_scopes_is_left():
    before = gc.get_threshold()
    first, second = process_settings.rare_full_collections(), process_settings.rare_full_collections()
    first.__enter__()
    second.__enter__()
    assert gc.get_threshold() == (*before[:2], RARE)
    first.__exit__(None, None, None)
    assert gc.get_threshold() == (*before[:2], RARE)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == before


def test_the_full_collection_that_did_not_come_does_not_come_at_once():
    """Nor is garbage lost: the next full collection finds it."""
    full = set()  # phases of full collections

    def count(phase, info):
        full.update({phase} if info["generation"] == 2 else ())

    class Ring:
        def __init__(self):
            self.own = self

    ring = Ring()
    known = weakref.ref(ring)
    young, middle, times = gc.get_threshold()
    assert 2 * times < RARE
    gc.set_threshold(700, middle, times)
    gc.unfreeze()  # the tests' own
    gc.collect()
    gc.callbacks.append(count)
    try:
        with process_settings.rare_full_collections():
            made = [[] for _ in range(len(gc.get_objects()) // 2)]  # of few new objects there is no full collection
            for _ in range(2 * times):
                gc.collect(1)  # each is one more of the collections after which all is looked through
            del ring
        kept = [[] for _ in range(2000)]
        counts = len(made), len(kept)
        assert all(counts) and not full
    finally:
        gc.set_threshold(young, middle, times)
        gc.callbacks.remove(count)
    gc.collect()
    assert known() is None


def test_what_somebody_froze_stays_frozen():
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with process_settings.rare_full_collections():
            pass
        assert gc.get_freeze_count() >= frozen - 100 > 0  # some of it may be freed
    finally:
        gc.unfreeze()


def test_a_trace_goes_on_where_torch_lacks_what_is_exchanged(monkeypatch):
    monkeypatch.delattr(torch._C, "_select_conv_backend")
    with process_settings.tracing_scope():
        pass
    assert not hasattr(torch._C, "_select_conv_backend")


def test_numbers_stay_numbers_inside_and_are_tensors_to_other_code_afterwards(tmp_path: Path) -> None:
    from torch.fx.passes import _tensorify_python_scalars as turning

    asked = getattr(turning, "_is_tensorify_enabled", None)  # of torch 2.14 and newer; others look at the variable
    with process_settings.inductor_scope(tmp_path):
        assert not turning._is_tensorify_enabled() if asked else os.environ["TENSORIFY_PYTHON_SCALARS"] == "0"
    assert "TENSORIFY_PYTHON_SCALARS" not in os.environ and (asked is None or turning._is_tensorify_enabled())
