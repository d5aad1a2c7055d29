# SPDX-License-Identifier: Apache-2.0
"""The plugin as ComfyUI loads it, without a server: what it imports, what its nodes hand to the engine.

The nodes only translate, so a recorder stands for the engine's host here; test_server.py has the real one.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import served
from aiohttp import web

from benchmarks.startup import HOST
from nexfort_engine.config.compile_config import CompileConfig

HEAVY = ("triton", "torch._inductor", "torch._dynamo", "nexfort_engine", "diffusers")
# As ComfyUI's load_custom_node does it: a module named by its path, whose package finds its own parts.
LOAD = """
import importlib.util, json, sys
def load(path):
    name = path.replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, path + "/__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
"""


def run_python(code: str, *arguments: str, cwd: Path) -> Any:
    """The JSON that a Python of its own prints; with -I none of the tests' folders is on its path."""
    command = [sys.executable, "-I", "-c", LOAD + code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# ---- the entry ---------------------------------------------------------------------------------------------


def test_without_comfyui_the_plugin_is_silent(tmp_path: Path) -> None:
    code = """
path = list(sys.path)
module = load(sys.argv[1])
print(json.dumps({"names": [n for n in ("WEB_DIRECTORY", "comfy_entrypoint") if hasattr(module, n)],
                  "path": sys.path != path, "torch": "torch" in sys.modules,
                  "nodes": [m for m in sys.modules if m.endswith(".nodes")]}))
"""
    assert run_python(code, str(served.ROOT), cwd=tmp_path) == {
        "names": [],
        "path": False,
        "torch": False,
        "nodes": [],
    }


@pytest.mark.comfy
def test_starting_brings_only_the_plugins_own_nodes(tmp_path: Path) -> None:
    """What makes a start slow is what it imports: no engine, no compiler, and of ComfyUI nothing that is not there.

    The pack is loaded as ComfyUI does it, to the point where its nodes' schemas are known. The server is pretended.
    """
    code = f"""
sys.path.insert(0, sys.argv[2])
{HOST}
path, before = list(sys.path), set(sys.modules)
module = load(sys.argv[1])
asyncio.run(start(module))
new = set(sys.modules) - before
print(json.dumps(dict(
    added=[one for one in sys.path if one not in path], order=sys.path[:len(path)] == path,
    new=sorted(new), web=module.WEB_DIRECTORY, nodes="nodes" in new,
)))
"""
    link = tmp_path / "custom_nodes" / "Nexfort.v1"
    link.parent.mkdir()
    link.symlink_to(served.ROOT, target_is_directory=True)
    found = run_python(code, str(link), str(served.comfyui_or_skip()), cwd=tmp_path)
    assert found["added"] in ([str(served.ROOT)], [])  # none where the engine is installed
    assert found["order"]
    assert found["web"] == "./web"
    assert not found["nodes"], "ComfyUI's own module `nodes` would be hidden"
    assert not [name for name in found["new"] if name.startswith(HEAVY)]
    outside = {name.split(".")[0] for name in found["new"] if "custom_nodes" not in name}
    assert outside <= set(sys.stdlib_module_names), outside


@pytest.fixture(scope="module")
def plugin(comfyui: Path) -> types.ModuleType:
    """The plugin's package of nodes, loaded in this process beside a real comfy_api."""
    return served.plugin_nodes()


def part(plugin: types.ModuleType, name: str) -> types.ModuleType:
    """One module of the plugin."""
    return sys.modules[f"{plugin.__name__}.{name}"]


def node(plugin: types.ModuleType, name: str) -> Any:
    """One node class."""
    return next(one for one in plugin.NODES if one.__name__ == name)


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, CompileConfig]]]:
    """What the nodes hand to the engine."""
    calls: list[tuple[Any, CompileConfig]] = []

    def attach(given: Any, config: CompileConfig) -> str:
        calls.append((given, config))
        return "a clone"

    host = types.ModuleType("nexfort_engine.hosts.comfy.model")
    host.attach = host.attach_vae = attach  # type: ignore[attr-defined]
    host.attach_control = attach  # type: ignore[attr-defined]
    host.report_of = lambda attached: None  # type: ignore[attr-defined]
    package = types.ModuleType("nexfort_engine.hosts.comfy")
    package.model = package.controlnet = host  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nexfort_engine.hosts.comfy", package)
    monkeypatch.setitem(sys.modules, "nexfort_engine.hosts.comfy.model", host)
    monkeypatch.setitem(sys.modules, "nexfort_engine.hosts.comfy.controlnet", host)
    yield calls


