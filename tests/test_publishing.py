# SPDX-License-Identifier: Apache-2.0
"""What the registry is told and given: the metadata as comfy-cli reads them, and a package with all that is needed.

`comfy node validate` and `comfy node pack` do the same where comfy-cli is installed; it is not needed here. That the
package runs in a real ComfyUI is tested in test_server_routes.py, whose server has nothing else.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any

import packed
import pytest
import test_documents
import test_project

import nexfort_engine

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = packed.ROOT
# Those that comfy-cli knows; any other one that begins so is a mistake to it.
SYSTEMS = {"OS Independent", "Microsoft :: Windows", "POSIX :: Linux", "MacOS"}
ACCELERATORS = {"NVIDIA CUDA", "AMD ROCm", "Intel Arc", "NPU :: Huawei Ascend", "Apple Metal"}
PACKED = {
    *("CHANGELOG.md", "CONTRIBUTING.md", "DESIGN.md", "LICENSE", "README.md", "__init__.py", "pyproject.toml"),
    *("docs", "locales", "nexfort_engine", "nodes", "web", "workflows", "example_workflows", "subgraphs"),
}


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def after(classifiers: list[str], beginning: str) -> set[str]:
    return {one.removeprefix(beginning) for one in classifiers if one.startswith(beginning)}


# ---- metadata ----------------------------------------------------------------------------------------------


def test_the_project_is_described(told: dict[str, Any]) -> None:
    project = told["project"]
    assert re.fullmatch(r"[a-z][a-z0-9_-]{0,98}[a-z0-9]", project["name"]) and "comfyui" not in project["name"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", project["version"]) and project["version"] == nexfort_engine.__version__
    assert 20 <= len(project["description"]) <= 250
    assert project["requires-python"] == ">=3.10"
    for name in (project["readme"], *project["license-files"]):
        assert (ROOT / name).is_file(), name
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8") and project["license"] == "Apache-2.0"


def test_the_changelog_begins_with_this_version_and_has_a_line_a_change(told: dict[str, Any]) -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert versions[0] == told["project"]["version"] and len(versions) == len(set(versions))
    assert [one for one in versions if not re.fullmatch(r"\d+\.\d+\.\d+", one)] == []
    changes = [line for line in text.splitlines() if line.startswith("- ")]
    assert len(changes) > 50 and [line for line in text.splitlines() if line.startswith("  ")] == []
    assert [line for line in changes if len(line) > 140 or re.search(r"\d (?:ms|s|GiB|it/s|%)\b", line)] == []


def test_the_addresses_are_those_of_the_repository(told: dict[str, Any]) -> None:
    urls = told["project"]["urls"]
    assert set(urls) == {"Repository", "Documentation", "Issues"}
    assert all(url.startswith(urls["Repository"]) for url in urls.values())
    assert re.fullmatch(r"https://github\.com/[\w-]+/[\w-]+", urls["Repository"])


def test_classifiers_are_ones_that_the_registry_knows(told: dict[str, Any]) -> None:
    classifiers = told["project"]["classifiers"]
    assert after(classifiers, "Operating System :: ") <= SYSTEMS
    assert after(classifiers, "Environment :: GPU :: ") | after(classifiers, "Environment :: NPU :: ") <= ACCELERATORS
    assert all(one.startswith("Environment :: GPU :: ") for one in classifiers if one.startswith("Environment"))


def test_the_registrys_own_table_is_complete(told: dict[str, Any]) -> None:
    comfy = told["tool"]["comfy"]
    assert set(comfy) == {"PublisherId", "DisplayName", "Icon", "Banner", "requires-comfyui"}
    assert re.fullmatch(r"[a-z0-9-]+", comfy["PublisherId"]) and comfy["DisplayName"] == "Nexfort"
    assert re.fullmatch(r">=\d+\.\d+\.\d+", comfy["requires-comfyui"]), "with two numbers it is not taken"


@pytest.mark.parametrize(("key", "across", "most"), [("Icon", 1, 400), ("Banner", 21 / 9, 1260)])
def test_the_pictures_are_there_and_have_the_registrys_shape(
    told: dict[str, Any], key: str, across: float, most: int
) -> None:
    name = re.fullmatch(r"https://raw\.githubusercontent\.com/nexfort/nexfort/main/(.*)", told["tool"]["comfy"][key])
    assert name is not None
    content = (ROOT / name[1]).read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) < 100_000
    width, height = (int.from_bytes(content[place : place + 4], "big") for place in (16, 20))
    assert width == round(height * across) <= most


def test_it_is_found_by_what_people_look_for(told: dict[str, Any]) -> None:
    assert {"comfyui", "compile", "faster", "speed", "performance", "inductor"} <= set(told["project"]["keywords"])


def test_a_release_is_handed_to_the_registry() -> None:
    action = (ROOT / ".github" / "workflows" / "publish.yml").read_text(encoding="utf-8")
    assert "Comfy-Org/publish-node-action@" in action and "types: [published]" in action
    assert f"repository_owner == '{nexfort_engine.__name__.removesuffix('_engine')}'" in action


# ---- nothing that pip could do to a user's Python ----------------------------------------------------------


def test_the_plugin_installs_nothing(told: dict[str, Any]) -> None:
    """A pin of torch, or of what needs one, would have managers replace the user's build of it."""
    assert told["project"]["dependencies"] == [] and "optional-dependencies" not in told["project"]
    assert "dynamic" not in told["project"]
    for name in ("requirements.txt", "install.py", "prestartup_script.py", "setup.py", "setup.cfg"):
        assert not (ROOT / name).exists(), f"ComfyUI's managers or pip would run {name}"