# ---- the compile nodes -------------------------------------------------------------------------------------

COMPILE = ("NexfortCompileModel", "NexfortCompileVAE", "NexfortCompileControlNet")


@pytest.mark.comfy
@pytest.mark.parametrize("name", COMPILE)
@pytest.mark.parametrize(
    "mode", ["O2", "O3", "max-autotune", "max-optimize:max-autotune", "jit:disable-runtime-fusion"]
)
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("memory_format", ["channels_last", "contiguous_format"])
def test_widgets_become_a_config(
    plugin: types.ModuleType,
    handed: list[tuple[Any, CompileConfig]],
    name: str,
    mode: str,
    dynamic: bool,
    memory_format: str,
) -> None:
    given = object()
    result = node(plugin, name).execute(given, mode, dynamic, memory_format)
    assert result.result == ("a clone",)
    received, config = handed[0]
    assert received is given
    widgets = {"mode": mode, "dynamic": dynamic, "memory_format": memory_format}
    assert config == CompileConfig.parse(widgets).without_waiting()
    assert config.inactive() == CompileConfig.parse(widgets).inactive()
    assert config.background == (dynamic and "max-autotune" not in mode)
    node(plugin, name).execute(given, mode, dynamic, memory_format, wait=True)
    assert handed[1][1] == CompileConfig.parse(widgets) and not handed[1][1].background


@pytest.mark.comfy
@pytest.mark.parametrize(
    ("options", "wait", "variable", "expected"),
    [
        ("", False, None, True),
        ("", True, None, False),
        ("", False, "1", False),
        ("", False, "0", True),
        ('{"options": {"compile.background": false}}', False, None, False),
        ('{"options": {"compile.background": true}}', True, "1", True),
        ('{"options": {"compile.fold": false}}', False, None, True),
        ("O3:benchmark", False, None, True),
    ],
)
def test_nobody_waits_unless_it_is_asked_for(
    plugin: types.ModuleType,
    handed: list[tuple[Any, CompileConfig]],
    monkeypatch: pytest.MonkeyPatch,
    options: str,
    wait: bool,
    variable: str | None,
    expected: bool,
) -> None:
    if variable is not None:
        monkeypatch.setenv("NEXFORT_WAIT", variable)
    node(plugin, "NexfortCompileModel").execute(object(), "O2", True, "channels_last", options, wait=wait)
    ((_, config),) = handed
    assert config.background is expected and config.inactive() == []


@pytest.mark.comfy
@pytest.mark.parametrize("name", COMPILE)
def test_every_choice_of_a_dropdown_is_known_and_active(plugin: types.ModuleType, name: str) -> None:
    inputs = {one.id: one for one in node(plugin, name).define_schema().inputs}
    for mode in inputs["mode"].options:
        for memory_format in inputs["memory_format"].options:
            config = CompileConfig.parse({"mode": mode, "memory_format": memory_format})
            assert config.inactive() == []


@pytest.mark.comfy
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", {"mode": "O2", "dynamic": True, "memory_format": "channels_last"}),
        ("  \n", {"mode": "O2", "dynamic": True, "memory_format": "channels_last"}),
        ("null", {"mode": "O2", "dynamic": True, "memory_format": "channels_last"}),
        ("O3:benchmark", {"mode": "O3:benchmark", "dynamic": True, "memory_format": "channels_last"}),
        ('"jit"', {"mode": "jit", "dynamic": True, "memory_format": "channels_last"}),
        ('{"dynamic": false}', {"mode": "O2", "dynamic": False, "memory_format": "channels_last"}),
        (
            '{"dynamic": null, "mode": null}',
            {"mode": "O2", "dynamic": True, "memory_format": "channels_last"},
        ),
        ('{"memory_format": "contiguous_format"}', {"mode": "O2", "memory_format": "contiguous_format"}),
        (
            ' {"mode": "max-autotune", "options": {"overrides.conv_benchmark": true}}',
            {
                "mode": "max-autotune",
                "memory_format": "channels_last",
                "options": {"overrides.conv_benchmark": True},
            },
        ),
    ],
)
def test_options_text_replaces_the_widgets_it_names(
    plugin: types.ModuleType,
    handed: list[tuple[Any, CompileConfig]],
    options: str,
    expected: dict[str, Any],
) -> None:
    compile_model = node(plugin, "NexfortCompileModel")
    assert compile_model.validate_inputs(options) is True
    compile_model.execute(object(), "O2", True, "channels_last", options)
    assert handed[0][1] == CompileConfig.parse(expected).without_waiting()


@pytest.mark.comfy
@pytest.mark.parametrize("name", COMPILE)
@pytest.mark.parametrize(
    "options",
    ["{", "{'mode': 'O2'}", "[1]", "3", '{"mod": "O2"}', '{"mode": "O9"}'],
)
def test_bad_options_are_one_sentence(
    plugin: types.ModuleType, handed: list[tuple[Any, CompileConfig]], name: str, options: str
) -> None:
    said = node(plugin, name).validate_inputs(options)
    assert isinstance(said, str) and said and "\n" not in said
    with pytest.raises(ValueError) as refused:  # a linked text gets here unchecked
        node(plugin, name).execute(object(), "O2", True, "channels_last", options)
    assert str(refused.value) == said
    assert handed == []


@pytest.mark.comfy
@pytest.mark.parametrize("name", COMPILE)
def test_switched_off_it_hands_on_the_same_object(
    plugin: types.ModuleType, handed: list[tuple[Any, CompileConfig]], name: str
) -> None:
    given = object()
    execute = node(plugin, name).execute
    assert execute(given, "O2", True, "channels_last", "", False).result[0] is given
    assert execute(given, "O2", True, "channels_last", '{"disable": true}').result[0] is given
    assert handed == []


@pytest.mark.comfy
def test_the_compiler_is_imported_while_the_model_is_loaded(
    plugin: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server checks a prompt before it runs its first node."""
    from nexfort_engine.lowering import preload

    begun: list[int] = []
    monkeypatch.setattr(preload, "import_ahead", lambda: begun.append(1))
    monkeypatch.setattr(preload, "import_tracing_ahead", lambda *_: None)
    check = node(plugin, "NexfortCompileModel").validate_inputs
    assert check("") is True and not begun, "code runs the node, and no server"
    monkeypatch.setattr(part(plugin, "running"), "server", lambda: object())
    assert check("{") is not True and check('{"disable": true}') is True and not begun
    with monkeypatch.context() as patch:
        patch.setenv("NEXFORT_DISABLE", "1")
        assert check("") is True and not begun
    assert check("") is True and begun == [1]


@pytest.mark.comfy
def test_the_compiler_is_imported_when_the_server_starts(
    plugin: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nexfort_engine.lowering import preload

    begun: list[str] = []
    monkeypatch.setattr(preload, "import_ahead", lambda: begun.append("inductor"))
    monkeypatch.setattr(preload, "import_tracing_ahead", lambda *_: begun.append("tracing"))
    shared, started = part(plugin, "compile_inputs"), []
    monkeypatch.setattr(part(plugin, "running"), "server", lambda: None)
    shared.import_at_start()
    for off in ("", "1"):
        app = web.Application()
        monkeypatch.setattr(part(plugin, "running"), "server", lambda app=app: types.SimpleNamespace(app=app))
        shared.import_at_start()
        assert begun == started, "not before the server starts"
        monkeypatch.setenv("NEXFORT_DISABLE", off)
        asyncio.run(web.AppRunner(app).setup())
        started = ["inductor", "tracing"]
    assert begun == started, "and not where the engine is switched off"
    app.freeze()
    shared.import_at_start()  # a pack that is loaded late


@pytest.mark.comfy
def test_a_server_starts_where_the_compiler_cannot_be_imported(
    plugin: types.ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from nexfort_engine.lowering import preload

    def fail() -> None:
        raise ValueError("another torch")

    app = web.Application()
    monkeypatch.setattr(part(plugin, "running"), "server", lambda: types.SimpleNamespace(app=app))
    monkeypatch.setattr(preload, "import_ahead", fail)
    part(plugin, "compile_inputs").import_at_start()
    asyncio.run(web.AppRunner(app).setup())
    assert "another torch" in caplog.text


@pytest.mark.comfy
def test_validation_accepts_a_linked_text(plugin: types.ModuleType) -> None:
    assert node(plugin, "NexfortCompileModel").validate_inputs(None) is True


# ---- the cache manager and what the routes tell ------------------------------------------------------------


def row(**given: Any) -> dict[str, Any]:
    """One row as the store gives it."""
    made: dict[str, Any] = {
        "id": "a" * 24, "primary": "0" * 32, "size": 512, "created": "2026-01-02T03:04:05+00:00", "made_by": {},
        "info": {"region": "double_blocks.0", "kind": "DoubleStreamBlock", "family": "Flux"},
        "last_used": 1770177906.0, "pinned": False, "shapes": [], "base": False, "problem": None,
    }  # fmt: skip
    return {**made, **given}


ROWS = [
    row(size=3 << 20, shapes=["1x256x128", "2x4096x1536"], pinned=True),
    row(id="b" * 24, info={"region": "final_layer", "kind": "LastLayer", "family": "Flux"}),
    row(id="c" * 24, base=True),
    row(id="d" * 24, problem="/home/anna/x/code.so has 3 bytes, expected 4", last_used=None),
]


@pytest.mark.comfy
def test_the_table_is_aligned_and_summed(plugin: types.ModuleType) -> None:
    manager = part(plugin, "cache_manager")
    lines = manager.table([manager._row(one) for one in ROWS]).splitlines()
    assert lines[0] == "4 blocks, 3.0 MiB"
    assert lines[2].split() == ["block", "model", "shapes", "size", "last", "used", "state"]
    first = ["double_blocks.0", "Flux", "2x4096x1536", "(+1)", "3.0", "MiB", "2026-02-04", "04:05", "pinned"]
    assert lines[3].split() == first
    assert lines[4].split() == ["final_layer", "Flux", "-", "512", "B", "2026-02-04", "04:05", "ready"]
    assert lines[5].endswith(" base")
    assert lines[6].endswith("2026-01-02 03:04  …/code.so has 3 bytes, expected 4"), "where it lies is not told"
    assert len({line.find("2026") for line in lines[3:]}) == 1


@pytest.mark.comfy
def test_an_empty_cache_is_a_sentence(plugin: types.ModuleType) -> None:
    assert "empty" in part(plugin, "cache_manager").table([])


@pytest.mark.comfy
def test_the_list_is_made_anew_on_every_run(plugin: types.ModuleType) -> None:
    manager = node(plugin, "NexfortCacheManager")
    assert manager.fingerprint_inputs() != manager.fingerprint_inputs(after=None)


@pytest.mark.comfy
def test_rows_of_the_real_store(plugin: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nexfort_engine.cache.store import Store

    store = Store(tmp_path)
    with store.stage() as staged:
        (staged / "payload").mkdir(exist_ok=True)
        (staged / "payload" / "code.py").write_text("x = 1\n")
        info = {"region": "blocks.0", "kind": "Block", "family": "Flux", "source": "/somewhere/secret.py"}
        entry = store.commit("0" * 32, staged, {"inputs": 1, "info": info})
    host = types.ModuleType("nexfort_engine.hosts.comfy.model")
    host.cache_root = lambda: tmp_path  # type: ignore[attr-defined]
    package = types.ModuleType("nexfort_engine.hosts.comfy")
    monkeypatch.setitem(sys.modules, "nexfort_engine.hosts.comfy", package)
    monkeypatch.setitem(sys.modules, "nexfort_engine.hosts.comfy.model", host)
    (found,) = part(plugin, "cache_manager").listing()
    assert (found["id"], found["region"], found["kind"], found["size"]) == (entry.id, "blocks.0", "Block", 6)
    assert (found["family"], found["state"], found["shapes"]) == ("Flux", "ready", [])
    assert "secret" not in json.dumps(found)
    assert found["created"] == found["last_used"] and found["created"].endswith("Z")


@pytest.mark.comfy
@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("/home/anna/.cache/nexfort/x.so: cannot open", "…/x.so: cannot open"),
        ("could not write '/tmp/nexfort cache' (full)", "could not write '…/nexfort cache' (full)"),
        (r"C:\Users\anna\nexfort\a.dll is missing", "…/a.dll is missing"),
        (r"C:\Program Files\ComfyUI\user\a.dll is missing", "…/a.dll is missing"),
        (r"Access is denied: 'C:\\Users\\Anna Maria\\nexfort\\x.pyd'", "Access is denied: '…/x.pyd'"),
        ("D:/ComfyUI portable/python_embeded/x.dll, and more", "…/x.dll, and more"),
        (r"\\server\my share\nexfort\x.so", "…/x.so"),
        ("/home/Anna Maria/.cache/x.so is in /tmp/y", "…/x.so is in …/y"),
        ("/" * 50_000, "/" * 50_000),
        ("file:///home/anna/x", "file:…/x"),
        ("double_blocks.0 ran eager: 3/4 of it", "double_blocks.0 ran eager: 3/4 of it"),
        ("N/A, and/or", "N/A, and/or"),
    ],
)
def test_reasons_lose_their_paths(plugin: types.ModuleType, text: str, left: str) -> None:
    without = part(plugin, "told").without_paths
    assert without({"eager": [{"reason": text}], "cache_dir": "/x/y", "calls": 3}) == {
        "eager": [{"reason": left}],
        "calls": 3,
    }