def test_nothing_in_the_package_is_compiled() -> None:
    kinds = {PurePosixPath(name).suffix for name in packed.names()}
    assert kinds <= {".py", ".js", ".css", ".json", ".md", ".png", ".svg", ".toml", ".jpg", ".webp", ""}, kinds


# ---- the package -------------------------------------------------------------------------------------------


def test_the_package_holds_what_is_loaded_and_nothing_else() -> None:
    names = packed.names()
    assert {name.split("/")[0] for name in names} == PACKED
    everything = {name for name in packed.tracked() if name.split("/")[0] in PACKED}
    assert set(names) == everything, "a part of what is needed is left out"
    assert [name for name in packed.ignored() if not (ROOT / name).exists()] == [], ".comfyignore names what is gone"
    assert sum((ROOT / name).stat().st_size for name in names) < 10_000_000, "a package is fetched by everybody"


def test_mypy_reads_all_code_that_is_packed(told: dict[str, Any]) -> None:
    read = tuple(told["tool"]["mypy"]["files"])
    code = [name for name in packed.names() if name.endswith(".py")]
    assert [name for name in code if name not in read and not name.startswith(tuple(f"{one}/" for one in read))] == []


def test_what_is_packed_imports_nothing_that_is_not() -> None:
    left_out = {name.split("/")[0].removesuffix(".py") for name in packed.tracked()} - {
        name.split("/")[0] for name in packed.names()
    }
    assert {"tests", "benchmarks", "demo", "tools"} <= left_out
    found = [
        f"{name}:{line}: {module}"
        for name in packed.names()
        if name.endswith(".py")
        for module, line in test_project.imports(ROOT / name)
        if module.split(".")[0] in left_out
    ]
    assert not found


def test_the_packed_readme_leads_nowhere_outside() -> None:
    names = packed.names()
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    wanted = [target.split("#")[0] for target in test_documents.targets(text) if "://" not in target]
    missing = [one for one in wanted if one and not any(name == one or name.startswith(f"{one}/") for name in names)]
    assert not missing


def test_the_code_is_what_scanners_let_pass() -> None:
    """The registry refuses packages that run text as code or install others; nothing here does, in any file."""
    for name in packed.names():
        if not name.endswith(".py"):
            continue
        for node in ast.walk(ast.parse((ROOT / name).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "__import__"), f"{name}:{node.lineno}"
            if isinstance(node, ast.List):
                words = [one.value for one in node.elts if isinstance(one, ast.Constant)]
                assert not {"pip", "install"} <= set(words), f"{name}:{node.lineno} installs something"


@pytest.mark.parametrize("folder", ["locales", "web", "workflows", "example_workflows", "subgraphs"])
def test_what_comfyui_reads_besides_code_is_in_it(folder: str) -> None:
    on_disk = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*") if path.is_file()}
    unknown = {name for name in on_disk if not Path(name).name.startswith(".")} - set(packed.names())
    assert not unknown, "a file that is not tracked is in no package"


def test_the_form_for_problems_has_the_field_that_the_report_panel_fills_in() -> None:
    code = (ROOT / "web" / "help.js").read_text(encoding="utf-8")
    (name,) = re.findall(r"^const FORM = '([\w.]+)'", code, re.MULTILINE)
    (field,) = re.findall(r"URLSearchParams\(\{ template: FORM, (\w+) \}\)", code)
    form = (ROOT / ".github" / "ISSUE_TEMPLATE" / name).read_text(encoding="utf-8")
    assert re.findall(r"^    id: (\w+)$", form, re.MULTILINE) == ["what", "workflow", field]
    assert form.startswith("name: ") and "\ndescription: " in form and "\nbody:\n" in form
